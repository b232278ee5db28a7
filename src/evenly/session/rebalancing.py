"""Rebalances batches, and units of cut networks, while a run goes on."""

import logging
import operator
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from evenly.checkpoints.full_state import TrainedModel
from evenly.errors import SpecError
from evenly.layouts import relaid
from evenly.planner import balance
from evenly.planner.costs import GraphCosts
from evenly.planner.memory import cut_needs
from evenly.session.active_ranks import ActiveRanks
from evenly.shards import Sharded, immovable, local_shard_of, moved, reshard
from evenly.spec import EveryGradient, EverySeconds, Layout, Plan, Rebalanced

logger = logging.getLogger(__name__)

EVERY = 5  # steps between two checks
GAIN = 1.08  # predicted speedup of a step that justifies a change
PATIENCE = 2  # consecutive checks that must agree
OBVIOUS = 0.6  # a rank that should shrink below this factor is clear at the first check
HELPED = 0.97  # a trial is kept if steps take less than this factor of their earlier time
LEAST_PART = 0.02  # least fraction of a network that a rank keeps


class Rebalancer:
    """Compares how long the ranks compute, and redistributes work where that pays.

    It checks every few steps, or at exchanges if nodes synchronize only there. All ranks check after the same step and
    decide the same. First units move between the ranks of a cut network, then the global batch is divided anew. The
    computing time of a rank is taken as proportional to its work; as that is only approximate, smaller changes may
    follow, and changes that do not help become rare. If ranks compute equally long after a move, messages may still
    keep a slow rank busy: it tries fewer units, and gets them back if that does not help. No rank gets more than fits
    in its memory.
    The global batch stays the same, and gradients are weighted by samples: the run computes what it would have.
    """

    def __init__(self, trained_model: TrainedModel, plan: Plan, active_ranks: ActiveRanks) -> None:
        self._trained_model = trained_model
        self._gatherer = active_ranks.gatherer
        self._rank = active_ranks.rank_group.rank
        self._plan = plan
        self._groups = [replica.ranks for replica in plan.replicas] or [(rank,) for rank in plan.takers]
        self._layouts = [replica.layout for replica in plan.replicas]
        self._limits = [plan.roles[rank].most_samples or sum(plan.batch_shares) for rank in plan.takers]
        self._waits = len(plan.nodes) > 1 and not isinstance(plan.period, EveryGradient)  # for the next exchange
        self.samples = list(plan.batch_shares)
        self.on_change: list[Callable[[], None]] = []
        self._units, self._batches = Doubt(), Doubt()
        self._tried: tuple[list[Layout], float] | None = None  # layouts and step seconds before a trial
        self._is_lean = False  # whether messages keep slow ranks busy
        self._may_try = False  # whether a trial may find that out
        schedule = trained_model.model.schedule
        self._step = schedule.step
        self._checked_step = schedule.step
        self._exchanges = schedule.exchanges
        trained_model.model.clock.is_wanted = True

    @property
    def shares(self) -> list[tuple[float, ...]]:
        """The shares of each network."""
        return [layout.shares for layout in self._layouts]

    def check(self) -> None:
        """Called between batches by every rank; a step may take several batches."""
        schedule = self._trained_model.model.schedule
        if schedule.step == self._step:
            return
        self._step = schedule.step
        if schedule.step - self._checked_step < EVERY or (self._waits and schedule.exchanges == self._exchanges):
            return
        steps = schedule.step - self._checked_step
        self._checked_step = schedule.step
        self._exchanges = schedule.exchanges
        step_times = self._trained_model.model.clock.take()
        computing_s = median(spent.computing_s for spent in step_times) if step_times else 0.0
        whole_s = median(spent.whole_s for spent in step_times) if step_times else 0.0
        rows = self._gatherer.gather([computing_s, whole_s, self._can_move_units()], "the balance of ranks")
        patience = PATIENCE if steps < PATIENCE * EVERY else 1  # a median of many steps is enough
        seconds, wholes = ([row[column] for row in rows] for column in (0, 1))
        if self._finish_trial(max(wholes)):
            self._decide(seconds, wholes, may_move=all(row[2] for row in rows), patience=patience)

    def skip_epoch_end(self) -> None:
        """Called at the end of an epoch, so that the check after the next batch does not see its last step."""
        self._step = self._trained_model.model.schedule.step

    def _finish_trial(self, whole_s: float) -> bool:
        """Ends a trial and undoes it if it did not help. Returns whether anything else may change now."""
        if self._tried is None:
            return True
        (before, before_s), self._tried = self._tried, None
        if whole_s < HELPED * before_s:
            self._is_lean = True
            return True
        self._may_try = False
        self._apply_layouts(
            {network: layout for network, layout in enumerate(before) if layout != self._layouts[network]}
        )
        return False

    def _can_move_units(self) -> bool:
        module = self._trained_model.model.module
        return isinstance(module, Sharded) and not immovable(module, self._trained_model.optimizer)

    def _decide(self, seconds: Sequence[float], wholes: Sequence[float], *, may_move: bool, patience: int) -> None:
        networks = list(enumerate(zip(self._groups, self._layouts, strict=False))) if may_move else []
        lean: dict[int, list[float]] = {}
        plain: dict[int, list[float]] = {}
        for network, (ranks, layout) in networks:
            group_seconds, group_wholes = ([times[rank] for rank in ranks] for times in (seconds, wholes))
            if (factors := unit_factors(layout, group_seconds)) is not None:
                plain[network] = factors
            if (factors := lean_factors(layout, group_seconds, group_wholes)) is not None:
                lean[network] = factors
        due = lean if self._is_lean else plain
        slowest = [max(seconds[rank] for rank in ranks) for ranks in self._groups]
        needed_checks = 1 if any(min(factors) < OBVIOUS for factors in due.values()) else patience
        if self._units.agrees(max(slowest), pays=bool(due), patience=needed_checks) and self._move_units(due):
            self._may_try = True
            return
        before = list(self._layouts)
        if self._may_try and not due and not self._is_lean and lean and self._move_units(lean):
            self._tried = before, max(wholes)
            return
        better = rebalanced(self.samples, slowest, self._limits)
        if self._batches.agrees(max(slowest), pays=better is not None, patience=patience) and better is not None:
            self._apply_samples(better)

    def _apply_samples(self, samples: list[int]) -> None:
        self.samples = samples
        if self._trained_model.feed is not None:
            self._trained_model.feed.reshare(samples)
        self._announce(f"batches are {samples}")

    def _move_units(self, due: dict[int, list[float]]) -> bool:
        """Moves units between ranks; one rank of each network finds its new layout. Returns whether any moved."""
        finders = {network: self._groups[network][self._layouts[network].members[0]] for network in due}
        own_network = next((network for network, rank in finders.items() if rank == self._rank), None)
        rows = self._gatherer.gather(self._new_layout(own_network, due), "units that change hands")
        layouts = {
            network: Layout.model_validate_json(text) for network, rank in finders.items() if (text := rows[rank])
        }
        self._apply_layouts(layouts)
        return bool(layouts)

    def _apply_layouts(self, layouts: dict[int, Layout]) -> None:
        """Applies new layouts, by network; all ranks call it together."""
        if not layouts:
            return
        self._trained_model.model.flush_exchanges()
        agreed = dict(self._trained_model.model.agreed_buffers)
        for network, layout in layouts.items():
            self._layouts[network] = layout
            if self._rank in self._groups[network]:
                agreed = self._recut(layout, agreed)
        self._trained_model.model.after_resharding(agreed)
        self._trained_model.model.clock.take()
        self._announce(f"shares are {[[round(share, 3) for share in shares] for shares in self.shares]}")

    def _recut(self, layout: Layout, agreed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Reshards this rank's network, and the buffers of the last exchange with it."""
        module = self._trained_model.model.module
        if not isinstance(module, Sharded):
            return agreed
        before = {name: local_shard_of(buffer) for name, buffer in module.named_buffers()}
        reshard(module, self._trained_model.optimizer, layout)
        after = {name: local_shard_of(buffer) for name, buffer in module.named_buffers()}
        return {
            name: value
            if (old_shard := before[name]) is None or (new_shard := after[name]) is None
            else moved(value, old_shard, new_shard)
            for name, value in agreed.items()
        }

    def _new_layout(self, network: int | None, due: dict[int, list[float]]) -> str | None:
        """Returns the new layout of a network as JSON, if it differs and fits in memory."""
        program = getattr(self._trained_model.model.module, "_program", None)
        if network is None or program is None:
            return None
        old_layout, graph = self._layouts[network], program.traced.graph
        try:
            layout = relaid(graph, old_layout, due[network])
        except SpecError as error:
            logger.warning("units of a network stay where they are: %s", error)
            return None
        if layout.members != old_layout.members or layout.cuts == old_layout.cuts:
            return None
        graph_costs, samples = GraphCosts(graph), self.samples[network]
        for member, need in zip(layout.members, cut_needs(graph_costs, layout, graph.sample_bytes), strict=True):
            if need.samples_in(self._plan.roles[self._groups[network][member]].free_bytes) < samples:
                return None
        return layout.model_dump_json()

    def _announce(self, change: str) -> None:
        logger.info("%s from step %d on", change, self._trained_model.model.schedule.step + 1)
        for tell in self.on_change:
            tell()


class Doubt:
    """Allows a change after enough consecutive checks ask for it; twice as many if the last change did not help."""

    def __init__(self) -> None:
        self._doubt, self._agreeing = 1, 0
        self._before: float | None = None  # seconds of the slowest rank at the last change

    def agrees(self, slowest_s: float, *, pays: bool, patience: int = PATIENCE) -> bool:
        """Returns whether to change something now; `pays` says whether this check asks for it.

        >>> doubt = Doubt()
        >>> [check for check in range(1, 40) if doubt.agrees(1.0, pays=True)]
        [2, 6, 14, 30]
        """
        if not pays:
            self._doubt = 1
            self._agreeing = 0
            self._before = None
            return False
        self._agreeing += 1
        if self._agreeing < patience * self._doubt:
            return False
        if self._before is not None and slowest_s * (1 + (GAIN - 1) / 2) > self._before:
            self._doubt, self._before = 2 * self._doubt, None
            return False
        self._agreeing, self._before = 0, slowest_s
        return True


def attach_rebalancer(trained_model: TrainedModel, plan: Plan, active_ranks: ActiveRanks) -> None:
    """Attaches a rebalancer if the plan asks for one and the work can be divided."""
    several = len(plan.takers) > 1 or any(len(replica.layout.members) > 1 for replica in plan.replicas)
    timed = isinstance(plan.period, EverySeconds)  # then each node makes as many steps as it can anyway
    if trained_model.feed is None or not plan.rebalance or not several or timed:
        return
    rebalancer = Rebalancer(trained_model, plan, active_ranks)

    def record() -> None:
        samples, shares = tuple(rebalancer.samples), tuple(rebalancer.shares)
        active_ranks.recorder.record(Rebalanced, step=trained_model.model.schedule.step, samples=samples, shares=shares)

    rebalancer.on_change.append(record)
    trained_model.feed.between.append(rebalancer.check)
    trained_model.feed.on_end.append(rebalancer.skip_epoch_end)


def rebalanced(samples: Sequence[int], seconds: Sequence[float], limits: Sequence[int]) -> list[int] | None:
    """Returns samples with which the slowest would be clearly faster; None if nothing is gained.

    >>> rebalanced([24, 24], [0.1, 0.4], [48, 48]), rebalanced([24, 24], [0.2, 0.21], [48, 48])
    ([39, 9], None)
    >>> rebalanced([24, 24], [0.1, 0.4], [30, 48])
    [30, 18]
    """
    if len(samples) < 2 or not all(samples) or min(seconds) <= 0:
        return None
    sample_s = [second / count for count, second in zip(samples, seconds, strict=True)]
    limits = [max(limit, count) for limit, count in zip(limits, samples, strict=True)]
    costs = [partial(operator.mul, rate) for rate in sample_s]
    counts = [max(1, count) for count in balance(sum(samples), costs, limits)]
    while sum(counts) > sum(samples):  # the minimum of 1 sample comes from the largest
        counts[counts.index(max(counts))] -= 1
    slowest = max(count * rate for count, rate in zip(counts, sample_s, strict=True))
    return counts if max(seconds) > GAIN * slowest else None


def unit_factors(layout: Layout, seconds: Sequence[float]) -> list[float] | None:
    """Returns the factor for each rank's units in a cut network; None if nothing is gained.

    With a share w_r a rank computes for c_r seconds; all finish together in 1 / sum_r (w_r / c_r).
    """
    if len(layout.members) < 2 or min(seconds[rank] for rank in layout.members) <= 0:
        return None
    total = sum(layout.shares)
    step_s = 1 / sum(layout.shares[rank] / total / seconds[rank] for rank in layout.members)
    if max(seconds[rank] for rank in layout.members) < GAIN * step_s:
        return None
    return [step_s / second if rank in layout.members else 1.0 for rank, second in enumerate(seconds)]


def lean_factors(layout: Layout, seconds: Sequence[float], wholes: Sequence[float]) -> list[float] | None:
    """Returns the factor for each rank's units if messages take a rank time in proportion to its slowness.

    A rank with the share w_r computes for c_r seconds, so the whole network would take it s_r = c_r / w_r. Its
    messages take k s_r, which is at most its waiting time: k is the least waiting time over s_r. All finish together
    after T = (1 + n k) / sum_r 1 / s_r, with the shares T / s_r - k.
    """
    members, total = layout.members, sum(layout.shares)
    if len(members) < 2 or min(seconds[rank] for rank in members) <= 0:
        return None
    fractions = {rank: layout.shares[rank] / total for rank in members}
    network_s = {rank: seconds[rank] / fractions[rank] for rank in members}
    message_factor = min(max(0.0, wholes[rank] - seconds[rank]) / network_s[rank] for rank in members)
    step_s = (1 + len(members) * message_factor) / sum(1 / network_s[rank] for rank in members)
    if max((fractions[rank] + message_factor) * network_s[rank] for rank in members) < GAIN * step_s:
        return None
    shares = {rank: max(LEAST_PART, step_s / network_s[rank] - message_factor) for rank in members}
    return [shares[rank] / fractions[rank] if rank in members else 1.0 for rank in range(len(layout.shares))]
