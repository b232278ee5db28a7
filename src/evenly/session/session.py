"""Session: opens the world, prepares models, saves checkpoints, records the run, closes."""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, Unpack

import torch
from torch.utils.data import DataLoader, Dataset

from evenly.batches import (
    EvaluationFeed,
    EvaluationPart,
    Feed,
    FeedOptions,
    evaluation_part,
    feed,
    steps_per_epoch,
)
from evenly.checkpoints.averaged_model import save_average
from evenly.checkpoints.best import KeepBest, KeptCheckpoints
from evenly.checkpoints.full_state import TrainedModel
from evenly.checkpoints.resuming import apply, load_tracked, restore_random_state
from evenly.checkpoints.states import Stateful
from evenly.comm import FailureMonitor, rank_group_of
from evenly.errors import SpecError
from evenly.graph import Example
from evenly.launch import Place, find_place, open_world, pick_device
from evenly.nodes import Synchronized
from evenly.nodes.composition import compose_synchronized
from evenly.session.accumulation import AccumulatedBatch, Accumulation
from evenly.session.active_ranks import LINGER_S, ActiveRanks, LeftOut
from evenly.session.by_hand import regroup, survey_rank_group
from evenly.session.checkpointing import CheckpointSaver, OnError, require_saving
from evenly.session.epoch_loop import EpochLoop
from evenly.session.joining import require_one_world
from evenly.session.planning import (
    exchange_of,
    plan_run,
    require_count,
    require_epochs,
    require_evaluation,
    require_numbers,
)
from evenly.session.progress import ProgressDisplay
from evenly.session.rebalancing import attach_rebalancer
from evenly.session.reductions import Number, gather_values, mean_value, numbers_of
from evenly.session.run_clock import RunClock
from evenly.session.seeding import seed_program
from evenly.session.sharding import require_own_batches, shard_for
from evenly.session.stopping import RunInterrupted, StopAgreement
from evenly.spec import (
    Event,
    Every,
    EverySeconds,
    ExchangeWishes,
    Measured,
    Plan,
    Profile,
    RunStarted,
)
from evenly.spec.plan import counted

logger = logging.getLogger(__name__)

Setting = str | int | float | bool | None


