"""Batches, and units of cut networks, that follow the speed of the devices while a run goes on."""

import logging
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from evenly._errors import SpecError
from evenly.planner import relaid
from evenly.session.full import Trainee
from evenly.session.stage import Stage
from evenly.shards import Sharded, immovable, reshard
from evenly.spec import Layout, Plan, Rebalanced, deal

logger = logging.getLogger(__name__)

EVERY = 5  # steps between two looks
GAIN = 1.08  # a step must be predicted to become so many times faster before anything is changed
PATIENCE = 2  # looks in a row that must say so


class Rebalancer:
    """Compares, every few steps, how long the ranks compute, and deals work out anew where that pays.

    All ranks look at the same step and decide the same. First the ranks of one network that is cut hand units over to
    each other, then the global batch is dealt out anew. What a rank computes is taken to grow with what it has; as that
    is not quite so, a change is followed by smaller ones, and where changes do not help they become rare. The samples
    of a step stay the same in all, and gradients are weighted by them: the run goes on as it would have.
    """

    def __init__(self, trainee: Trainee, plan: Plan, stage: Stage) -> None:
        self._trainee, self._assembly, self._rank = trainee, stage.assembly, stage.party.rank
        self._groups = [replica.ranks for replica in plan.replicas] or [(rank,) for rank in plan.takers]
        self._layouts = [replica.layout for replica in plan.replicas]
        self.samples = list(plan.batch_shares)
        self.on_change: list[Callable[[], None]] = []
        self._units, self._batches = Doubt(), Doubt()
        self._due: dict[int, list[float]] = {}  # by network: what each of its ranks is to have, over what it has
        self._steps = 0

    @property
    def shares(self) -> list[tuple[float, ...]]:
        """The shares of each network."""
        return [layout.shares for layout in self._layouts]

    def look(self) -> None:
        """Called between steps by every rank."""
        self._steps += 1
        if self._steps % EVERY == 0:
            own = self._trainee.model.clock.take()
            row = [median(own) if own else 0.0, self._can_move()]
            rows = self._assembly.gather(row, "the balance of ranks")
            self._decide([seconds for seconds, _ in rows], may_move=all(can for _, can in rows))
        if self._due and (len(self._layouts) == 1 or self._trainee.model.schedule.since == 0):
            self._move()

    def _can_move(self) -> bool:
        module = self._trainee.model.module
        return isinstance(module, Sharded) and not immovable(module, self._trainee.optimizer)

    def _decide(self, seconds: Sequence[float], *, may_move: bool) -> None:
        found = {
            place: factors
            for place, (ranks, layout) in enumerate(zip(self._groups, self._layouts, strict=False))
            if may_move and (factors := unit_factors(layout, [seconds[rank] for rank in ranks])) is not None
        }
        slowest = [max(seconds[rank] for rank in ranks) for ranks in self._groups]
        if self._units.agrees(max(slowest), wanted=bool(found)):
            self._due = found
        better = None if found or self._due else rebalanced(self.samples, slowest)
        if self._batches.agrees(max(slowest), wanted=better is not None) and better is not None:
            self._deal(better)

    def _deal(self, samples: list[int]) -> None:
        self.samples = samples
        if self._trainee.feed is not None:
            self._trainee.feed.reshare(samples)
        self._tell(f"batches are {samples}")

    def _move(self) -> None:
        """Lets units of the networks that are due change hands; the first rank of each finds the new layout."""
        due, self._due = self._due, {}
        mine = next((place for place in due if self._groups[place][0] == self._rank), None)
        rows = self._assembly.gather(self._relaid(mine, due), "units that change hands")
        for place in due:
            text = rows[self._groups[place][0]]
            if text is None:
                continue
            self._layouts[place] = layout = Layout.model_validate_json(text)
            module = self._trainee.model.module
            if self._rank in self._groups[place] and isinstance(module, Sharded):
                reshard(module, self._trainee.optimizer, layout)
        self._trainee.model.relearn()
        self._trainee.model.clock.take()
        self._tell(f"shares are {[[round(share, 3) for share in shares] for shares in self.shares]}")

    def _relaid(self, place: int | None, due: dict[int, list[float]]) -> str | None:
        program = getattr(self._trainee.model.module, "_program", None)
        if place is None or program is None:
            return None
        try:
            layout = relaid(program.traced.graph, self._layouts[place], due[place])
        except SpecError as error:
            logger.warning("units of a network stay where they are: %s", error)
            return None
        return layout.model_dump_json() if layout.members == self._layouts[place].members else None

    def _tell(self, what: str) -> None:
        logger.info("%s from step %d on", what, self._trainee.model.schedule.step + 1)
        for tell in self.on_change:
            tell()


class Doubt:
    """Lets a change through when enough looks in a row want it; more, where the last one did not help."""

    def __init__(self) -> None:
        self._patience, self._agreeing = PATIENCE, 0
        self._before: float | None = None  # the slowest, when the last change was let through

    def agrees(self, slowest: float, *, wanted: bool) -> bool:
        """Returns whether to change something now; `slowest` are the seconds of the slowest rank.

        >>> doubt = Doubt()
        >>> [doubt.agrees(1.0, wanted=True) for _ in range(8)]
        [False, True, False, False, False, True, False, False]
        """
        if not wanted:
            self._patience, self._agreeing, self._before = PATIENCE, 0, None
            return False
        self._agreeing += 1
        if self._agreeing < self._patience:
            return False
        if self._before is not None and self._agreeing == PATIENCE and slowest * (1 + (GAIN - 1) / 2) > self._before:
            self._patience, self._before = 2 * self._patience, None
            return False
        self._agreeing, self._before = 0, slowest
        return True


def attach_rebalancer(trainee: Trainee, plan: Plan, stage: Stage) -> None:
    """Lets work follow the devices' speed, where the plan says so and there are several to deal out to."""
    several = len(plan.takers) > 1 or any(len(replica.layout.members) > 1 for replica in plan.replicas)
    if trainee.feed is None or not plan.rebalance or not several:
        return
    balance = Rebalancer(trainee, plan, stage)

    def tell() -> None:
        told: Any = {"samples": tuple(balance.samples), "shares": tuple(balance.shares)}
        stage.recorder.tell(Rebalanced, step=trainee.model.schedule.step, **told)

    balance.on_change.append(tell)
    trainee.feed.between.append(balance.look)


def rebalanced(samples: Sequence[int], seconds: Sequence[float]) -> list[int] | None:
    """Returns other samples for which the slowest would be clearly faster; None where nothing is to be gained.

    >>> rebalanced([24, 24], [0.1, 0.4]), rebalanced([24, 24], [0.2, 0.21])
    ([38, 10], None)
    """
    if len(samples) < 2 or not all(samples) or min(seconds) <= 0:
        return None
    speeds = [count / second for count, second in zip(samples, seconds, strict=True)]
    counts = [max(1, count) for count in deal(sum(samples), speeds)]
    while sum(counts) > sum(samples):  # those who got their 1 sample took it from the largest
        counts[counts.index(max(counts))] -= 1
    slowest = max(count / speed for count, speed in zip(counts, speeds, strict=True))
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
