"""Batches that follow the speed of the devices while a run goes on."""

import logging
from collections.abc import Callable, Sequence
from statistics import median

from evenly.comm import Assembly
from evenly.session.full import Trainee
from evenly.session.stage import Stage
from evenly.spec import Plan, Rebalanced, deal

logger = logging.getLogger(__name__)

EVERY = 5  # steps between two looks
GAIN = 1.08  # a step must be predicted to become so many times faster before anything is changed
PATIENCE = 2  # looks in a row that must say so


class Rebalancer:
    """Compares, every few steps, how long the ranks compute, and deals the global batch out anew where that pays.

    All ranks look at the same step and decide the same. What a rank computes in a step is taken to grow with its
    samples; as that is not quite so, a change is followed by smaller ones until no more is to be gained. The samples of
    a step stay the same in all, and gradients are weighted by them: the run goes on as it would have.
    """

    def __init__(self, trainee: Trainee, plan: Plan, assembly: Assembly) -> None:
        self._trainee, self._assembly = trainee, assembly
        self._groups = [replica.ranks for replica in plan.replicas] or [(rank,) for rank in plan.takers]
        self.samples = list(plan.batch_shares)
        self.on_change: list[Callable[[list[int]], None]] = []
        self._steps = self._agreeing = 0

    def look(self) -> None:
        """Called between steps by every rank."""
        self._steps += 1
        if self._steps % EVERY or self._trainee.feed is None:
            return
        own = self._trainee.model.clock.take()
        rows = self._assembly.gather(median(own) if own else 0.0, "the balance of batches")
        seconds = [max(rows[rank] for rank in ranks) for ranks in self._groups]
        better = rebalanced(self.samples, seconds)
        self._agreeing = self._agreeing + 1 if better is not None else 0
        if better is not None and self._agreeing >= PATIENCE:
            self._agreeing, self.samples = 0, better
            self._trainee.feed.reshare(better)
            logger.info("batches are %s from step %d on", better, self._trainee.model.schedule.step + 1)
            for tell in self.on_change:
                tell(better)


def attach_rebalancer(trainee: Trainee, plan: Plan, stage: Stage) -> None:
    """Lets batches follow the devices' speed, where the plan says so and there are several to deal out to."""
    if trainee.feed is None or not plan.rebalance or len(plan.takers) < 2:
        return
    balance = Rebalancer(trainee, plan, stage.assembly)
    balance.on_change.append(
        lambda samples: stage.recorder.tell(Rebalanced, step=trainee.model.schedule.step, samples=tuple(samples))
    )
    trainee.feed.between.append(balance.look)


def rebalanced(samples: Sequence[int], seconds: Sequence[float]) -> list[int] | None:
    """Returns other samples for which the slowest would be clearly faster; None where nothing is to be gained.

    >>> rebalanced([24, 24], [0.1, 0.4]), rebalanced([24, 24], [0.2, 0.21])
    ([38, 10], None)
    """
    if not all(samples) or min(seconds) <= 0:
        return None
    speeds = [count / second for count, second in zip(samples, seconds, strict=True)]
    counts = [max(1, count) for count in deal(sum(samples), speeds)]
    while sum(counts) > sum(samples):  # those who got their 1 sample took it from the largest
        counts[counts.index(max(counts))] -= 1
    slowest = max(count / speed for count, speed in zip(counts, speeds, strict=True))
    return counts if max(seconds) > GAIN * slowest else None
