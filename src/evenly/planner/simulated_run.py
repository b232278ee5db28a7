"""Simulates a plan and records it as its training would have been: events of the run, and the rows of every rank."""

from dataclasses import dataclass, field
from math import ceil

import numpy as np

from evenly.planner.simulate import Numbers, SimulationObserver, simulate
from evenly.spec.cluster import Cluster
from evenly.spec.forecast import Forecast
from evenly.spec.graph import Graph
from evenly.spec.period import EPOCH_STEPS, EveryGradient
from evenly.spec.plan import Plan
from evenly.spec.profile import Profile
from evenly.spec.rank_log import LEAST_PART, LEAST_ROW_S, LinkBytes, RankExchange, RankPart, RankStarted, StepTimes
from evenly.spec.run import (
    Event,
    ExchangeDone,
    Phases,
    Quartiles,
    Run,
    RunFinished,
    RunStarted,
    StepsDone,
)

PROGRESS_S = 1.0  # between events of progress


@dataclass(frozen=True)
class SimulatedRun:
    """A run that was not trained: its record and its forecast."""

    run: Run
    parts: tuple[RankPart, ...]
    forecast: Forecast


def simulate_run(
    plan: Plan,
    cluster: Cluster,
    profile: Profile,
    graph: Graph,
    *,
    name: str,
    steps: int = 1000,
    jitter: float = 0.0,
    steps_per_epoch: int = EPOCH_STEPS,
    seed: int = 0,
) -> SimulatedRun:
    """Returns the record that training by `plan` would leave, as `simulate` predicts it, with the setting `simulated`.

    Args: as of `simulate`; `name` is that of the run.
    """
    record = _Record(plan)
    forecast = simulate(
        plan,
        cluster,
        profile,
        graph,
        steps=steps,
        jitter=jitter,
        steps_per_epoch=steps_per_epoch,
        seed=seed,
        observer=record,
    )
    started = RunStarted(
        at_s=0.0,
        name=name,
        cluster=cluster.among(plan.active),
        plan=plan.among_active(),
        settings={"simulated": True, "jitter": jitter, "seed": seed, "total_steps": steps},
        ranks=tuple(plan.active) if len(plan.active) < len(plan.roles) else (),
        left_out={role.rank: role.left_out for role in plan.roles if role.left_out},
    )
    run = Run(events=(started, *record.events(), record.finish(forecast)))
    return SimulatedRun(run, record.parts(cluster), forecast)


@dataclass
class _NodeRows:
    """The rows of one node so far: its ranks step together."""

    ranks: list[int]
    now_s: float = 0.0
    row_began_s: float = 0.0
    due_s: float = LEAST_ROW_S
    row_steps: int = 0
    step: int = 0
    exchange_s: float = 0.0
    waiting_s: float = 0.0
    late_gradients_s: float = 0.0  # spent on averaging over all nodes
    compute_s: Numbers = field(default_factory=lambda: np.zeros(0))
    gradients_s: Numbers = field(default_factory=lambda: np.zeros(0))
    rows: list[tuple[int, int, float, float, list[float], list[float], float, float]] = field(default_factory=list)
    sendings: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])  # times, exchanges made until then
    last_sending: tuple[float, int] = (0.0, 0)

    def add(self, steps: int, compute_s: Numbers, step_s: float) -> None:
        """Adds steps that are alike, in as many rows as are due."""
        while steps:
            self.flush(is_due=True)
            count = min(steps, max(1, ceil((self.due_s - self.now_s) / step_s))) if step_s > 0 else steps
            self.compute_s = self.compute_s + count * compute_s
            self.gradients_s = self.gradients_s + count * (step_s - compute_s)
            self.row_steps += count
            self.step += count
            self.now_s += count * step_s
            steps -= count

    def sent(self, exchanges: int) -> None:
        """Notes that the node has sent its part of so many exchanges, at most once a second."""
        self.last_sending = (self.now_s, exchanges)
        if self.now_s - self.sendings[-1][0] > PROGRESS_S:
            self.sendings.append(self.last_sending)

    def flush(self, *, is_due: bool) -> None:
        """Ends the row before the next step, so that an exchange belongs to the step that it follows."""
        if not self.row_steps or (is_due and self.now_s < self.due_s):
            return
        seconds = self.now_s - self.row_began_s
        gradients_s = (self.gradients_s + self.late_gradients_s).tolist()
        times = (self.compute_s.tolist(), gradients_s, self.exchange_s, self.waiting_s)
        self.rows.append((self.step, self.row_steps, self.now_s, seconds, *times))
        self.row_began_s, self.row_steps = self.now_s, 0
        self.due_s = self.now_s + max(LEAST_ROW_S, LEAST_PART * self.now_s)
        self.compute_s, self.gradients_s = np.zeros(len(self.ranks)), np.zeros(len(self.ranks))
        self.exchange_s = self.waiting_s = self.late_gradients_s = 0.0


