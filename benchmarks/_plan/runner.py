"""Runs a plan a few steps at a time and records how long a step takes and how busy this rank is."""

import time
from itertools import pairwise

import torch
import torch.distributed as dist

from benchmarks._plan.network import INPUT_SHAPE, NUM_CLASSES, network
from benchmarks.common import median
from evenly.comm import FailureMonitor, RankGroup
from evenly.nodes.composition import compose_synchronized
from evenly.session.active_ranks import ActiveRanks
from evenly.session.sharding import shard_for
from evenly.spec import Cluster, Plan

TIMEOUT_S = 300.0


class PlanTrainer:
    """Trains the network as a plan says, on one of the ranks that take part."""

    def __init__(self, plan: Plan, cluster: Cluster, rank_group: RankGroup, label: str) -> None:
        self.exchange_seconds: list[float] = []  # of each exchange, divided by the steps of a period
        own_rank_group = rank_group.among(plan.active, label)
        self._monitor = FailureMonitor(own_rank_group.scoped("alarm"))
        active_cluster = cluster.among(plan.active)
        self._active_ranks = ActiveRanks(
            own_rank_group, active_cluster, self._monitor, folder=None, resume=False, timeout_s=TIMEOUT_S
        )
        active_plan = plan.among_active() if len(plan.active) < len(plan.roles) else plan
        model = network()
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        self._model = compose_synchronized(
            shard_for(model, self._optimizer, active_plan, self._active_ranks, timeout_s=TIMEOUT_S),
            self._optimizer,
            rank_group=own_rank_group,
            cluster=self._active_ranks.cluster,
            period=active_plan.period,
            exchange=active_plan.exchange,
            parent=self._monitor,
        )
        period_steps = getattr(active_plan.period, "steps", 1)
        self._model.on_exchange.append(lambda done: self.exchange_seconds.append(done.seconds / period_steps))
        num_samples = active_plan.roles[own_rank_group.rank].samples
        generator = torch.Generator().manual_seed(1)
        self._x = torch.randn(num_samples, *INPUT_SHAPE, generator=generator)
        self._y = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)

    def step(self) -> None:
        """Makes one training step."""
        torch.nn.functional.cross_entropy(self._model(self._x), self._y).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def close(self) -> None:
        """Closes the connections to the other ranks."""
        self._model.close()
        self._active_ranks.close()
        self._monitor.close()


class PlanRunner:
    """One plan on this rank, with the figures of each round; a rank that the plan leaves out only waits."""

    def __init__(self, plan: Plan, cluster: Cluster, rank_group: RankGroup, *, number: int) -> None:
        self.step_seconds: list[float] = []  # the median of each round
        self.cpu_use: list[float] = []  # CPU time of each round, as a fraction of what the quota allows
        self.exchange_seconds: list[float] = []
        self.takes_part = rank_group.rank in plan.active
        self._trainer: PlanTrainer | None = None
        if self.takes_part:
            self._trainer = PlanTrainer(plan, cluster, rank_group, f"plan{number}")
            self.exchange_seconds = self._trainer.exchange_seconds

    def run(self, steps: int, quota: float) -> None:
        """Makes some steps and records how long one takes and how much of the quota this rank uses."""
        dist.barrier()
        if self._trainer is not None:
            cpu_began = time.process_time()
            times = [time.perf_counter()]
            for _ in range(steps):
                self._trainer.step()
                times.append(time.perf_counter())
            self.step_seconds.append(median([end - begin for begin, end in pairwise(times)]))
            self.cpu_use.append((time.process_time() - cpu_began) / (times[-1] - times[0]) / quota)
        dist.barrier()

    def forget_rounds(self) -> None:
        """Drops the figures of all rounds but the first, which warms up."""
        del self.step_seconds[1:]
        del self.cpu_use[1:]

    def close(self) -> None:
        """Closes the connections to the other ranks; a second call does nothing."""
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None
