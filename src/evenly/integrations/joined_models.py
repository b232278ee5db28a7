"""The networks that a tool trains on this rank, joined with those of the other ranks: one exchange for each of them."""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from evenly.checkpoints import Checkpoints, KeptCheckpoints, TrainedModel, apply
from evenly.checkpoints import folder as folders
from evenly.checkpoints.states import Stateful
from evenly.comm import FailureMonitor, ObjectGatherer, close_groups, open_group, rank_group_of
from evenly.errors import CheckpointError, SpecError
from evenly.nodes import Synchronized
from evenly.nodes.composition import compose_synchronized
from evenly.session.active_ranks import LINGER_S
from evenly.session.by_hand import regroup, survey_rank_group
from evenly.spec import AnyPeriod, EverySeconds, Exchange


class JoinedModels:
    """The models of one training run in the default process group; all ranks call each method together."""

    def __init__(
        self, device: torch.device, *, nodes: Sequence[Sequence[int]] | None = None, timeout_s: float = 600.0
    ) -> None:
        self.models: dict[str, Synchronized] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._timeout_s = timeout_s
        self.rank_group = rank_group_of(timeout_s=timeout_s)
        with ExitStack() as opened:
            self._monitor = FailureMonitor(self.rank_group.scoped("integration"))
            opened.callback(self._monitor.close)
            cluster = survey_rank_group(self.rank_group, device, timeout_s=timeout_s, parent=self._monitor)
            self._cluster = cluster if nodes is None else regroup(cluster, nodes)
            scoped = self.rank_group.scoped("integration_files")
            group = open_group(scoped, "world", range(self.rank_group.size), backend="gloo", timeout_s=timeout_s)
            opened.callback(lambda: close_groups([group], failed=self._monitor.has_failed))
            self.gatherer = ObjectGatherer(self._monitor, group, timeout_s=timeout_s)
            self._closing = opened.pop_all()

    @property
    def nodes(self) -> list[list[int]]:
        """The ranks of each node."""
        return self._cluster.rank_lists()

    def join(
        self,
        name: str,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        period: AnyPeriod,
        exchange: Exchange,
        count: Callable[..., float] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        find_unused_parameters: bool = False,
    ) -> Synchronized:
        """Returns `module` synchronized with the other ranks, under a name that its checkpoints have."""
        model = self.models[name] = compose_synchronized(
            module,
            optimizer,
            rank_group=self.rank_group,
            cluster=self._cluster,
            period=period,
            exchange=exchange,
            count=count,
            scaler=scaler,
            find_unused_parameters=find_unused_parameters,
            parent=self._monitor,
        )
        self._optimizers[name] = optimizer
        return model

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Puts the averages over all nodes into the models for the block."""
        shown = ExitStack()
        try:
            with torch.inference_mode(mode=False):  # tensors that exchanges keep are changed outside of the mode, too
                for model in self.models.values():
                    shown.enter_context(model.agreed())
            yield
        finally:
            with torch.inference_mode(mode=False):
                shown.close()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients in the block without averaging them."""
        with ExitStack() as stack:
            for model in self.models.values():
                stack.enter_context(model.no_sync())
            yield

    def end_epoch(self, epochs: int | None = None) -> None:
        """Marks the end of a pass over the data, the number `epochs` if that is known; may be called twice."""
        for model in self.models.values():
            model.end_epoch(epochs)

    def finish(self) -> None:
        """Makes the last exchanges: all ranks end with the same models."""
        for model in self.models.values():
            model.finish()

    def report(self, error: BaseException) -> None:
        """Reports to all other ranks that this one failed."""
        for model in self.models.values():
            model.report(error)
        self._monitor.report(error)
        if self.rank_group.rank == 0 and self.rank_group.size > 1:
            time.sleep(LINGER_S)  # rank 0 may host the store, in which the others read it

    def close(self, *, may_differ: bool = False) -> None:
        """Closes connections and threads; the plain networks stay."""
        for model in self.models.values():
            model.close(may_differ=may_differ)
        self.models, self._optimizers = {}, {}
        self._closing.close()

    @property
    def step(self) -> int:
        """The steps of the first model."""
        return next(iter(self.models.values())).schedule.step

    def save(self, root: Path, tracked: Mapping[str, Stateful] | None = None) -> int:
        """Writes the state of all nodes and ranks into the folder `root`; returns the step that it is of.

        Inside `agreed()` these are the own values of each node. An older state in the folder stays until `keep_only`.
        """
        with ExitStack() as stack, torch.inference_mode(mode=False):
            for model in self.models.values():
                stack.enter_context(model.own_state())
                model.prepare_checkpoint()
            step = self.step
            self._checkpoints(root).save(step, self._trained(), tracked or {}, epoch=0, keep=KeptCheckpoints(2))
        return step

    def keep_only(self, root: Path, step: int) -> None:
        """Removes all states in the folder `root` but that of `step`."""
        if self.leads:
            for path in folders.checkpoints(root):
                if path.name != _name(step):
                    shutil.rmtree(path, ignore_errors=True)

    def newest(self, root: Path) -> int | None:
        """Returns the step of the newest state in the folder `root` that all ranks see; None if there is none."""
        common = self._checkpoints(root).common()
        return folders.step_of(common[-1]) if common else None

    def load(self, root: Path, step: int) -> None:
        """Loads the state of `step` that `save` has written; on other nodes it is merged to the average."""
        is_there = self.gatherer.gather((root / _name(step)).is_dir(), "look for the state of all nodes")
        if not all(is_there):
            missing = [rank for rank, has_it in enumerate(is_there) if not has_it]
            raise CheckpointError(
                f"a run was to go on from a checkpoint of step {step}, but ranks {missing} do not see the states of "
                f"the nodes, which were saved in {root / _name(step)}. Bring that folder, or load only the weights."
            )
        state = self._checkpoints(root).load(root / _name(step))
        for trained_model in self._trained():
            apply(state, trained_model)

    def _trained(self) -> list[TrainedModel]:
        return [TrainedModel(name, model, self._optimizers[name], None) for name, model in self.models.items()]

    def _checkpoints(self, root: Path) -> Checkpoints:
        return Checkpoints(root, self.gatherer, rank=self.rank_group.rank, nodes=self.nodes)

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of its node."""
        return any(ranks[0] == self.rank_group.rank for ranks in self.nodes)


def _name(step: int) -> str:
    return f"step-{step:09d}"


def nodes_folder(checkpoint: str | Path) -> Path:
    """Returns the folder beside a tool's checkpoint in which the states of all nodes are.

    >>> nodes_folder("runs/last.ckpt").name
    'last.ckpt.nodes'
    """
    text = str(checkpoint)
    if "://" in text:
        raise SpecError(
            f"a checkpoint was to be saved at {text}, but the states of the nodes are files of a file system. Give a "
            "folder of this machine, or save weights only."
        )
    return Path(f"{text}.nodes")


def require_steps(period: AnyPeriod, tool: str) -> None:
    """Raises `SpecError` for periods in seconds, in which nodes would make unequal numbers of steps."""
    if isinstance(period, EverySeconds):
        raise SpecError(
            f"every='{period.seconds:g}s' was asked for under {tool}, whose loops call collectives of all ranks after "
            "equal numbers of steps, and nodes would make unequal numbers. Give a number of steps, 'epoch' or '2%', "
            "and larger batches to fast nodes."
        )


@contextmanager
def reporting(models: "JoinedModels") -> Iterator[None]:
    """Reports an error in the block to the other ranks before it is raised."""
    try:
        yield
    except BaseException as error:
        with suppress(Exception):
            models.report(error)
        raise
