"""Run -> what its plan predicted beside what was measured."""

from collections.abc import Iterator, Sequence

from evenly.reports.fresh_start import exchanges_of, since_fresh_start
from evenly.reports.plan_table import milliseconds
from evenly.spec import Phases, Plan, Quartiles, Run, RunFinished, RunStarted

PREDICTION_HEADERS = ("time of", "predicted ms", "measured ms", "half of them", "ratio")


def prediction_rows(run: Run) -> list[tuple[str, ...]]:
    """Returns rows of texts under `PREDICTION_HEADERS`: a step, an exchange, and the computing of each rank in a step.

    Measured are medians. Of a resumed run the last start that ended counts. Empty for a run without a plan that
    predicts, and for one that recorded no times of steps.
    """
    return [_cells(name, predicted_s, measured) for name, predicted_s, measured in predictions(run)]


Row = tuple[str, float, Quartiles]


def predictions(run: Run) -> list[Row]:
    """Returns what was predicted, in seconds, and what was measured, for the rows of `prediction_rows`."""
    started, phases = _last_start(since_fresh_start(run))
    plan = None if started is None else started.plan
    if plan is None or plan.predicted is None:
        return []
    return [*_step_row(plan, phases), *_exchange_row(plan, run), *_rank_rows(plan, phases)]


def _last_start(run: Run) -> tuple[RunStarted | None, tuple[Phases, ...]]:
    """Returns the last start that ended, and what its ranks recorded."""
    started: RunStarted | None = None
    last: tuple[RunStarted | None, tuple[Phases, ...]] = (None, ())
    for event in run.events:
        if isinstance(event, RunStarted):
            started = event
        elif isinstance(event, RunFinished) and event.steps:
            last = started, event.phases
    return last


def _step_row(plan: Plan, phases: Sequence[Phases]) -> Iterator[Row]:
    """Yields the step of the slowest rank, which the plan predicts."""
    steps = [rank.step for rank in phases if rank.step is not None]
    if steps and plan.predicted is not None:
        yield "a step", plan.predicted.step_s, max(steps, key=lambda step: step.median_s)


def _exchange_row(plan: Plan, run: Run) -> Iterator[Row]:
    predicted_s = 0.0 if plan.predicted is None else plan.predicted.exchange_s
    measured = Quartiles.of([done.seconds for done in exchanges_of(run)])
    if measured is not None and predicted_s and plan.period.kind != "global":  # there each step has it
        yield "an exchange", predicted_s, measured


def _rank_rows(plan: Plan, phases: Sequence[Phases]) -> Iterator[Row]:
    for rank in phases:
        role = plan.roles[rank.rank] if rank.rank < len(plan.roles) else None
        if role is not None and role.compute_s and rank.computing is not None:
            yield f"rank {rank.rank} computing", role.compute_s, rank.computing


def _cells(name: str, predicted_s: float, measured: Quartiles) -> tuple[str, ...]:
    half = f"{milliseconds(measured.lower_s)} to {milliseconds(measured.upper_s)}"
    ratio = f"{measured.median_s / predicted_s:.2f}" if predicted_s else "-"
    return (name, milliseconds(predicted_s), milliseconds(measured.median_s), half, ratio)
