"""The module that trains by node-based communications.

Gradients are averaged inside a node at every step, parameters across nodes every K' steps.
Reference: Moreno-Alvarez, Paoletti, Cavallaro, Haut, TNNLS 2023, 10.1109/TNNLS.2023.3309735.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from evenly._torch.scaler import watch_scaler
from evenly.comm import CollectiveWaiter, FailureMonitor, Groups, require_same
from evenly.comm.blocks.replicas import shard_group_of
from evenly.errors import NonFiniteError, SpecError
from evenly.exchange.exchanger import Exchanger
from evenly.exchange.membership import Membership
from evenly.exchange.pending import ExchangeSummary
from evenly.exchange.replica_exchange import ReplicaExchange
from evenly.gradients.base import Verdict
from evenly.gradients.sample_counts import counted_samples, leading_dim
from evenly.nodes.checks import OptimizedParameters, require_dense, require_own_steps, require_trainable
from evenly.nodes.closures import has_closure, with_mean_loss
from evenly.nodes.signature import describe
from evenly.schedule.period_timer import PeriodTimer
from evenly.schedule.step_clock import StepClock
from evenly.schedule.step_counter import Schedule
from evenly.spec import AnyPeriod, BufferPolicy, EveryGradient, Exchange

logger = logging.getLogger(__name__)

Count = Callable[..., float]


class Synchronized(torch.nn.Module):
    """`module` on this rank, kept in step with the other ranks of its node and, every period, with the other nodes.

    Call it like the module itself. `module` is the plain network, for saving and for its attributes.
    """

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
    ) -> None:
        super().__init__()
        self.module = module
        self.schedule = Schedule(period, exchange.fragments, least=exchange.calm_steps)
        self.on_step: list[Callable[[int, float], None]] = []  # called with the step and the samples behind it
        self._optimizer = optimizer
        self._settings = exchange
        self._groups = groups
        self._replica_exchange = replica_exchange
        self._count = count or leading_dim
        self._closed = self._has_moved = self._shows_average = False
        self._joint = isinstance(period, EveryGradient)
        self._partners = tuple(range(groups.rank_group.size)) if self._joint else groups.ranks
        self._scaler = scaler
        self._monitor = monitor
        self._period_timer = period_timer
        try:
            self._agree_at_start(f"{period!r}, {exchange!r}, nodes {groups.nodes}")
            self._optimized = OptimizedParameters(module, optimizer)
            self._gradients = replica_exchange.gradients(module, find_unused_parameters=find_unused_parameters)
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
                joint=self._joint,
                before=self._last_look,
            )
            self._exchanger.begin()
        except BaseException as error:
            self._monitor.report(error)
            self._monitor.close()
            replica_exchange.close(failed=True)
            groups.close(failed=True)
            raise
        self._undo = [
            optimizer.register_step_pre_hook(self._before_step).remove,
            optimizer.register_step_post_hook(self._after_step).remove,
            watch_scaler(scaler, optimizer, steps=lambda: self.schedule.step, on_skip=self._was_left_out),
        ]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module; with gradients enabled the batch counts as this rank's part of the step."""
        self._monitor.check()
        self._exchanger.check()
        self.settle()
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        if self._closed:
            raise SpecError("a synchronized model was called to train after close(). Train the plain network: .module.")
        self._gradients.step = self.schedule.step + 1
        self.clock.begin(self._gradients.step)
        try:
            samples = counted_samples(self._count, args, kwargs)
        except Exception as error:
            self._monitor.report(error)
            raise
        return self._gradients.forward(samples, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to be copied or pickled."""
        raise SpecError(
            "a synchronized model was to be copied or pickled, which holds connections to other ranks. Copy or save "
            "the plain network, .module, inside agreed() where it is to be the average of all nodes."
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients without averaging them, as DDP's `no_sync` does."""
        with self._gradients.paused():
            yield

    def end_epoch(self) -> None:
        """Tells that a pass over the data is complete; exchanges if the period is an epoch."""
        self._require_own("end_epoch()")
        self.settle()
        if self._period_timer is not None:
            self.assemble()
        elif self.schedule.due_at_epoch_end():
            self._exchanger.exchange(range(self.schedule.fragments))

    def finish(self) -> None:
        """Makes the last exchange of a run, so that all ranks end with the same model."""
        self._require_own("finish()")
        self.settle()
        if self._groups.rank_group.size > 1:
            self._exchanger.finish()

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Puts the average over all nodes into the module for evaluation, then gives each node its own state back."""
        if self._shows_average:  # a block inside a block sees the same
            yield
            return
        self.settle()
        self.assemble()
        with self._exchanger.averaged():
            self._shows_average = True
            try:
                yield
            finally:
                self._shows_average = False

    def accept_weights(self) -> None:
        """Takes weights that were written into the module by hand as those all nodes have agreed on.

        All ranks call it together, after they have written the same. `load_state_dict` is noticed without it.
        """
        self._require_own("accept_weights()")
        self._exchanger.take_loaded(everything=True)

    def _require_own(self, what: str) -> None:
        if self._shows_average:
            raise SpecError(f"{what} was called inside agreed(), where the model is an average. Leave the block first.")

    def close(self) -> None:
        """Lets go of the optimizer and ends the background thread; the plain network stays in `module`."""
        self._closed = True
        for undo in self._undo:
            undo()
        if self._shard_group is not None:
            self._shard_group.watch(None)
        self._gradients.close()
        failed = not self._exchanger.close() or self._monitor.has_failed
        self._monitor.close()
        self._replica_exchange.close(failed=failed)
        self._groups.close(failed=failed)
        if self._period_timer is not None:
            self._period_timer.close(failed=failed)

    def agree_for_moving(self) -> None:
        """Lets all nodes agree before parts of the network change hands, if what is known of exchanges is cut too."""
        if self._exchanger.remembers:
            self._exchanger.finish()

    def relearn(self, agreed: dict[str, torch.Tensor]) -> None:
        """Goes on after parts of the network have changed hands, between two steps; all ranks call it together.

        `agreed` are this rank's parts of the buffers of the last exchange, cut as the buffers are now.
        """
        self._has_moved, self._optimized = True, OptimizedParameters(self.module, self._optimizer)
        self._exchanger.meet(lambda waiter: self._replica_exchange.relearn(self.module, waiter))
        self._exchanger.buffers.learn(agreed)
        self._exchanger.begin()

    def require_finite(self) -> None:
        """Raises `NonFiniteError` for the last step where its gradients were not finite and nobody has looked yet."""
        self._last_look()()

    def come_together(self) -> None:
        """Called before all ranks save together: a run that is resumed cuts the network as its plan says."""
        self._require_own("a checkpoint")
        self.settle()
        self.require_finite()
        self.assemble()
        if self._has_moved:
            self.agree_for_moving()

    def _last_look(self) -> Callable[[], None]:
        """Returns what looks at the last step's gradients; to do so may stall a device, and another thread may."""
        self._optimized.require_unchanged(thoroughly=True)
        looks = self._settings.nonfinite == "stop" and not self._gradients.pending
        return partial(self._look, self._gradients.last(now=True) if looks else None)

    def assemble(self) -> None:
        """Waits until all nodes have come here, if each makes the steps it can; all ranks call it before they meet."""
        if self._period_timer is not None and self._groups.rank_group.size > 1:
            self._exchanger.assemble()
            self._period_timer.wind()

    def report(self, error: BaseException) -> None:
        """Tells all other ranks that this one failed."""
        self._monitor.report(error)

    def progress(self) -> dict[str, Any]:
        """Returns where this rank stands: what a checkpoint needs to go on inside a period."""
        return {**self.schedule.progress(), **self._exchanger.progress()}

    def exchange_state(self) -> dict[str, Any]:
        """Returns the tensors of the last exchanges and of those under way; all ranks call it together."""
        return self._exchanger.state()

    def resume(
        self,
        progress: dict[str, Any],
        agreed: dict[str, torch.Tensor] | None = None,
        exchange_state: dict[str, Any] | None = None,
    ) -> None:
        """Goes on from `progress`; `agreed` are the buffers of the last exchange."""
        self.schedule.resume(progress)
        self._exchanger.resume(progress, exchange_state, agreed)

    @property
    def samples(self) -> float:
        """The samples used since the last exchange, on this rank."""
        return self._exchanger.samples

    @property
    def is_joint(self) -> bool:
        """Whether all ranks average gradients, not only those of a node."""
        return self._joint

    @property
    def gradient_bytes(self) -> int:
        """What this rank has sent to average gradients."""
        return self._gradients.sent_bytes

    @property
    def on_exchange(self) -> list[Callable[[ExchangeSummary], None]]:
        """Called with every exchange when it was merged."""
        return self._exchanger.on_exchange

    @property
    def on_period(self) -> list[Callable[[int, int, str], None]]:
        """Called with the step just made, the steps of the next adaptive periods, and why."""
        return self._exchanger.on_period

    @property
    def agreed_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers as the last exchange left them."""
        return self._exchanger.buffers.agreed

    @property
    def buffer_policies(self) -> dict[str, BufferPolicy]:
        """What becomes of each buffer at an exchange; of one rank alone nothing."""
        return dict(self._exchanger.buffers.policies)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        self._require_own("optimizer.step()")
        self._monitor.check()
        self._exchanger.take_loaded()
        self.clock.averaged()
        if has_closure(args, kwargs):
            if self._settings.nonfinite == "skip":
                raise SpecError("nonfinite='skip' was asked for, but step(closure) cannot be skipped. Use 'stop'.")
            return with_mean_loss(args, kwargs, self._mean_loss)
        self._require_averaged()
        scaled = hasattr(optimizer, "found_inf")  # a GradScaler leaves the skipping to this optimizer
        verdict = self._gradients.last(now=scaled or self._settings.nonfinite == "skip")
        if not scaled:
            self._look(verdict)
        return None

    def _mean_loss(self, loss: Any) -> Any:
        """Returns the mean of a closure's loss over the ranks that share gradients."""
        place = f"the loss of step {self.schedule.step + 1}"
        waiter = CollectiveWaiter(
            self._monitor, place=place, step=self.schedule.step, timeout_s=self._settings.timeout_s
        )
        with torch.no_grad():
            return self._gradients.mean_loss(loss, waiter)

    def _require_averaged(self) -> None:
        """Raises `SpecError` unless the step is one that all ranks that share gradients make alike."""
        if self._groups.rank_group.size == 1:
            return
        try:
            self._optimized.require_unchanged()
            self._gradients.require_averaged()
        except SpecError as error:
            self._monitor.report(error)
            raise

    def _look(self, verdict: Verdict | None) -> None:
        if verdict is not None and (members := verdict.nonfinite_members()):
            self._meet_nonfinite([self._partners[member] for member in members], verdict.step)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if has_closure(args, kwargs):
            self._require_averaged()
            self._look(self._gradients.last(now=True))
        samples = self._gradients.take_samples()
        self._exchanger.count(samples)
        self._advance(samples)

    def _meet_nonfinite(self, ranks: list[int], step: int) -> None:
        found = f"the gradients of ranks {ranks} became NaN or infinite at step {step}"
        if self._settings.nonfinite == "skip":
            logger.warning("%s; the step is skipped on the ranks that share them", found)
            self._gradients.take_samples()
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
            return
        error = NonFiniteError(
            f"{found}. Lower the learning rate, clip the gradients, look at that rank's batch, "
            "or pass nonfinite='skip' to leave such steps out."
        )
        self._monitor.report(error)
        raise error

    def settle(self) -> None:
        """Counts a step that an unknown GradScaler left out: gradients were not finite, no step followed, and they
        are gone. Where they are still there the next batch may belong to the same step; the exchange will tell."""
        if self._scaler is not None or not self._gradients.pending:
            return
        verdict = self._gradients.last(now=True)
        self._gradients.pending = False
        if verdict is not None and verdict.nonfinite_members():
            self._exchanger.doubtful = True
            gradients = [p.grad for p in self.module.parameters() if p.requires_grad]
            if all(gradient is None or not bool(gradient.any()) for gradient in gradients):
                self._skip()

    def _skip(self) -> None:
        self._gradients.take_samples()
        self._advance(0.0)

    def _was_left_out(self) -> None:
        if not self._closed:
            self._gradients.last(now=True)
            self._skip()

    def _advance(self, samples: float) -> None:
        rings = self._rings()
        self._exchanger.after_step(self.schedule.advance(rings=rings))
        if rings and self._period_timer is not None:
            self._period_timer.wind()
        for tell in self.on_step:
            tell(self.schedule.step, samples)

    def _rings(self) -> bool:
        """Returns whether a period in seconds is over."""
        if self._period_timer is None:
            return False
        return self._period_timer.rings(
            CollectiveWaiter(self._monitor, place="a period's end", timeout_s=self._settings.timeout_s)
        )

    def _agree_at_start(self, settings: str) -> None:
        """Makes sure that all ranks were given the same, and gives every rank the state of rank 0."""
        require_own_steps(self._optimizer)
        require_trainable(self.module, self._optimizer)
        if self._groups.rank_group.size == 1:
            return
        require_dense(self.module)
        waiter = CollectiveWaiter(self._monitor, place="the start of synchronize", timeout_s=self._settings.timeout_s)
        require_same(describe(self.module, self._optimizer, settings), self._groups.world, waiter)
        with torch.no_grad():
            self._replica_exchange.level(self.module, waiter)
        self._monitor.passed(waiter.place)
