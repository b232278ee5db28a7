"""Run -> bars of ranks: what the plan expects, where the time went, predicted beside measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from evenly.reports.fresh_start import since_fresh_start
from evenly.reports.phases import phase_sums
from evenly.reports.plan_table import milliseconds
from evenly.reports.predictions import predictions
from evenly.reports.rank_times import PHASES, RankTimes
from evenly.spec import Plan, Run, RunStarted
from evenly.spec.plan import counted

PHASE_WORDS = {
    "compute": "computing",
    "averaging": "averaging gradients",
    "exchange": "exchange",
    "waiting": "waiting",
    "other": "other",
}
LEFT_OUT = "left-out"


@dataclass(frozen=True)
class Segment:
    """A part of a bar: its kind, which gives the colour, where it begins and how long it is, of 1000; and its title."""

    kind: str
    begin: float
    length: float
    title: str


@dataclass(frozen=True)
class Bar:
    """One line of a bar chart: a label, the bar, a figure beside it, and a remark below."""

    label: str
    detail: str
    segments: tuple[Segment, ...]
    figure: str
    remark: str = ""
    whisker: tuple[float, float] | None = None


def phase_bars(run: Run, times: Sequence[RankTimes]) -> list[Bar]:
    """Returns a bar for each rank: the parts of its time. A run that has not ended is read from its ranks."""
    sums = [
        (rank.rank, rank.node, (rank.compute_s, rank.gradients_s, rank.exchange_s, rank.waiting_s, rank.other_s))
        for rank in phase_sums(run)
    ] or _recorded_sums(times)
    bars = []
    for rank, node, seconds in sums:
        total_s = sum(seconds) or 1.0
        parts = [(kind, second / total_s) for kind, second in zip(PHASES, seconds, strict=True)]
        titles = [f"{PHASE_WORDS[kind]}: {part:.1%}, {_seconds(part * total_s)}" for kind, part in parts]
        segments = _row([(kind, part) for kind, part in parts], titles)
        bars.append(Bar(f"rank {rank}", f"node {node}", segments, f"{parts[0][1]:.0%} computing"))
    return bars


def _recorded_sums(times: Sequence[RankTimes]) -> list[tuple[int, int, tuple[float, ...]]]:
    sums: dict[tuple[int, int], list[float]] = {}
    for part in times:
        total = sums.setdefault((part.started.rank, part.started.node), [0.0] * len(PHASES))
        for index, seconds in enumerate(part.phases_s.sum(axis=0)):
            total[index] += float(seconds)
    return [(rank, node, tuple(seconds)) for (rank, node), seconds in sorted(sums.items())]


def plan_bars(run: Run) -> list[Bar]:
    """Returns a bar for each rank that was started: how long it is to compute in a step, and who is left out and why.

    Without predicted times bars show samples.
    """
    started = since_fresh_start(run).last(RunStarted)
    plan = started.plan if started is not None else None
    if started is None or plan is None:
        return []
    numbers = started.ranks or tuple(range(len(plan.roles)))
    step_s = plan.predicted.step_s if plan.predicted is not None else 0.0
    longest = max([step_s, *(role.compute_s for role in plan.roles)])
    most_samples = max(1, *(role.samples for role in plan.roles))
    bars = {}
    for role in plan.roles:
        number = numbers[role.rank] if role.rank < len(numbers) else role.rank
        label, detail = f"rank {role.rank}", f"node {role.node}, {role.device}"
        if number != role.rank:
            detail += f", started as {number}"
        if role.left_out:
            bars[number] = _left_out(label, detail, role.left_out)
            continue
        samples = counted(role.samples, "sample") if role.samples else ""
        if longest and role.compute_s:
            parts = [("compute", role.compute_s / longest), ("waiting", max(0.0, step_s - role.compute_s) / longest)]
            rest = f"averaging and waiting: {milliseconds(max(0.0, step_s - role.compute_s))} ms"
            titles = [f"computing: {milliseconds(role.compute_s)} ms", rest]
            figure = f"{milliseconds(role.compute_s)} ms" + (f" for {samples}" if samples else "")
        else:
            parts, titles = [("compute", role.samples / most_samples)], [samples]
            figure = samples or "as the program feeds it"
        bars[number] = Bar(label, detail, _row(parts, titles), figure)
    for number, reason in started.left_out.items():
        bars[number] = _left_out(f"rank {number} of the launch", "", reason)
    return [bar for _, bar in sorted(bars.items())]


def plan_legend(run: Run) -> dict[str, str]:
    """Returns what the colours of `plan_bars` mean."""
    kinds = {segment.kind for bar in plan_bars(run) for segment in bar.segments}
    started = since_fresh_start(run).last(RunStarted)
    roles = started.plan.roles if started is not None and started.plan is not None else ()
    words = {
        "compute": "computing, as predicted" if any(role.compute_s for role in roles) else "samples",
        "waiting": "averaging and waiting",
        LEFT_OUT: "left out",
    }
    return {kind: word for kind, word in words.items() if kind in kinds}


def plan_words(plan: Plan | None) -> list[str]:
    """Returns the plan in sentences."""
    return plan.explain().splitlines() if plan is not None else []


def prediction_bars(run: Run) -> list[Bar]:
    """Returns two bars for each predicted time: predicted, and the measured median with the middle half."""
    rows = predictions(run)
    longest = max((max(predicted_s, measured.upper_s) for _, predicted_s, measured in rows), default=0.0)
    bars = []
    for name, predicted_s, measured in rows if longest else ():
        half = f"{milliseconds(measured.lower_s)} to {milliseconds(measured.upper_s)} ms"
        pairs = (("predicted", predicted_s, "predicted"), ("measured", measured.median_s, f"median; half: {half}"))
        ratio = f"{measured.median_s / predicted_s:.2f}x" if predicted_s else "-"
        for kind, seconds, title in pairs:
            is_first = kind == "predicted"
            bars.append(
                Bar(
                    label=name if is_first else "",
                    detail=kind,
                    segments=_row([(kind, seconds / longest)], [f"{milliseconds(seconds)} ms, {title}"]),
                    figure=f"{milliseconds(seconds)} ms" + ("" if is_first else f" ({ratio})"),
                    whisker=None
                    if is_first
                    else (1000 * measured.lower_s / longest, 1000 * measured.upper_s / longest),
                )
            )
    return bars


def _left_out(label: str, detail: str, reason: str) -> Bar:
    return Bar(label, detail, _row([(LEFT_OUT, 1.0)], [f"left out: {reason}"]), "left out", remark=reason)


def _row(parts: Sequence[tuple[str, float]], titles: Sequence[str]) -> tuple[Segment, ...]:
    segments, begin = [], 0.0
    for (kind, part), title in zip(parts, titles, strict=True):
        length = round(1000 * min(max(part, 0.0), 1.0), 2)
        if length:
            segments.append(Segment(kind, round(begin, 2), length, title))
        begin += length
    return tuple(segments)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{milliseconds(seconds)} ms"