@dataclass(frozen=True)
class _Exchange:
    number: int
    step: int
    merged: int
    seconds: float
    at_s: list[float]  # by node
    met_s: list[float]
    blocked_s: list[float]


class _Record(SimulationObserver):
    """Collects what ranks would have recorded."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._is_global = plan, isinstance(plan.period, EveryGradient)
        active = set(plan.active)
        busy = [[rank for rank in ranks if rank in active] for ranks in plan.nodes]
        self._numbers = {node: index for index, node in enumerate(n for n, ranks in enumerate(busy) if ranks)}
        self._nodes = {node: _NodeRows(busy[node]) for node in self._numbers}
        for rows in self._nodes.values():
            rows.compute_s, rows.gradients_s = np.zeros(len(rows.ranks)), np.zeros(len(rows.ranks))
        self._sendings = 0  # exchanges between nodes: of parameters or, with global gradients, of those of a step
        self._exchanges: list[_Exchange] = []  # of parameters
        self._step_s: dict[int, list[float]] = {node: [] for node in self._nodes}
        self._computing_s: list[Numbers] = []
        self._sent: list[float] = []
        self._exchanged: list[float] = []

    def steps_done(self, steps: int, compute_s: Numbers, step_s: Numbers) -> None:
        self._computing_s.append(compute_s)
        for node, rows in self._nodes.items():
            self._step_s[node].append(float(step_s[node]))
            rows.add(steps, compute_s[rows.ranks], float(step_s[node]))

    def exchange_done(self, seconds: float, blocked_s: Numbers, overlap: int) -> None:
        self._sendings += 1
        at_s, met_s, blocked = [], [], []
        for node, rows in self._nodes.items():
            stopped_s = float(blocked_s[node])
            transfer_s = 0.0 if overlap else min(seconds, stopped_s)
            rows.now_s += stopped_s
            if self._is_global:
                rows.late_gradients_s += stopped_s
            else:
                rows.exchange_s += stopped_s if overlap else transfer_s
                rows.waiting_s += 0.0 if overlap else stopped_s - transfer_s
            rows.sent(self._sendings)
            at_s.append(rows.now_s)
            met_s.append(stopped_s - transfer_s)
            blocked.append(stopped_s)
        step = next(iter(self._nodes.values())).step
        if not self._is_global:
            number = len(self._exchanges) + 1
            self._exchanges.append(_Exchange(number, step, step + overlap, seconds, at_s, met_s, blocked))

    def finished(self, sent_bytes: list[float], exchanged_bytes: list[float]) -> None:
        self._sent, self._exchanged = sent_bytes, exchanged_bytes
        if self._is_global and self._sendings:
            self._sent = [sum(pair) for pair in zip(sent_bytes, exchanged_bytes, strict=True)]
        for rows in self._nodes.values():
            rows.flush(is_due=False)

    def events(self) -> list[Event]:
        """Returns progress and exchanges, as rank 0 would have recorded them."""
        first = next(iter(self._nodes.values()))
        samples, recorded_s = sum(self._plan.batch_shares), 0.0
        events: list[Event] = []
        for row in first.rows:
            if row[2] - recorded_s > PROGRESS_S:
                recorded_s = row[2]
                events.append(StepsDone(at_s=row[2], epoch=0, step=row[0], samples=row[0] * samples))
        weights = np.array([sum(self._samples(rank) for rank in rows.ranks) for rows in self._nodes.values()])
        parts = tuple(map(float, weights / max(1.0, weights.sum())))
        for done in self._exchanges:
            events.append(
                ExchangeDone(
                    at_s=done.at_s[0],
                    number=done.number,
                    step=done.step,
                    merged=done.merged,
                    seconds=done.seconds,
                    met_s=done.met_s[0],
                    waited_s=done.blocked_s[0],
                    sent_bytes=int(self._exchanged[first.ranks[0]]),
                    weights=parts,
                )
            )
        return sorted(events, key=lambda event: event.at_s)

    def finish(self, forecast: Forecast) -> RunFinished:
        """Returns the end of the run."""
        steps = forecast.steps
        sent = {rank: len(self._exchanges) * self._exchanged[rank] for rank in self._plan.active}
        samples = steps * sum(self._plan.batch_shares)
        return RunFinished(
            at_s=forecast.seconds,
            seconds=forecast.seconds,
            steps=steps,
            samples=samples,
            samples_per_s=samples / forecast.seconds if forecast.seconds else 0.0,
            exchanges=len(self._exchanges),
            exchange_seconds=sum(done.seconds for done in self._exchanges),
            sent_bytes=int(sum(sent.values())),
            interface_bytes=tuple(int(self._sendings * self._node_bytes(rows)) for rows in self._nodes.values()),
            phases=tuple(self._phases(forecast.seconds, steps, sent)),
        )

    def _phases(self, seconds: float, steps: int, sent: dict[int, float]) -> list[Phases]:
        phases = []
        gradients = {node: np.sum([row[5] for row in rows.rows], axis=0) for node, rows in self._nodes.items()}
        least_of_all = min(float(sums.min()) for sums in gradients.values())
        for node, rows in self._nodes.items():
            averaging_s = least_of_all if self._is_global else float(gradients[node].min())
            exchange_s = sum(row[6] for row in rows.rows)
            for index, rank in enumerate(rows.ranks):
                compute_s = sum(row[4][index] for row in rows.rows)
                waiting_s = sum(row[7] for row in rows.rows) + float(gradients[node][index]) - averaging_s
                accounted_s = compute_s + averaging_s + exchange_s + waiting_s
                phases.append(
                    Phases(
                        rank=self._plan.active.index(rank),
                        node=self._numbers[node],
                        compute_s=compute_s,
                        gradients_s=averaging_s,
                        exchange_s=exchange_s,
                        waiting_s=waiting_s,
                        other_s=max(0.0, seconds - accounted_s),
                        gradient_bytes=int(steps * self._sent[rank]),
                        exchange_bytes=int(sent[rank]),
                        step=Quartiles.of(self._step_s[node]),
                        computing=Quartiles.of([float(compute[rank]) for compute in self._computing_s]),
                    )
                )
        return sorted(phases, key=lambda rank: rank.rank)

    def _samples(self, rank: int) -> float:
        replica = self._plan.replica_of(rank)
        return self._plan.roles[rank].samples / (len(replica.ranks) if replica is not None else 1)

    def parts(self, cluster: Cluster) -> tuple[RankPart, ...]:
        """Returns what every rank would have recorded."""
        parts = []
        for place, (node, rows) in enumerate(self._nodes.items()):
            for index, rank in enumerate(rows.ranks):
                device = cluster.device_of(rank)
                started = RankStarted(
                    at_s=0.0,
                    rank=self._plan.active.index(rank),
                    node=self._numbers[node],
                    host=cluster.nodes[node].name,
                    device=f"{device.kind}:{device.index}",
                )
                steps = tuple(self._row(rank, index, row) for row in rows.rows)
                exchanges = tuple(self._exchange(done, place, rank) for done in self._exchanges)
                links = self._links(rows) if index == 0 else ()
                parts.append(RankPart(started, steps, exchanges, links))
        return tuple(sorted(parts, key=lambda part: part.started.rank))

    def _row(
        self, rank: int, index: int, row: tuple[int, int, float, float, list[float], list[float], float, float]
    ) -> StepTimes:
        step, steps, ended_s, seconds, compute_s, gradients_s, exchange_s, waiting_s = row
        samples, sent = steps * self._samples(rank), int(steps * self._sent[rank])
        times = (compute_s[index], gradients_s[index], exchange_s, waiting_s)
        return StepTimes(step, steps, ended_s, seconds, *times, samples, sent)

    def _exchange(self, done: _Exchange, place: int, rank: int) -> RankExchange:
        return RankExchange(
            at_s=round(done.at_s[place], 6),
            number=done.number,
            step=done.step,
            merged=done.merged,
            seconds=round(done.seconds, 6),
            met_s=round(done.met_s[place], 6),
            waited_s=round(done.blocked_s[place], 6),
            sent_bytes=int(self._exchanged[rank]),
        )

    def _node_bytes(self, rows: _NodeRows) -> float:
        """Returns what a node sends to others in one exchange."""
        return sum(self._exchanged[rank] for rank in rows.ranks)

    def _links(self, rows: _NodeRows) -> tuple[LinkBytes, ...]:
        """Returns the bytes that a node had sent."""
        each = self._node_bytes(rows)
        sendings = dict.fromkeys([*rows.sendings, rows.last_sending])
        return tuple(LinkBytes(at_s=round(at_s, 6), sent_bytes=int(number * each)) for at_s, number in sendings)
