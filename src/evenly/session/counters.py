"""Counts what a run does: steps, samples, exchanges, bytes, and where its seconds go; records them as events."""

from collections.abc import Callable
from dataclasses import asdict

from evenly.checkpoints.full_state import TrainedModel
from evenly.exchange import ExchangeSummary
from evenly.nodes import Synchronized
from evenly.schedule.time_samples import TimeSamples
from evenly.session.rank_recorder import RankRecorder, RankTotals
from evenly.session.recorder import Recorder
from evenly.session.straggler_watch import StragglerWatch
from evenly.spec import ExchangeDone, PeriodChosen, Phases, Quartiles, RunFinished, StepsDone, Straggler

RECORD_S = 1.0  # progress is recorded at most this often


class Counters:
    """The totals of one rank since the session began."""

    def __init__(self, recorder: Recorder) -> None:
        self.step = 0
        self.samples = self._all_samples = self.exchange_seconds = 0.0
        self.steps_made = self.exchanges = self.sent_bytes = 0
        self._exchange_s = self._waiting_s = 0.0  # in which training waited
        self._recorder, self._run_clock = recorder, recorder.run_clock
        self.rank_recorder: RankRecorder | None = None  # of a run with a folder
        self.stragglers: StragglerWatch | None = None  # of a run with several ranks
        self._hosts: list[str] = []  # of each rank
        self._models: list[Synchronized] = []
        self._stepped_at: tuple[float, float] | None = None  # when, and how long exchanges had blocked training then
        self.start()

    @property
    def all_samples(self) -> float:
        """The samples of all ranks so far, reckoned from those of this one."""
        return self._all_samples

    def start(self) -> None:
        """Starts the clock: training begins here."""
        self._began = self._recorded_at = self._run_clock.monotonic()
        self._interfaces_before = self._run_clock.interface_bytes()
        self._stepped_at, self._step_times = None, TimeSamples()
        if self.rank_recorder is not None:
            self.rank_recorder.begin(self.step)

    def flush(self) -> None:
        """Writes what the record of this rank does not hold yet."""
        if self.rank_recorder is not None:
            self.rank_recorder.flush()

    def watch(self, model: Synchronized) -> None:
        """Counts what this model does."""
        self._models.append(model)
        model.clock.is_wanted = True
        model.on_exchange.append(self.count_exchange)
        model.on_period.append(self.record_period)

    def count_steps(self, trained_model: TrainedModel, epoch: Callable[[], int], *, ranks: int) -> None:
        """Adds every step that is made with a model from now on."""
        trained_model.model.on_step.append(
            lambda step, samples: self._count_step(step, samples, epoch=epoch(), times=trained_model.times(ranks))
        )
        if self.rank_recorder is not None:
            self.rank_recorder.begin(self.step)

    def _count_step(self, step: int, samples: float, *, epoch: int, times: float) -> None:
        """Adds a step, records progress from time to time; all ranks together take `times` this rank's samples."""
        self._time_step()
        self.step = step
        self.steps_made += 1
        self.samples += samples
        self._all_samples += times * samples
        if self._run_clock.monotonic() - self._recorded_at > RECORD_S:
            self._recorded_at = self._run_clock.monotonic()
            self._recorder.record(StepsDone, epoch=epoch, step=step, samples=round(self._all_samples))
        if self.rank_recorder is not None:
            self.rank_recorder.step_done(step)
        if self.stragglers is not None and self.stragglers.verdicts:
            self._record_stragglers(self.stragglers)

    def watch_stragglers(self, watch: StragglerWatch, hosts: list[str]) -> None:
        """Records from now on which rank takes longer than the others; `hosts` are those of the ranks."""
        self.stragglers, self._hosts = watch, hosts

    def _record_stragglers(self, watch: StragglerWatch) -> None:
        while watch.verdicts:
            verdict = watch.verdicts.popleft()
            self._recorder.record(Straggler, host=self._hosts[verdict.rank], **asdict(verdict))

    def _time_step(self) -> None:
        """Adds the time since the last step, less what exchanges took of it."""
        now, blocked_s = self._run_clock.monotonic(), self._exchange_s + self._waiting_s
        if self._stepped_at is not None:
            stepped_at, blocked_before_s = self._stepped_at
            self._step_times.add(now - stepped_at - (blocked_s - blocked_before_s))
        self._stepped_at = now, blocked_s

    def count_exchange(self, done: ExchangeSummary) -> None:
        """Adds an exchange and records it."""
        self.exchanges += 1
        self.exchange_seconds += done.seconds
        waiting_s = min(done.met_s, done.waited_s) if done.merged == done.step else 0.0
        self._waiting_s += waiting_s
        self._exchange_s += done.waited_s - waiting_s
        self.sent_bytes += done.sent_bytes
        self._recorder.record(ExchangeDone, **vars(done))
        if self.rank_recorder is not None:
            self.rank_recorder.exchange_done(done)

    def record_period(self, step: int, steps: int, why: str) -> None:
        """Records a new period."""
        self._recorder.record(PeriodChosen, step=step, steps=steps, why=why)

    def rank_totals(self) -> RankTotals:
        """Returns the sums of this rank so far."""
        return RankTotals(
            steps=self.steps_made,
            compute_s=sum(model.clock.computing_s for model in self._models),
            gradients_s=sum(model.clock.averaging_s for model in self._models),
            exchange_s=self._exchange_s,
            waiting_s=self._waiting_s,
            samples=self.samples,
            gradient_bytes=sum(model.gradient_bytes for model in self._models),
        )

    def link_bytes(self) -> int:
        """Returns the bytes that this machine or network namespace has sent since training began."""
        return self._run_clock.interface_bytes() - self._interfaces_before

    def sums(self) -> dict[str, float]:
        """Returns the sums of this rank that the totals are made of, and the quartiles of the times of its steps."""
        totals = self.rank_totals()
        computing = self._models[0].clock.computing_times.quartiles() if self._models else None
        return {
            **_named_quartiles("step", self._step_times.quartiles()),
            **_named_quartiles("computing", computing),
            "samples": totals.samples,
            "sent_bytes": self.sent_bytes,
            "interface_bytes": self.link_bytes(),
            "compute_s": totals.compute_s,
            "gradients_s": totals.gradients_s,
            "exchange_s": totals.exchange_s,
            "waiting_s": totals.waiting_s,
            "gradient_bytes": totals.gradient_bytes,
        }

    def record_totals(self, rows: list[dict[str, float]], nodes: list[list[int]]) -> None:
        """Records the end of the run, from the sums of every rank."""
        seconds = self._run_clock.monotonic() - self._began
        samples = int(sum(row["samples"] for row in rows))
        self._recorder.record(
            RunFinished,
            seconds=seconds,
            steps=self.steps_made,
            samples=samples,
            samples_per_s=samples / seconds,
            exchanges=self.exchanges,
            exchange_seconds=self.exchange_seconds,
            sent_bytes=int(sum(row["sent_bytes"] for row in rows)),
            interface_bytes=tuple(int(rows[ranks[0]]["interface_bytes"]) for ranks in nodes),
            phases=phases_of(
                rows, nodes, seconds, global_gradients=any(model.has_global_gradients for model in self._models)
            ),
        )


