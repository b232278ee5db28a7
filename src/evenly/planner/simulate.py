"""Simulates a plan: seconds of computing and waiting, and bytes sent; also for clusters that do not exist."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evenly.errors import SpecError
from evenly.planner.costs import GraphCosts, exchange_seconds, sum_seconds
from evenly.planner.replica_options import ReplicaOption, eased
from evenly.spec.cluster import Cluster
from evenly.spec.forecast import DeviceForecast, Forecast
from evenly.spec.graph import Graph
from evenly.spec.period import EPOCH_STEPS, Adaptive, EveryEpoch, EveryGradient, EverySeconds, EverySteps
from evenly.spec.plan import Plan
from evenly.spec.profile import Profile

MOST_STEPS = 10**8

Numbers = npt.NDArray[np.float64]


def simulate(
    plan: Plan,
    cluster: Cluster,
    profile: Profile,
    graph: Graph,
    *,
    steps: int = 1000,
    jitter: float = 0.0,
    steps_per_epoch: int = EPOCH_STEPS,
    seed: int = 0,
    observer: "SimulationObserver | None" = None,
) -> Forecast:
    """Returns the time and traffic of a plan on a cluster, simulated step by step.

    The ranks of a node wait for each other in every step; nodes wait only at exchanges, so a node that is late in
    one step can catch up until then.

    Args:
        plan: who does what.
        cluster: the nodes and ranks.
        profile: how fast they are; not necessarily the one the plan was made for.
        graph: the network.
        steps: how many to simulate.
        jitter: how much a rank's time varies from step to step: the standard deviation over the mean.
        steps_per_epoch: for plans whose period is counted in epochs.
        seed: of the jitter.
        observer: is called with all steps and exchanges.
    """
    if len(plan.roles) != cluster.world_size or len(profile.devices) != cluster.world_size:
        raise SpecError(
            f"a plan for {len(plan.roles)} ranks and a profile of {len(profile.devices)} were given for a cluster of "
            f"{cluster.world_size}. Give values that belong together."
        )
    if not any(role.samples for role in plan.roles):
        raise SpecError("a plan without samples was to be simulated. Make it with a batch size.")
    if not 1 <= steps <= MOST_STEPS or not 0 <= jitter < 10:
        raise SpecError(
            f"steps={steps}, jitter={jitter} were asked for. Give 1 to {MOST_STEPS} steps and a jitter from 0 to 10."
        )
    play = _Play(plan, cluster, profile, GraphCosts(graph), observer or SimulationObserver())
    return play.run(steps, jitter, _every(plan, steps_per_epoch), seed)


class SimulationObserver:
    """Sees a simulation as it goes; does nothing by itself."""

    def steps_done(self, steps: int, compute_s: Numbers, step_s: Numbers) -> None:
        """Is called after `steps` alike: the seconds each rank computes in one, and each node needs for one."""

    def exchange_done(self, seconds: float, blocked_s: Numbers, overlap: int) -> None:
        """Is called after an exchange of `seconds` with the seconds for which it stopped each node.

        With `overlap` it was made beside so many steps, else these seconds are part of the stop.
        """

    def finished(self, sent_bytes: list[float], exchanged_bytes: list[float]) -> None:
        """Is called at the end with the bytes that each rank sent in a step and in an exchange."""


def _every(plan: Plan, steps_per_epoch: int) -> int:
    match plan.period:
        case EverySteps(steps=number):
            return number
        case EveryEpoch(epochs=number):
            return number * steps_per_epoch
        case Adaptive(start=number):
            return number
        case EverySeconds():
            return 0  # replaced by as many as the slowest rank completes in that time
        case EveryGradient():
            return 1


@dataclass(frozen=True)
class _Play:
    plan: Plan
    cluster: Cluster
    profile: Profile
    graph_costs: GraphCosts
    observer: SimulationObserver

    def run(self, steps: int, jitter: float, every: int, seed: int) -> Forecast:
        compute, communication_s, sent = self._each_step()
        nodes = np.array([role.node for role in self.plan.roles])
        order = np.argsort(nodes, kind="stable")
        starts = np.searchsorted(nodes[order], np.arange(len(self.plan.nodes)))
        if isinstance(self.plan.period, EverySeconds):
            every = self.plan.period.steps(max(compute + np.array(communication_s)))
        each = np.array(communication_s)  # a slow rank is also slower at averaging
        busy = np.array([any(self.plan.roles[rank].samples for rank in ranks) for ranks in self.plan.nodes])
        random = np.random.default_rng(seed)
        clock, waited, computed = np.zeros(len(starts)), np.zeros(len(compute)), np.zeros(len(compute))
        exchange_s, exchanges, overlap = self._exchange_s(), 0, self.plan.exchange.hidden_steps(every)
        stop_s = 0.0 if overlap else exchange_s  # training stops only if the exchange is not overlapped
        steps_done = 0
        while steps_done < steps:
            count = min(every, steps - steps_done)
            for times in [1] * count if jitter else [count]:  # without jitter all steps of a period are alike
                step_compute = compute * _factors(random, len(compute), jitter) if jitter else compute
                slowest = np.maximum.reduceat((step_compute + each)[order], starts)
                computed += times * step_compute
                waited += times * (slowest[nodes] - step_compute - each)
                clock += times * slowest
                self.observer.steps_done(times, step_compute, slowest)
            steps_done += count
            if busy.sum() > 1:
                latest = clock[busy].max()
                merged = np.maximum(clock, latest + exchange_s - overlap * slowest)  # seen from the snapshot
                waited += (merged - clock - stop_s)[nodes]
                self.observer.exchange_done(exchange_s, merged - clock, overlap)
                clock = merged
                exchanges += 1
        exchanged = self._exchanged_bytes()
        self.observer.finished(sent, exchanged)
        sent = [steps * each + exchanges * more for each, more in zip(sent, exchanged, strict=True)]
        return self._forecast(
            steps, float(clock[busy].max()), computed, waited, communication_s, sent, exchanges, stop_s
        )

    def _forecast(
        self,
        steps: int,
        seconds: float,
        computed: Numbers,
        waited: Numbers,
        communication_s: list[float],
        sent: list[float],
        exchanges: int,
        exchange_s: float,
    ) -> Forecast:
        devices = []
        for role in self.plan.roles:
            is_busy = role.samples > 0
            devices.append(
                DeviceForecast(
                    rank=role.rank,
                    node=role.node,
                    samples=role.samples,
                    compute_s=float(computed[role.rank]),
                    wires_s=steps * communication_s[role.rank] + exchanges * exchange_s if is_busy else 0.0,
                    wait_s=max(0.0, float(waited[role.rank])) if is_busy else seconds,
                    sent_bytes=sent[role.rank] if is_busy else 0.0,
                )
            )
        total = self.plan.batch_size or sum(role.samples for role in self.plan.roles)
        return Forecast(
            steps=steps,
            seconds=seconds,
            samples_per_s=total * steps / seconds if seconds else 0.0,
            exchanges=exchanges,
            exchange_s=exchanges * exchange_s,
            devices=tuple(devices),
        )

    def _exchanged_bytes(self) -> list[float]:
        """Returns what each rank sends to other nodes in an exchange."""
        size = self.graph_costs.exchanged_bytes(self.plan.exchange)
        busy_ranks = Counter(role.node for role in self.plan.roles if role.samples)
        return [2 * size / busy_ranks[role.node] if role.samples else 0.0 for role in self.plan.roles]

    def _each_step(self) -> tuple[Numbers, list[float], list[float]]:
        """Returns for each rank the seconds it computes and communicates in a step, and the bytes it sends."""
        compute = np.zeros(len(self.plan.roles))
        communication_s, sent = [0.0] * len(compute), [0.0] * len(compute)
        size = self.graph_costs.travelling_bytes
        for ranks in self.plan.nodes:
            replica_options = self._replica_options(ranks)
            rate = (
                self.profile.rate([rank for replica_option in replica_options for rank in replica_option.ranks])
                if replica_options
                else self.profile.inside
            )
            part = size // max((len(replica_option.ranks) for replica_option in replica_options), default=1)
            estimated = sum_seconds(part, len(replica_options), rate)
            for replica_option in replica_options:
                samples = self.plan.roles[replica_option.ranks[0]].samples
                computing = replica_option.compute_s(samples)
                inside = replica_option.seconds(samples) - max(computing)
                moved = (
                    0.0
                    if replica_option.layout is None
                    else replica_option.layout.traffic_bytes / len(replica_option.ranks)
                )
                averaging = (
                    estimated
                    if replica_option.averaging_s is None or len(replica_options) < 2
                    else replica_option.averaging_s
                )
                for rank, seconds in zip(replica_option.ranks, computing, strict=True):
                    compute[rank] = seconds
                    communication_s[rank] = inside + averaging
                    sent[rank] = moved + (
                        2 * part * (len(replica_options) - 1) / len(replica_options)
                        if len(replica_options) > 1
                        else 0.0
                    )
        return compute, communication_s, sent

    def _replica_options(self, ranks: list[int]) -> list[ReplicaOption]:
        busy_ranks = [rank for rank in ranks if self.plan.roles[rank].samples]
        replica_options = [ReplicaOption((rank,), self.graph_costs, self.profile) for rank in busy_ranks]
        if self.plan.replicas:
            replica_options = [
                ReplicaOption(
                    replica.ranks, self.graph_costs, self.profile, replica.layout if len(replica.ranks) > 1 else None
                )
                for replica in self.plan.replicas
                if replica.ranks[0] in busy_ranks
            ]
        return [eased(replica_option, busy_ranks, ranks) for replica_option in replica_options]

    def _exchange_s(self) -> float:
        busy = [ranks for ranks in self.plan.nodes if any(self.plan.roles[rank].samples for rank in ranks)]
        return exchange_seconds(self.graph_costs.exchanged_bytes(self.plan.exchange), busy, self.profile)


def _factors(random: np.random.Generator, count: int, jitter: float) -> Numbers:
    """Returns log-normal factors of mean 1 with this relative spread."""
    sigma = np.sqrt(np.log1p(jitter**2))
    factors: Numbers = np.exp(sigma * random.standard_normal(count) - sigma**2 / 2)
    return factors
