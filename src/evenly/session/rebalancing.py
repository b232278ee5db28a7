"""Batches, and units of cut networks, that follow the speed of the devices while a run goes on."""

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

EVERY = 5  # steps between two looks
GAIN = 1.08  # a step must be predicted to become so many times faster before anything is changed
PATIENCE = 2  # looks in a row that must say so
OBVIOUS = 0.6  # what is to lose so much of its units is clear at the first look
HELPED = 0.97  # what was only tried stays if steps take less than that of what they took
LEAST_PART = 0.02  # of a network, that a rank keeps


class Rebalancer:
    """Compares how long the ranks compute, and deals work out anew where that pays.

    It looks every few steps, or at exchanges where nodes meet only for these. All ranks look after the same step and
    decide the same. First the ranks of one network that is cut hand units over to each other, then the global batch is
    dealt out anew. What a rank computes is taken to grow with what it has; as that is not quite so, a change is
    followed by smaller ones, and where changes do not help they become rare. After units were moved, and all compute
    equally long, it may be that messages keep a slow rank busy: it is tried with fewer units, and gets them back if
    that does not help. Nobody gets more than its memory holds.
    The samples of a step stay the same in all, and gradients are weighted by them: the run goes on as it would have.
    """

    def __init__(self, trained_model: TrainedModel, plan: Plan, stage: ActiveRanks) -> None:
        self._trainee = trained_model
        self._gatherer = stage.gatherer
        self._rank = stage.rank_group.rank
        self._plan = plan
        self._groups = [replica.ranks for replica in plan.replicas] or [(rank,) for rank in plan.takers]
        self._layouts = [replica.layout for replica in plan.replicas]
        self._limits = [plan.roles[rank].most_samples or sum(plan.batch_shares) for rank in plan.takers]
        self._waits = len(plan.nodes) > 1 and not isinstance(plan.period, EveryGradient)  # until nodes meet anyway
        self.samples = list(plan.batch_shares)
        self.on_change: list[Callable[[], None]] = []
        self._units, self._batches = Doubt(), Doubt()
        self._tried: tuple[list[Layout], float] | None = None  # layouts before a trial, and the seconds of a step then
        self._is_lean, self._may_try = False, False  # whether messages keep slow ranks busy, and whether that is open
        at = trained_model.model.schedule
        self._step = at.step
        self._looked = at.step
        self._exchanges = at.exchanges
        trained_model.model.clock.is_wanted = True

    @property
    def shares(self) -> list[tuple[float, ...]]:
        """The shares of each network."""
        return [layout.shares for layout in self._layouts]

    def look(self) -> None:
        """Called between batches by every rank; a step may take several of them."""
        at = self._trainee.model.schedule
        if at.step == self._step:
            return
        self._step = at.step
        if at.step - self._looked < EVERY or (self._waits and at.exchanges == self._exchanges):
            return
        steps, self._looked, self._exchanges = at.step - self._looked, at.step, at.exchanges
        own = self._trainee.model.clock.take()
        computing_s = median(spent.computing_s for spent in own) if own else 0.0
        whole_s = median(spent.whole_s for spent in own) if own else 0.0
        rows = self._gatherer.gather([computing_s, whole_s, self._can_move()], "the balance of ranks")
        patience = PATIENCE if steps < PATIENCE * EVERY else 1  # a median of many steps is enough
        seconds, wholes = ([row[place] for row in rows] for place in (0, 1))
        if self._judged(max(wholes)):
            self._decide(seconds, wholes, may_move=all(row[2] for row in rows), patience=patience)

    def pass_by(self) -> None:
        """Called at the end of an epoch: what is looked at after the next batch is not the step that ended here."""
        self._step = self._trainee.model.schedule.step

    def _judged(self, whole_s: float) -> bool:
        """Ends a trial: what did not help is taken back. Returns whether anything else may change now."""
        if self._tried is None:
            return True
        (before, before_s), self._tried = self._tried, None
        if whole_s < HELPED * before_s:
            self._is_lean = True
            return True
        self._may_try = False
        self._put({place: layout for place, layout in enumerate(before) if layout != self._layouts[place]})
        return False

    def _can_move(self) -> bool:
        module = self._trainee.model.module
        return isinstance(module, Sharded) and not immovable(module, self._trainee.optimizer)

    def _decide(self, seconds: Sequence[float], wholes: Sequence[float], *, may_move: bool, patience: int) -> None:
        networks = list(enumerate(zip(self._groups, self._layouts, strict=False))) if may_move else []
        lean: dict[int, list[float]] = {}
        plain: dict[int, list[float]] = {}
        for place, (ranks, layout) in networks:
            own, whole = ([of[rank] for rank in ranks] for of in (seconds, wholes))
            plain |= {place: factors} if (factors := unit_factors(layout, own)) is not None else {}
            lean |= {place: factors} if (factors := lean_factors(layout, own, whole)) is not None else {}
        found = lean if self._is_lean else plain
        slowest = [max(seconds[rank] for rank in ranks) for ranks in self._groups]
        looks = 1 if any(min(factors) < OBVIOUS for factors in found.values()) else patience
        if self._units.agrees(max(slowest), wanted=bool(found), patience=looks) and self._move(found):
            self._may_try = True
            return
        before = list(self._layouts)
        if self._may_try and not found and not self._is_lean and lean and self._move(lean):
            self._tried = before, max(wholes)
            return
        better = rebalanced(self.samples, slowest, self._limits)
        if self._batches.agrees(max(slowest), wanted=better is not None, patience=patience) and better is not None:
            self._deal(better)

    def _deal(self, samples: list[int]) -> None:
        self.samples = samples
        if self._trainee.feed is not None:
            self._trainee.feed.reshare(samples)
        self._tell(f"batches are {samples}")

    def _move(self, due: dict[int, list[float]]) -> bool:
        """Lets units of networks change hands; a rank of each finds the new layout. Returns whether any do."""
        finders = {place: self._groups[place][self._layouts[place].members[0]] for place in due}
        mine = next((place for place, rank in finders.items() if rank == self._rank), None)
        rows = self._gatherer.gather(self._relaid(mine, due), "units that change hands")
        found = {place: Layout.model_validate_json(text) for place, rank in finders.items() if (text := rows[rank])}
        self._put(found)
        return bool(found)

    def _put(self, found: dict[int, Layout]) -> None:
        """Gives networks these layouts; all ranks call it together."""
        if not found:
            return
        self._trainee.model.agree_for_moving()
        agreed = dict(self._trainee.model.agreed_buffers)
        for place, layout in found.items():
            self._layouts[place] = layout
            if self._rank in self._groups[place]:
                agreed = self._recut(layout, agreed)
        self._trainee.model.relearn(agreed)
        self._trainee.model.clock.take()
        self._tell(f"shares are {[[round(share, 3) for share in shares] for shares in self.shares]}")

    def _recut(self, layout: Layout, agreed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Cuts this rank's network anew, and the buffers of the last exchange with it."""
        module = self._trainee.model.module
        if not isinstance(module, Sharded):
            return agreed
        before = {name: local_shard_of(buffer) for name, buffer in module.named_buffers()}
        reshard(module, self._trainee.optimizer, layout)
        after = {name: local_shard_of(buffer) for name, buffer in module.named_buffers()}
        return {
            name: value if (old := before[name]) is None or (new := after[name]) is None else moved(value, old, new)
            for name, value in agreed.items()
        }

    def _relaid(self, place: int | None, due: dict[int, list[float]]) -> str | None:
        """Returns the new layout of a network, if it is another one and there is memory for it."""
        program = getattr(self._trainee.model.module, "_program", None)
        if place is None or program is None:
            return None
        old, graph = self._layouts[place], program.traced.graph
        try:
            layout = relaid(graph, old, due[place])
        except SpecError as error:
            logger.warning("units of a network stay where they are: %s", error)
            return None
        if layout.members != old.members or layout.cuts == old.cuts:
            return None
        graph_costs, samples = GraphCosts(graph), self.samples[place]
        for member, need in zip(layout.members, cut_needs(graph_costs, layout, graph.sample_bytes), strict=True):
            if need.samples_in(self._plan.roles[self._groups[place][member]].free_bytes) < samples:
                return None
        return layout.model_dump_json()

    def _tell(self, what: str) -> None:
        logger.info("%s from step %d on", what, self._trainee.model.schedule.step + 1)
        for tell in self.on_change:
            tell()


class Doubt:
    """Lets a change through when enough looks in a row want it; more and more, where the last one did not help."""

    def __init__(self) -> None:
        self._doubt, self._agreeing = 1, 0
        self._before: float | None = None  # the slowest, when the last change was let through

    def agrees(self, slowest: float, *, wanted: bool, patience: int = PATIENCE) -> bool:
        """Returns whether to change something now; `slowest` are the seconds of the slowest rank.

        >>> doubt = Doubt()
        >>> [look for look in range(1, 40) if doubt.agrees(1.0, wanted=True)]
        [2, 6, 14, 30]
        """
        if not wanted:
            self._doubt = 1
            self._agreeing = 0
            self._before = None
            return False
        self._agreeing += 1
        if self._agreeing < patience * self._doubt:
            return False
        if self._before is not None and slowest * (1 + (GAIN - 1) / 2) > self._before:
            self._doubt, self._before = 2 * self._doubt, None
            return False
        self._agreeing, self._before = 0, slowest
        return True


def attach_rebalancer(trained_model: TrainedModel, plan: Plan, stage: ActiveRanks) -> None:
    """Lets work follow the devices' speed, where the plan says so and there are several to deal out to."""
    several = len(plan.takers) > 1 or any(len(replica.layout.members) > 1 for replica in plan.replicas)
    timed = isinstance(plan.period, EverySeconds)  # each node makes the steps it can anyway
    if trained_model.feed is None or not plan.rebalance or not several or timed:
        return
    balance = Rebalancer(trained_model, plan, stage)

    def tell() -> None:
        samples, shares = tuple(balance.samples), tuple(balance.shares)
        stage.recorder.tell(Rebalanced, step=trained_model.model.schedule.step, samples=samples, shares=shares)

    balance.on_change.append(tell)
    trained_model.feed.between.append(balance.look)
    trained_model.feed.on_end.append(balance.pass_by)


def rebalanced(samples: Sequence[int], seconds: Sequence[float], limits: Sequence[int]) -> list[int] | None:
    """Returns other samples for which the slowest would be clearly faster; None where nothing is to be gained.

    >>> rebalanced([24, 24], [0.1, 0.4], [48, 48]), rebalanced([24, 24], [0.2, 0.21], [48, 48])
    ([39, 9], None)
    >>> rebalanced([24, 24], [0.1, 0.4], [30, 48])
    [30, 18]
    """
    if len(samples) < 2 or not all(samples) or min(seconds) <= 0:
        return None
    each = [second / count for count, second in zip(samples, seconds, strict=True)]
    limits = [max(limit, count) for limit, count in zip(limits, samples, strict=True)]
    acts = [partial(operator.mul, own) for own in each]
    counts = [max(1, count) for count in balance(sum(samples), acts, limits)]
    while sum(counts) > sum(samples):  # those who got their 1 sample took it from the largest
        counts[counts.index(max(counts))] -= 1
    slowest = max(count * own for count, own in zip(counts, each, strict=True))
    return counts if max(seconds) > GAIN * slowest else None


def unit_factors(layout: Layout, seconds: Sequence[float]) -> list[float] | None:
    """Returns what each rank of a cut network should have, over what it has; None where nothing is to be gained.

    With a share w_r a rank computes for c_r seconds; all finish together in 1 / sum_r (w_r / c_r).
    """
    if len(layout.members) < 2 or min(seconds[rank] for rank in layout.members) <= 0:
        return None
    total = sum(layout.shares)
    together = 1 / sum(layout.shares[rank] / total / seconds[rank] for rank in layout.members)
    if max(seconds[rank] for rank in layout.members) < GAIN * together:
        return None
    return [together / second if rank in layout.members else 1.0 for rank, second in enumerate(seconds)]


def lean_factors(layout: Layout, seconds: Sequence[float], wholes: Sequence[float]) -> list[float] | None:
    """Returns what each rank should have over what it has, if messages keep a rank busy as long as it is slow.

    A rank with the share w_r computes for c_r seconds, so all of the network would take it s_r = c_r / w_r. Its
    messages take it k s_r, and no more than it waits: k is the least of the waits over s_r. All finish together after
    T = (1 + n k) / sum_r 1 / s_r, with the shares T / s_r - k.
    """
    members, total = layout.members, sum(layout.shares)
    if len(members) < 2 or min(seconds[rank] for rank in members) <= 0:
        return None
    parts = {rank: layout.shares[rank] / total for rank in members}
    slow = {rank: seconds[rank] / parts[rank] for rank in members}
    busy = min(max(0.0, wholes[rank] - seconds[rank]) / slow[rank] for rank in members)
    together = (1 + len(members) * busy) / sum(1 / slow[rank] for rank in members)
    if max((parts[rank] + busy) * slow[rank] for rank in members) < GAIN * together:
        return None
    wanted = {rank: max(LEAST_PART, together / slow[rank] - busy) for rank in members}
    return [wanted[rank] / parts[rank] if rank in members else 1.0 for rank in range(len(layout.shares))]