class Session:
    """A run under torchrun, srun, mpirun or alone: a context manager with `plan`, `prepare` and `epochs` inside."""

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        device: str = "auto",
        nodes: Sequence[Sequence[int]] | None = None,
        seed: int = 0,
        checkpoint_every: int | Literal["epoch"] | None = "epoch",
        checkpoint_async: bool = True,
        checkpoint_errors: OnError = "raise",
        keep: int = 2,
        keep_best: KeepBest | None = None,
        resume: bool = True,
        timeout_s: float = 600.0,
        place: Place | None = None,
        progress: bool = True,
    ) -> None:
        """Opens nothing yet.

        Args:
            folder: for `run.jsonl`, the records of ranks and checkpoints; None writes nothing.
            device: `"auto"` (as `evenly launch --devices` says, else the GPU of the local rank, else the CPU),
                `"cpu"`, `"cuda"` or `"cuda:1"`.
            nodes: the ranks of each node; discovered if left out.
            seed: of the order of samples.
            checkpoint_every: a number of steps, `"epoch"`, or None to save only by `checkpoint()`.
            checkpoint_async: whether training goes on while a checkpoint is written; the end of the run, and
                `checkpoint()`, wait for it.
            checkpoint_errors: whether a checkpoint that cannot be written (a full disk, a read-only folder) ends the
                run (`"raise"`), or is logged and recorded (`"warn"`); the checkpoint before stays.
            keep: how many checkpoints stay on disk.
            keep_best: the name of a number that `log` gets, whose best checkpoint stays, too: `"accuracy"`, or
                `("loss", "min", 3)` for the three smallest.
            resume: whether to go on from the newest checkpoint in `folder`.
            timeout_s: how long a rank may wait for the others.
            place: this process among the others; found in the environment if left out.
            progress: whether rank 0 writes a line per epoch to stderr, and a progress bar if that is a terminal.
        """
        require_numbers(seed=seed, checkpoint_every=checkpoint_every, keep=keep)
        require_saving(checkpoint_async=checkpoint_async, checkpoint_errors=checkpoint_errors)
        self._folder = Path(folder) if folder is not None else None
        self._requested_device = device
        self._requested_nodes = nodes
        self._seed = seed
        self._keep = KeptCheckpoints(keep, keep_best, folder=self._folder)
        self._checkpoint_every = checkpoint_every
        self._checkpoint_async, self._checkpoint_errors = checkpoint_async, checkpoint_errors
        self._place = place
        self._resume = resume
        self._timeout_s = timeout_s
        self._monitor: FailureMonitor | None = None
        self._entered: ActiveRanks | None = None
        self._saver: CheckpointSaver | None = None  # of a run with a folder
        self._trained_models: list[TrainedModel] = []
        self._accumulation = Accumulation(self._trained_models)
        self._plan: Plan | None = None  # of the first model
        self._progress = ProgressDisplay(lambda: self._counters.all_samples, self._first_feed) if progress else None
        self._loop: EpochLoop | None = None  # once a model is prepared
        self._tracked, self._settings = dict[str, Stateful](), dict[str, Setting]()

    def __enter__(self) -> Self:
        self._closing = ExitStack()
        try:
            self._open(self._place or find_place())
        except BaseException as error:
            self._report(error)
            self._closing.close()
            raise
        return self

    def _open(self, place: Place) -> None:
        require_one_world()
        self._world = self._closing.enter_context(open_world(place, timeout_s=self._timeout_s))
        rank_group = rank_group_of(timeout_s=self._timeout_s)
        self.rank, self.world_size = rank_group.rank, rank_group.size
        self._monitor = FailureMonitor(rank_group.scoped("session"))
        self._closing.callback(self._monitor.close)
        self.device = pick_device(place, self._requested_device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        cluster = survey_rank_group(rank_group, self.device, timeout_s=self._timeout_s, parent=self._monitor)
        cluster = cluster if self._requested_nodes is None else regroup(cluster, self._requested_nodes)
        self._enter(
            ActiveRanks(
                rank_group,
                cluster,
                self._monitor,
                folder=self._folder,
                resume=self._resume,
                timeout_s=self._timeout_s,
                holding=self._closing,
            )
        )
        if self._progress is not None:
            self.listen(self._progress)
            self._closing.callback(self._progress.close)

    @property
    def _active_ranks(self) -> ActiveRanks:
        """The ranks that are active now."""
        if self._entered is None:
            raise SpecError(
                "a session was asked to plan or prepare, but it is not open. Use it inside its block: "
                "with evenly.Session() as session."
            )
        return self._entered

    def _enter(self, active_ranks: ActiveRanks) -> None:
        """Continues with the ranks of `active_ranks`."""
        if active_ranks is not self._entered:
            self._entered, self.cluster = active_ranks, active_ranks.cluster
            self.rank, self.world_size = active_ranks.rank_group.rank, active_ranks.rank_group.size
            self._gatherer = active_ranks.gatherer
            self._recorder = active_ranks.recorder
            self._counters = active_ranks.counters
            self._closing.callback(active_ranks.close)
            if active_ranks.checkpoints is not None:
                self._recorder.is_optional = self._checkpoint_errors == "warn"
                self._saver = CheckpointSaver(
                    active_ranks.checkpoints,
                    self._trained_models,
                    self._tracked,
                    self._counters,
                    self._recorder,
                    keep=self._keep,
                    is_async=self._checkpoint_async,
                    on_error=self._checkpoint_errors,
                )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        left_out, is_interrupted = isinstance(error, LeftOut), isinstance(error, RunInterrupted)
        error = None if left_out or is_interrupted else error
        try:
            if isinstance(error, RuntimeError) and self._monitor is not None:
                self._monitor.check()  # a lost rank may be the cause of torch's error
            if error is None and not left_out:
                if self._loop is not None:
                    self._loop.require_ended()
                if not is_interrupted:
                    self.finish()
                if self._saver is not None:
                    self._saver.settle()
                sums = self._gatherer.gather(self._counters.sums(), "the end of the run")
                self._counters.record_totals(sums, self.cluster.rank_lists())
        except BaseException as problem:
            error = problem
            raise
        finally:
            if error is not None:
                self._report(error)
                self._recorder.record_failure(self._counters.step, error)
            try:
                if self._saver is not None:
                    self._saver.close()
            finally:
                self._closing.close()
        return left_out

    def plan(
        self,
        model: torch.nn.Module | None = None,
        example: Example | None = None,
        *,
        batch_size: int | None = None,
        global_batch: int | None = None,
        shares: Sequence[float] | None = None,
        cut_batch: bool = False,
        every: Every | None = None,
        profile: Profile | Literal["quick", "thorough"] = "quick",
        **exchange: Unpack[ExchangeWishes],
    ) -> Plan:
        """Returns the plan: equal batches of `batch_size`, or `global_batch` divided by measured speeds.

        With `shares` the layers of `model` are cut over as many ranks of a node, which take one batch like `example`.
        With `global_batch` devices are measured with `model` and `example`, unless `profile` is given, and may be left
        out. `every` is an epoch if left out; with `global_batch` as many steps as let exchanges take little time.
        `exchange` says how nodes exchange (overlap, codec, ...), as in `evenly.synchronize`.
        """
        settings = exchange_of(exchange, timeout_s=self._timeout_s)
        if (
            global_batch is not None
            and not isinstance(profile, Profile)
            and self._progress is not None
            and self.is_main
        ):
            self._progress.announce(f"measuring {counted(self.world_size, 'device')} and the links between them")
        return plan_run(
            self._active_ranks,
            self.device,
            model,
            example,
            every,
            profile,
            settings,
            batch_size=batch_size,
            global_batch=global_batch,
            shares=shares,
            cut_batch=cut_batch,
        )

    def prepare(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Dataset[object] | Iterable[object] | None = None,
        *,
        plan: Plan,
        name: str = "model",
        count: Callable[..., float] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        find_unused_parameters: bool = False,
        verify: bool = True,
        **loading: Unpack[FeedOptions],
    ) -> tuple[Synchronized, torch.optim.Optimizer, Any]:
        """Returns the module to call, the optimizer and this rank's batches, resumed from the newest checkpoint if any.

        Args:
            model: the network; it is moved to the session's device.
            optimizer: any torch optimizer over its parameters.
            dataset: a dataset or stream; left out for a second model of the same run (a GAN's), whose loader is None.
            plan: who does what.
            name: tells the models of one run apart in checkpoints.
            count: a function of the arguments of `forward` that returns the samples of a batch.
            scaler: the GradScaler of the loop, if it has one.
            find_unused_parameters: as in torch's DDP.
            verify: whether a network that the plan cuts is compared with the uncut one on its first batch.
            loading: what `evenly.feed` takes: `shuffle`, `drop_last`, `num_workers`, `collate_fn`, `pin_memory`.
        """
        require_epochs(plan, self._checkpoint_every, models=len(self._trained_models))
        active_ranks, plan = self._active_ranks.take_part(plan)
        if active_ranks is not self._active_ranks:
            self._world.restrict(active_ranks.launched_ranks, timeout_s=self._timeout_s)
        self._enter(active_ranks)
        if any(trained_model.name == name for trained_model in self._trained_models):
            raise SpecError(f"a model named {name!r} is prepared already. Give each model of a run its own name=.")
        model.to(self.device)
        part = shard_for(model, optimizer, plan, self._active_ranks, timeout_s=self._timeout_s, verify=verify)
        batches = None
        if dataset is not None:
            require_own_batches(model, self.world_size)
            options: FeedOptions = {"seed": self._seed, **loading}
            batches = feed(dataset, plan, rank=self.rank, device=self.device, **options)
            batches.between.append(self._between_steps)
        synchronized = compose_synchronized(
            part,
            optimizer,
            rank_group=self._active_ranks.rank_group,
            cluster=self.cluster,
            period=plan.period,
            exchange=plan.exchange,
            count=count or (None if batches is None else partial(batches.samples_of, part)),
            scaler=scaler,
            parent=self._active_ranks.monitor,
            find_unused_parameters=find_unused_parameters,
        )
        trained_model = TrainedModel(name, synchronized, optimizer, batches)
        if (restored := self._active_ranks.restored()) is not None:
            apply(restored, trained_model)
        self._register(trained_model, plan)
        return synchronized, optimizer, batches

    def track(self, **things: Stateful) -> None:
        """Saves objects with `state_dict` and `load_state_dict` (schedulers, a GradScaler) in the checkpoints.

        In a run that resumes their states are loaded at once. `CheckpointError` if the checkpoint has no such name; an
        object that is new in this start is tracked inside the loop over `epochs`.
        """
        load_tracked(self._active_ranks.restored(), things)
        self._tracked.update(things)

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the epochs still to do; exchanges, records and saves at the end of each, and finishes the run.

        Left early, by `break`, `return` or `stop()`, the run ends in the same way: with an exchange and a checkpoint,
        and a second start trains nothing. After SIGTERM or SIGUSR1 all ranks save a checkpoint after the same step and
        the program ends; a second start resumes there.
        """
        if self._loop is None:
            raise SpecError("epochs() was called before prepare(): nothing would be trained. Prepare a model first.")
        require_count("epochs()", count, least=0)
        loop = self._loop
        loop.require_first()
        if (restored := self._active_ranks.restored()) is not None:
            loop.epoch = int(restored["manifest"]["epoch"])
            loop.has_ended = count <= restored["manifest"].get("ended_epochs", 0)
            restore_random_state(restored)
            self._active_ranks.begin(loop.epoch, count, has_ended=loop.has_ended)
        self._counters.start()
        if self._progress is not None:
            self._progress.begin(count)
        yield from loop.run(count)

    def stop(self, reason: str = "stop() was called") -> None:
        """Ends the run early: all ranks stop after the same step, exchange and save, and `epochs` yields no more.

        Any rank may call it, at any point of the loop; the others need not.
        """
        if self._loop is None:
            raise SpecError("stop() was called, but nothing is trained yet. Call it after prepare(), in the loop.")
        self._loop.stopping.request(reason)

    def finish(self) -> None:
        """Makes the last exchange of every model, so that all ranks have the same parameters."""
        for trained_model in self._trained_models:
            trained_model.model.finish()

    def checkpoint(self) -> Path | None:
        """Saves the run now, on all ranks together, and returns the folder once it is complete.

        None with `checkpoint_errors="warn"`, if it could not be written.
        """
        return self._save()

    def _save(self, ended_epochs: int | None = None, *, wait: bool = True) -> Path | None:
        if self._active_ranks.checkpoints is None or self._saver is None:
            raise SpecError("a checkpoint was asked for, but the session has no folder. Use Session('runs/name').")
        epoch = 0
        if self._loop is not None:
            self._loop.saved_step, epoch = self._counters.step, self._loop.epoch
        return self._saver.save(epoch, ended_epochs=ended_epochs, wait=wait)

    def save(self, path: str | Path, *, name: str | None = None) -> Path:
        """Writes the weights of a model, averaged over all nodes, to one file; all ranks call it together.

        Args:
            path: a file that ends in `.safetensors`, `.pt` or `.pth`, or a folder that ends in a slash, for
                torch.distributed.checkpoint. What is there is replaced once the new one is complete.
            name: the name of the model, if several are prepared.
        """
        return save_average(path, self._trained_models, name=name, gatherer=self._gatherer, rank=self.rank)

    def log(self, **values: Number | None) -> None:
        """Records numbers, also tensors of one, such as losses and accuracies; those of rank 0 are written."""
        if self.is_main:
            numbers = numbers_of(values)
            self._recorder.record(Measured, step=self._counters.step, values=numbers)
            self._keep.log(self._counters.step, numbers)

    def describe(self, **settings: Setting) -> None:
        """Adds settings of the program to the record of the run."""
        self._settings.update(settings)

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Calls `listener` with every event, on rank 0."""
        self._recorder.listeners.append(listener)

    @property
    def run_clock(self) -> RunClock:
        """The time of the run, which `pause()` and `resume()` leave out of its record."""
        return self._recorder.run_clock

    def sum(self, *numbers: float) -> list[float]:
        """Returns the sums of each number over all ranks."""
        self._wait_for_all_nodes()
        rows = self._gatherer.gather([float(number) for number in numbers], f"a sum of {len(numbers)} over ranks")
        return [float(sum(column)) for column in zip(*rows, strict=True)]

    def gather(self, value: Any) -> list[Any]:
        """Returns the value of every rank: a tensor of any shape, a number, a text, or lists and dicts of these.

        All ranks call it together. Tensors come back on the CPU.
        """
        self._wait_for_all_nodes()
        return gather_values(self._gatherer, value, "a gathering of values")

    def mean(self, value: Number, *, count: float | None = None) -> Any:
        """Returns the mean over all ranks, weighted by the samples `count` behind each value; equal if left out.

        All ranks call it together. Of a tensor with dims it is the mean of each element.
        """
        self._wait_for_all_nodes()
        return mean_value(self._gatherer, value, count)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self._active_ranks.rank_group.rank == 0

    def print(self, *values: object, sep: str = " ", end: str = "\n") -> None:
        """Prints on rank 0 only."""
        if self.is_main:
            sys.stdout.write(sep.join(map(str, values)) + end)
            sys.stdout.flush()

    def seed_everything(self, seed: int) -> None:
        """Seeds Python, numpy and torch, alike on all ranks, and the order of samples of loaders made afterwards."""
        seed_program(seed)
        self._seed = seed

    def accumulate(self, count: int, *, is_last: bool = False) -> AbstractContextManager[AccumulatedBatch]:
        """Opens a block for one of `count` batches that make one step, weighted by their samples.

        Inside the block call the model and `batch.backward(loss)`; step after it if `batch.is_last`, which is also true
        of the last batch of an epoch. `is_last` ends the step early: for a loader that is not the session's.
        """
        return self._accumulation.batch(count, is_last=is_last)

    def feed(
        self,
        dataset: Dataset[object] | Iterable[object],
        *,
        train: bool = False,
        batch_size: int | None = None,
        **loading: Unpack[FeedOptions],
    ) -> EvaluationFeed:
        """Returns this rank's batches of a dataset for evaluation: over all ranks every sample comes once.

        It can be made before and after `prepare`. Ranks take samples in proportion to the plan.

        Args:
            dataset: a map-style dataset, a stream, or a DataLoader.
            train: False; `prepare` makes the loader to train with.
            batch_size: most samples of a batch; if left out those of the DataLoader, of this rank's role in the plan,
                or 32.
            loading: as in `prepare`; samples are not shuffled by default.
        """
        require_evaluation(train=train)
        size = dataset.batch_size if batch_size is None and isinstance(dataset, DataLoader) else batch_size
        options: FeedOptions = {"seed": self._seed, **loading}
        return EvaluationFeed(dataset, lambda: self._evaluation_part(size), device=self.device, **options)

    def steps_per_epoch(
        self,
        dataset: Dataset[object] | Iterable[object],
        plan: Plan,
        *,
        accumulate: int = 1,
        **loading: Unpack[FeedOptions],
    ) -> int:
        """Returns the optimizer steps of an epoch, before `prepare`: for schedulers that need their number.

        Args:
            dataset: what is given to `prepare`.
            plan: what is given to `prepare`.
            accumulate: the batches of a step.
            loading: what is given to `prepare`.
        """
        return steps_per_epoch(dataset, plan, accumulate=accumulate, **loading)

    def _evaluation_part(self, batch_size: int | None) -> EvaluationPart:
        return evaluation_part(self._plan, rank=self.rank, ranks=self.world_size, batch_size=batch_size)

    def _first_feed(self) -> Feed | None:
        return self._trained_models[0].feed if self._trained_models else None

    def _wait_for_all_nodes(self) -> None:
        for trained_model in self._trained_models:
            trained_model.model.wait_for_all_nodes()

    def _register(self, trained_model: TrainedModel, plan: Plan) -> None:
        self._trained_models.append(trained_model)
        self._plan = self._plan or plan
        self._closing.callback(
            lambda: trained_model.close(is_interrupted=self._loop is not None and self._loop.is_interrupted)
        )
        self._counters.watch(trained_model.model)
        if trained_model.feed is not None:
            feed, end_epoch = trained_model.feed, trained_model.model.end_epoch
            feed.on_end.append(lambda: end_epoch(feed.epoch))
        attach_rebalancer(trained_model, plan, self._active_ranks)
        if len(self._trained_models) == 1:
            self._counters.step = trained_model.model.schedule.step
            loop = self._loop = self._new_loop(plan)
            self._counters.count_steps(trained_model, lambda: loop.epoch, ranks=self.world_size)
            fields = {
                "settings": self._settings,
                "resumed_step": self._counters.step,
                **self._active_ranks.participation,
            }
            self._recorder.record(RunStarted, name=self._folder.name if self._folder else "run", plan=plan, **fields)

    def _between_steps(self) -> None:
        if self._loop is not None:
            self._loop.between_steps()
            if self._saver is not None:
                self._saver.look()

    def _new_loop(self, plan: Plan) -> EpochLoop:
        nodes, is_timed = self.cluster.rank_lists(), isinstance(plan.period, EverySeconds)
        in_step = next(node for node in nodes if self.rank in node) if is_timed else range(self.world_size)
        return EpochLoop(
            self._trained_models,
            self._counters,
            self._recorder,
            stopping=StopAgreement(self._active_ranks.monitor, ranks=in_step, timeout_s=self._timeout_s),
            save=self._save if self._folder is not None else None,
            saves_every=self._checkpoint_every,
            report=self._report,
            is_main=self.is_main,
        )

    def _report(self, error: BaseException) -> None:
        for trained_model in self._trained_models:
            trained_model.model.report(error)
        if self._monitor is not None:
            self._monitor.report(error)
            if self.rank == 0 and self.world_size > 1:
                time.sleep(LINGER_S)
