"""The module that trains by node-based communications.

Gradients are averaged inside a node at every step, parameters across nodes every K' steps.
Reference: Moreno-Alvarez, Paoletti, Cavallaro, Haut, TNNLS 2023, 10.1109/TNNLS.2023.3309735.
"""

import logging
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, Unpack

import torch
from torch.utils.data import Dataset

from evenly._torch.autograd import in_backward
from evenly._torch.scaler import watch_scaler
from evenly.batches.dealt import DealtFeed
from evenly.batches.loading import LoaderOptions
from evenly.comm import CollectiveWaiter, FailureMonitor, Groups, require_same
from evenly.comm.blocks.replicas import shard_group_of
from evenly.errors import NonFiniteError, SpecError
from evenly.exchange.elastic import ElasticMembership
from evenly.exchange.exchange_state import ExchangeState, Progress
from evenly.exchange.exchanger import Exchanger
from evenly.exchange.membership import Membership
from evenly.exchange.pending import ExchangeSummary
from evenly.exchange.replica_exchange import ReplicaExchange
from evenly.exchange.tensors.averaged_tensors import require_resettable
from evenly.gradients import (
    DdpGradients,
    FsdpGradients,
    Gradients,
    LocalGradients,
    ShardedGradients,
    SingleRankGradients,
    Verdict,
    counted_samples,
    leading_dim,
)
from evenly.nodes.checks import require_dense, require_own_steps, require_trainable
from evenly.nodes.closures import Arguments, has_closure, with_mean_loss
from evenly.nodes.signature import describe
from evenly.nodes.state_reads import StateReadWarning
from evenly.nodes.torch_shards import TorchShards
from evenly.nodes.trained_parameters import ChangeLog, TrainedParameters
from evenly.schedule.period_timer import PeriodTimer
from evenly.schedule.step_clock import StepClock
from evenly.schedule.step_counter import Schedule
from evenly.spec import AnyPeriod, BufferPolicy, EveryGradient, EverySteps, Exchange
from evenly.spec.plan import counted

logger = logging.getLogger(__name__)

Count = Callable[..., float]