def phases_of(
    rows: list[dict[str, float]], nodes: list[list[int]], seconds: float, *, global_gradients: bool = False
) -> tuple[Phases, ...]:
    """Returns where the seconds of each rank went; with `global_gradients` all ranks count as one node.

    All ranks of a node finish averaging gradients together. The last one to start did not wait: its time is the cost
    of averaging, and what the others spent beyond it is their waiting time.
    """
    phases_of_ranks = []
    for index, ranks in enumerate(nodes):
        averaging_s = min(rows[rank]["gradients_s"] for rank in (range(len(rows)) if global_gradients else ranks))
        for rank in ranks:
            row = rows[rank]
            waiting_s = row["waiting_s"] + row["gradients_s"] - averaging_s
            accounted_s = row["compute_s"] + averaging_s + row["exchange_s"] + waiting_s
            phases_of_ranks.append(
                Phases(
                    rank=rank,
                    node=index,
                    compute_s=row["compute_s"],
                    gradients_s=averaging_s,
                    exchange_s=row["exchange_s"],
                    waiting_s=waiting_s,
                    other_s=max(0.0, seconds - accounted_s),
                    gradient_bytes=int(row["gradient_bytes"]),
                    exchange_bytes=int(row["sent_bytes"]),
                    step=_quartiles_named("step", row),
                    computing=_quartiles_named("computing", row),
                )
            )
    return tuple(sorted(phases_of_ranks, key=lambda phases: phases.rank))


def _named_quartiles(name: str, times: Quartiles | None) -> dict[str, float]:
    return {} if times is None else {f"{name}/{field}": value for field, value in times.model_dump().items()}


def _quartiles_named(name: str, row: dict[str, float]) -> Quartiles | None:
    fields = {field: row[f"{name}/{field}"] for field in Quartiles.model_fields if f"{name}/{field}" in row}
    return Quartiles(**fields) if fields else None