class Synchronized(torch.nn.Module):
    """`module` on this rank, synchronized with the other ranks of its node and, every period, with the other nodes.

    Call it like the module itself. `module` is the plain network, for saving and for its attributes.
    """

    _nonfinite_since: int | None = None  # exchanges before the first of the steps that are left out

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        groups: Groups,
        membership: Membership,
        replica_exchange: ReplicaExchange,
        period: AnyPeriod,
        exchange: Exchange,
        monitor: FailureMonitor,
        count: Count | None = None,
        scaler: torch.amp.GradScaler | None = None,
        find_unused_parameters: bool = False,
        period_timer: PeriodTimer | None = None,
        torch_shards: TorchShards | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.schedule = Schedule(period, exchange.fragments, least=exchange.least_adaptive_steps)
        self.on_step: list[Callable[[int, float], None]] = []  # called with the step and the samples behind it
        self.batch_samples: float | None = None  # of the last forward with gradients
        self._optimizer = optimizer
        self._settings = exchange
        self._groups = groups
        self._membership = membership
        self._replica_exchange = replica_exchange
        self._count = count or leading_dim
        self._closed = self._was_resharded = self._is_in_agreed = self._is_being_saved = False
        self._global_gradients = isinstance(period, EveryGradient)
        self._gradient_ranks = tuple(range(groups.rank_group.size)) if self._global_gradients else groups.ranks
        self._scaler = scaler
        self._monitor = monitor
        self._period_timer = period_timer
        self._torch_shards = torch_shards
        try:
            self._check_and_broadcast(f"{period!r}, {exchange!r}, nodes {groups.nodes}")
            self._trained = TrainedParameters(module, optimizer)
            in_step = period_timer is None and not self._global_gradients
            self._change_log = ChangeLog(monitor, self.schedule, compares_nodes=in_step and len(groups.nodes) > 1)
            self._gradients = self._make_gradients(find_unused_parameters=find_unused_parameters)
            self.clock = StepClock(next(module.parameters(), torch.empty(0)).device)
            self._gradients.on_backward_done = self.clock.end
            self._shard_group = shard_group_of(module)
            if self._shard_group is not None:
                self._shard_group.watch(self.clock)
            self._exchanger = Exchanger(
                module,
                optimizer,
                self.schedule,
                groups=groups,
                membership=membership,
                replica_exchange=replica_exchange,
                settings=exchange,
                monitor=monitor,
                global_gradients=self._global_gradients,
                take_finite_check=self._take_finite_check,
            )
            self._exchanger.reset_anchors()
            if membership.is_elastic:
                self._exchanger.join()
        except BaseException as error:
            self._abandon(error)
            raise
        state_hook = module.register_state_dict_pre_hook(StateReadWarning(self._steps_apart))
        self._removers = [
            optimizer.register_step_pre_hook(self._before_step).remove,
            optimizer.register_step_post_hook(self._after_step).remove,
            watch_scaler(scaler, optimizer, steps=lambda: self.schedule.step, on_skip=self._on_scaler_skip),
            state_hook.remove,
        ]
        if groups.averages_parameters and not self._global_gradients:
            self._removers.append(weakref.finalize(self, _warn_if_unfinished, self.schedule, monitor).detach)

    def _abandon(self, error: BaseException) -> None:
        """Closes what `__init__` had opened before this error."""
        self._monitor.report(error)
        if (gradients := getattr(self, "_gradients", None)) is not None:
            gradients.close()
        if (exchanger := getattr(self, "_exchanger", None)) is not None:
            exchanger.close(may_differ=True)
        self._monitor.close()
        self._membership.close()
        self._replica_exchange.close(failed=True)
        self._groups.close(failed=True)

    def _steps_apart(self) -> int:
        """Returns the steps that nodes have made since they held the same parameters; 0 inside `agreed()`."""
        averages = self._groups.averages_parameters and not self._global_gradients
        return self.schedule.since if averages and not self._is_in_agreed and not self._is_being_saved else 0

    @contextmanager
    def being_saved(self) -> Iterator[None]:
        """Lets the state be read without a warning that nodes differ: a checkpoint holds the states of all nodes."""
        self._is_being_saved = True
        try:
            yield
        finally:
            self._is_being_saved = False

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Runs the module; with gradients enabled the batch counts as this rank's part of the step."""
        self._monitor.check()
        self._exchanger.check()
        self.advance_after_skipped_step()
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        if self._closed:
            raise SpecError("a synchronized model was called to train after close(). Train the plain network: .module.")
        self._gradients.step = self.schedule.step + 1
        try:
            is_between_steps = not in_backward() and not self._gradients.has_open_forward
            if is_between_steps and (self._trained.is_to_be_checked or self._change_log.has_notes):
                self._follow_changes()  # not where an activation checkpoint recomputes a forward
            self.clock.begin(self._gradients.step)
            samples = counted_samples(self._count, args, kwargs)
        except Exception as error:
            self._monitor.report(error)
            raise
        object.__setattr__(self, "batch_samples", samples)  # torch's own way looks for parameters and modules first
        return self._gradients.forward(samples, *args, **kwargs)

    def _follow_changes(self) -> None:
        """Goes on after parameters were frozen or unfrozen, or groups added to the optimizer, between two steps.

        All ranks that average gradients with each other come here before the same backward.
        """
        self._reshard()
        self._trained.require_resumed()
        if self._trained.have_changed:
            if self._groups.rank_group.size > 1:
                changes, lines = self._trained.changes(), describe(self.module, self._optimizer, "")
                self._change_log.agree(changes, lines, self._gradient_ranks, timeout_s=self._settings.timeout_s)
                require_dense(self.module)
            self._trained.require_known()
            require_trainable(self.module, self._optimizer)
            require_resettable(self._optimizer, self._settings)
            before = self._trained.names
            self._trained.read()
            if self._trained.names != before:
                self._gradients.follow_parameters()
                self._exchanger.follow_parameters(self._trained.names)
        self._change_log.require_same_as_nodes()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuses to be copied or pickled."""
        raise SpecError(
            "a synchronized model was to be copied or pickled, but it holds connections to other ranks. Copy or save "
            "the plain network, .module; inside agreed() it is the average of all nodes."
        )

    def deal(
        self,
        dataset: Dataset[object] | Iterable[object],
        *,
        batch_size: int | Sequence[int],
        seed: int = 0,
        shuffle: bool | None = None,
        sampler: Iterable[object] | None = None,
        **loading: Unpack[LoaderOptions],
    ) -> DealtFeed:
        """Returns this rank's batches in an elastic run: over all nodes every sample is trained once in each epoch.

        Nodes get samples in proportion to their measured speed, for `every` steps at a time; then they exchange. What
        a lost node had is dealt to the others. Iterate over it once for each epoch.

        Args:
            dataset: the same on all nodes; map-style, or a stream that all read in the same order.
            batch_size: samples of each rank of this node in a step.
            seed: for the order, the same on all nodes.
            shuffle: whether samples are shuffled; yes if left out, unless there is a sampler or a stream.
            sampler: gives the order of a map-style dataset.
            loading: options of torch's DataLoader.
        """
        membership, period = self._membership, self.schedule.period
        if not isinstance(membership, ElasticMembership):
            raise SpecError("deal() was called, but this run is not elastic. Use evenly.feed, or a sampler of torch.")
        if not isinstance(period, EverySteps) or self._settings.overlap:
            raise SpecError(
                f"deal() was called with every={period!r} and overlap={self._settings.overlap}: samples are dealt for "
                "a number of steps, after which training waits for an exchange. Give every=K, without overlap."
            )
        group = self._groups.rank_group
        sizes = [batch_size] * group.size if isinstance(batch_size, int) else list(batch_size)
        feed = DealtFeed(
            dataset,
            node=membership.node,
            rank=group.rank,
            samples=sizes,
            period_samples=period.steps * sum(sizes),
            seed=seed,
            shuffle=shuffle,
            sampler=sampler,
            device=next(self.module.parameters()).device,
            **loading,
        )
        feed.meet = self._meet
        membership.samples = feed
        self._count = partial(feed.samples_of, self.module)
        self.schedule.stop_counting()
        return feed

    def _meet(self) -> None:
        """Makes an exchange when the samples that were dealt are trained."""
        self._require_outside_agreed("an exchange")
        self.advance_after_skipped_step()
        self._exchanger.exchange(range(self.schedule.fragments), waits=True)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients without averaging them, as DDP's `no_sync` does."""
        with self._gradients.paused():
            yield

    def end_epoch(self, epochs: int | None = None) -> None:
        """Marks the end of a pass over the data; exchanges if the period is one of epochs and over.

        `epochs` is the number of passes that have ended; calls are counted if it is left out.
        """
        self._require_outside_agreed("end_epoch()")
        self._reshard()
        self.advance_after_skipped_step()
        if self._period_timer is not None:
            self.wait_for_all_nodes()
        elif self.schedule.due_at_epoch_end(epochs):
            self._exchanger.exchange(range(self.schedule.fragments))

    def finish(self) -> None:
        """Makes the last exchange of a run, so that all ranks end with the same model."""
        self._require_outside_agreed("finish()")
        self._reshard()
        self.advance_after_skipped_step()
        if not self._groups.is_alone:
            self._exchanger.finish()

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Puts the average over all nodes into the module for evaluation; restores each node's state afterwards.

        With periods in seconds, and in an elastic run, all nodes make an exchange first, which stays.
        """
        if self._is_in_agreed:  # nested blocks see the same average
            yield
            return
        self._reshard()
        self.advance_after_skipped_step()
        self.wait_for_all_nodes()
        with self._exchanger.averaged():
            self._is_in_agreed = True
            try:
                yield
            finally:
                self._is_in_agreed = False
                self._reshard()

    @contextmanager
    def own_state(self) -> Iterator[None]:
        """Inside `agreed()`, puts this node's own state back for the block, to save a checkpoint; nothing is sent.

        Outside of `agreed()` it does nothing.
        """
        is_in_agreed = self._is_in_agreed
        with self._exchanger.own_values():
            self._is_in_agreed = False
            try:
                yield
            finally:
                self._is_in_agreed = is_in_agreed

    def accept_weights(self) -> None:
        """Takes weights that were written into the module by hand as the values that all nodes agreed on.

        All ranks call it together, after they wrote the same values. `load_state_dict` is detected without it.
        """
        self._require_outside_agreed("accept_weights()")
        self._reshard()
        self._exchanger.take_loaded(everything=True)

    def _require_outside_agreed(self, what: str) -> None:
        if self._is_in_agreed:
            raise SpecError(f"{what} was called inside agreed(), where the model is an average. Leave the block first.")

    def close(self, *, may_differ: bool = False) -> None:
        """Removes the hooks and ends the background thread; the plain network stays in `module`.

        Logs a warning if nodes hold different parameters, unless they `may_differ`.
        """
        self._closed = True
        for remove in self._removers:
            remove()
        if self._shard_group is not None:
            self._shard_group.watch(None)
        self._gradients.close()
        failed = not self._exchanger.close(may_differ=may_differ) or self._monitor.has_failed
        self._monitor.close()
        self._membership.close()
        self._replica_exchange.close(failed=failed)
        if self._torch_shards is not None:
            self._torch_shards.close()
        self._groups.close(failed=failed)
        if self._period_timer is not None:
            self._period_timer.close(failed=failed)

    def flush_exchanges(self) -> None:
        """Makes an exchange if there are pending exchanges or anchors, whose layout must not change."""
        if self._exchanger.has_pending_or_anchors:
            self._exchanger.finish()

    def after_resharding(self, agreed: dict[str, torch.Tensor]) -> None:
        """Continues after the network was resharded, between two steps; all ranks call it together.

        `agreed` are this rank's parts of the buffers after the last exchange, cut like the buffers now.
        """
        self._was_resharded = True
        self._trained.follow_resharding()
        self._exchanger.run_collective(self._rebuild_groups)
        self._exchanger.buffers.learn(agreed)
        self._exchanger.reset_anchors()

    def _rebuild_groups(self, waiter: CollectiveWaiter) -> None:
        self._replica_exchange.after_resharding(self.module, waiter)
        reducer = self._replica_exchange.gradient_reducer
        if isinstance(self._gradients, ShardedGradients) and reducer is not None:
            self._gradients.follow(reducer)

    def _make_gradients(self, *, find_unused_parameters: bool) -> Gradients:
        """Returns the averaging of gradients over replicas; several that are whole on one rank each use torch's DDP."""
        group, reducer = self._groups.gradients, self._replica_exchange.gradient_reducer
        if self._torch_shards is not None and self._torch_shards.fsdp_modules:
            self._require_one_mesh()
            return FsdpGradients(
                self.module,
                self._torch_shards.shard_group.group,
                fsdp_modules=self._torch_shards.fsdp_modules,
                monitor=self._monitor,
                timeout_s=self._settings.timeout_s,
            )
        if reducer is None and self._groups.is_alone:
            return SingleRankGradients(self.module, group, monitor=self._monitor)
        if reducer is None and group.size() == 1:
            return LocalGradients(self.module, group, monitor=self._monitor)
        if reducer is None:
            return DdpGradients(
                self.module, group, monitor=self._monitor, find_unused_parameters=find_unused_parameters
            )
        return ShardedGradients(
            self.module,
            reducer,
            group,
            ranks=self._gradient_ranks,
            replicas=self._replica_exchange.gradient_replicas,
            monitor=self._monitor,
            timeout_s=self._settings.timeout_s,
        )

    def _require_one_mesh(self) -> None:
        """Raises `SpecError` unless FSDP averages gradients over all ranks that are to share them."""
        replicas = self._replica_exchange.gradient_replicas
        ranks = sorted(rank for replica in replicas for rank in replica.all_ranks) or [0]
        if len(replicas) > 1 or ranks != sorted(self._gradient_ranks):
            mesh_ranks = sorted(next(r.all_ranks for r in replicas if self._groups.rank_group.rank in r.all_ranks))
            where = "all ranks average gradients with every='global'" if self._global_gradients else "are a node"
            raise SpecError(
                f"FSDP shards the network over the ranks {mesh_ranks}, but the ranks {list(self._gradient_ranks)} "
                f"{where}; FSDP alone averages gradients. Give fully_shard a mesh of the ranks of a node, and say by "
                "nodes= which these are."
            )

    def _reshard(self) -> None:
        """Lets parameters be read and written as this rank's shards, where FSDP has gathered them for a forward."""
        if self._torch_shards is not None:
            self._torch_shards.reshard()

    def require_finite(self) -> None:
        """Raises `NonFiniteError` if the gradients of the last step were not finite and were not checked yet."""
        self._take_finite_check()()

    def prepare_checkpoint(self) -> None:
        """Checks gradients and, if periods are in seconds, waits for all nodes; after a resharding it ends exchanges.

        A checkpoint is resumed with the cut of the plan, not with the one that resharding has made.
        """
        self._require_outside_agreed("a checkpoint")
        self._reshard()
        self.advance_after_skipped_step()
        self.require_finite()
        self.wait_for_all_nodes()
        if self._was_resharded:
            self.flush_exchanges()

    def _take_finite_check(self) -> Callable[[], None]:
        """Returns a check of the last step's gradients; it may stall a device, and may run in another thread."""
        self._trained.require_same_members()
        reads_verdict = self._settings.nonfinite == "stop" and not self._gradients.pending
        return partial(self._require_finite, self._gradients.take_verdict(may_stall=True) if reads_verdict else None)

    def wait_for_all_nodes(self) -> None:
        """With periods in seconds, exchanges until all nodes call it; all ranks call it before a common collective."""
        if self._period_timer is not None and self._groups.rank_group.size > 1:
            self._exchanger.wait_for_all_nodes()
            self._period_timer.restart()

    def report(self, error: BaseException) -> None:
        """Reports to all other ranks that this one failed."""
        self._monitor.report(error)

    def progress(self) -> Progress:
        """Returns the counters that a checkpoint inside a period needs."""
        return {**self.schedule.progress(), **self._exchanger.progress()}

    def exchange_state(self) -> ExchangeState:
        """Returns the anchors and the pending exchanges for a checkpoint; all ranks call it together."""
        return self._exchanger.state()

    def resume(
        self,
        progress: Progress,
        agreed: dict[str, torch.Tensor] | None = None,
        exchange_state: ExchangeState | None = None,
        trained: Collection[str] | None = None,
    ) -> None:
        """Restores a checkpoint; `agreed` are the buffers after the last exchange, `trained` the trained parameters."""
        self.schedule.resume(progress)
        self._exchanger.resume(progress, exchange_state, agreed, trained)
        if trained is not None:
            self._trained.resume(trained)

    @property
    def trained_names(self) -> list[str]:
        """The names of the parameters that the last forward trained."""
        return sorted(self._trained.names)

    @property
    def samples(self) -> float:
        """The samples used since the last exchange, on this rank."""
        return self._exchanger.samples

    @property
    def has_global_gradients(self) -> bool:
        """Whether all ranks average gradients, not only those of a node."""
        return self._global_gradients

    def gradients(self) -> list[torch.Tensor]:
        """Returns the gradients that this rank has, averaged or not, as tensors that may be scaled in place."""
        return self._gradients.parts()

    @property
    def gradient_bytes(self) -> int:
        """The bytes this rank has sent to average gradients."""
        return self._gradients.sent_bytes

    @property
    def on_exchange(self) -> list[Callable[[ExchangeSummary], None]]:
        """Callbacks for every merged exchange."""
        return self._exchanger.on_exchange

    @property
    def on_period(self) -> list[Callable[[int, int, str], None]]:
        """Callbacks for the step just made, the steps of the next adaptive periods, and the reason."""
        return self._exchanger.period_chooser.on_period

    @property
    def agreed_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers after the last exchange."""
        return self._exchanger.buffers.agreed

    @property
    def buffer_policies(self) -> dict[str, BufferPolicy]:
        """The policy of each buffer at an exchange; empty for a single rank."""
        return dict(self._exchanger.buffers.policies)

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Arguments | None:
        self._require_outside_agreed("optimizer.step()")
        self._reshard()
        self._monitor.check()
        self._exchanger.take_loaded()
        self._gradients.begin_step()
        self.clock.averaged()
        if has_closure(args, kwargs):
            if self._settings.nonfinite == "skip":
                raise SpecError("nonfinite='skip' was asked for, but step(closure) cannot be skipped. Use 'stop'.")
            return with_mean_loss(args, kwargs, self._mean_loss)
        self._require_averaged()
        scaled = hasattr(optimizer, "found_inf")  # a GradScaler lets this optimizer skip the step
        verdict = self._gradients.take_verdict(may_stall=scaled or self._settings.nonfinite == "skip")
        if not scaled:
            self._require_finite(verdict)
        return None

    def _mean_loss(self, loss: object) -> object:
        """Returns the mean of a closure's loss over the ranks that share gradients."""
        label = f"the loss of step {self.schedule.step + 1}"
        waiter = CollectiveWaiter(
            self._monitor, label=label, step=self.schedule.step, timeout_s=self._settings.timeout_s
        )
        with torch.no_grad():
            return self._gradients.mean_loss(loss, waiter)

    def _require_averaged(self) -> None:
        """Raises `SpecError` unless the step is the same on all ranks that share gradients."""
        if self._groups.is_alone:
            return
        try:
            self._trained.require_unchanged()
            self._gradients.require_averaged()
        except SpecError as error:
            self._monitor.report(error)
            raise

    def _require_finite(self, verdict: Verdict | None) -> None:
        if verdict is not None and (members := verdict.nonfinite_members()):
            self._handle_nonfinite([self._gradient_ranks[member] for member in members], verdict.step)

    def _after_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        if has_closure(args, kwargs):
            self._gradients.begin_step()
            self._require_averaged()
            self._require_finite(self._gradients.take_verdict(may_stall=True))
        samples = self._gradients.take_samples()
        if samples:
            self._nonfinite_since = None
        self._exchanger.count(samples)
        self._advance(samples)

    def _handle_nonfinite(self, ranks: list[int], step: int) -> None:
        case = f"the gradients of ranks {ranks} became NaN or infinite at step {step}"
        if self._settings.nonfinite == "skip":
            logger.warning("%s; the step is skipped on the ranks that share them", case)
            self._leave_out_step()
            return
        if self._membership.is_elastic and self._may_recover():
            self._leave_out_step()
            return
        error = NonFiniteError(
            f"{case}. Lower the learning rate, clip the gradients, look at their batches, "
            "or pass nonfinite='skip' to leave such steps out."
        )
        self._monitor.report(error)
        raise error

    def _leave_out_step(self) -> None:
        self._gradients.take_samples()
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _may_recover(self) -> bool:
        """Whether the next exchange may mend this node, which takes over the state of others if it must.

        It may not if no step of the last two periods had gradients that were finite.
        """
        exchanges = self.schedule.exchanges
        if self._nonfinite_since is None:
            self._nonfinite_since = exchanges
            logger.warning(
                "the gradients of this node became NaN or infinite at step %d; such steps are left out until the next "
                "exchange with other nodes",
                self.schedule.step + 1,
            )
        return exchanges - self._nonfinite_since < 2

    def advance_after_skipped_step(self) -> None:
        """Counts a step that a scaler we were not given has skipped, and makes the exchange that is due after it.

        It was skipped if gradients were not finite, no step followed, and they were reset. Gradients that still exist
        may be accumulated further, so that nothing is counted yet.
        """
        if self._scaler is not None or not self._gradients.pending:
            return
        verdict = self._gradients.take_verdict(may_stall=True)
        self._gradients.pending = False
        if verdict is not None and verdict.nonfinite_members():
            self._exchanger.may_have_skipped_step = True
            if self._gradients.are_reset():
                self._skip()

    def _skip(self) -> None:
        self._gradients.take_samples()
        self._advance(0.0)

    def _on_scaler_skip(self) -> None:
        if not self._closed:
            self._gradients.take_verdict(may_stall=True)
            self._skip()

    def _advance(self, samples: float) -> None:
        self._reshard()
        is_expired = self._is_period_over()
        self._exchanger.after_step(self.schedule.advance(is_expired=is_expired))
        if is_expired and self._period_timer is not None:
            self._period_timer.restart()
        for callback in self.on_step:
            callback(self.schedule.step, samples)

    def _is_period_over(self) -> bool:
        """Returns whether a period in seconds is over."""
        if self._period_timer is None:
            return False
        return self._period_timer.has_expired(
            CollectiveWaiter(self._monitor, label="a period's end", timeout_s=self._settings.timeout_s)
        )

    def _check_and_broadcast(self, settings: str) -> None:
        """Checks that model and settings are the same on all ranks, and gives every rank the state of rank 0."""
        require_own_steps(self._optimizer)
        require_trainable(self.module, self._optimizer)
        if self._groups.is_alone:
            return
        require_dense(self.module)
        waiter = CollectiveWaiter(self._monitor, label="the start of synchronize", timeout_s=self._settings.timeout_s)
        require_same(describe(self.module, self._optimizer, settings), self._groups.world, waiter)
        with torch.no_grad():
            self._replica_exchange.broadcast_state(self.module, waiter)
        self._monitor.record_passed(waiter.label)


def _warn_if_unfinished(schedule: Schedule, monitor: FailureMonitor) -> None:
    """Logs a warning for a model that is gone, often with its program, while nodes hold different parameters."""
    has_error = getattr(sys, "last_value", None) is not None
    if schedule.since and not monitor.has_failed and not has_error:
        steps = counted(schedule.since, "step")
        logger.warning("%s came after the last exchange, so nodes hold different parameters: call finish()", steps)
