"""Runs -> all that the page shows: the data of its charts, and the texts around them."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from evenly.reports.fresh_start import since_fresh_start
from evenly.reports.missing_ranks import missing_ranks
from evenly.reports.page import lines
from evenly.reports.page.bars import Bar, phase_bars, plan_bars, plan_legend, plan_words, prediction_bars
from evenly.reports.page.groups import Group, group_bars, group_cells, groups_of, mean_line
from evenly.reports.page.timeline import timeline
from evenly.reports.phases import phase_rows, phase_sums, remarks
from evenly.reports.plan_table import gigabytes
from evenly.reports.predictions import prediction_rows
from evenly.reports.rank_times import RankTimes, rank_times
from evenly.reports.reading import RecordedRun
from evenly.reports.table import TableRow, cells, notes, row_of
from evenly.reports.time_axis import TimeAxis, time_axis
from evenly.spec import PeriodChosen, Rebalanced, Run, RunStarted

MOST_ROWS = 24_000  # of all timelines of a page
MOST_POINTS = 16_000  # of all lines of a page
MOST_LISTED = 40  # periods and changes of batches named one by one


@dataclass(frozen=True)
class Figure:
    """A headline figure: what it is, its value, and a few words below."""

    name: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class RunPage:
    """What the page shows of one run; `charts` is for the script."""

    name: str
    row: TableRow
    is_simulated: bool
    figures: tuple[Figure, ...]
    problems: tuple[str, ...]
    phases: list[Bar]
    phase_cells: list[tuple[str, ...]]
    plan: list[Bar]
    plan_legend: dict[str, str]
    plan_sentences: list[str]
    predictions: list[Bar]
    prediction_cells: list[tuple[str, ...]]
    periods: list[str]
    changes: list[str]
    remarks: list[str]
    settings: list[tuple[str, str]]
    charts: dict[str, object]
    logged: list[lines.Points]


@dataclass(frozen=True)
class PageData:
    """What the page shows."""

    runs: list[RunPage]
    groups: list[Group]
    table: list[tuple[str, ...]]
    group_table: list[tuple[str, ...]]
    group_bars: list[tuple[str, list[Bar]]]
    notes: list[str]
    charts: dict[str, object]


def page_data(runs: Sequence[RecordedRun]) -> PageData:
    """Returns what the page shows of these runs."""
    most_rows, most_points = MOST_ROWS // len(runs), MOST_POINTS // len(runs)
    shown = [_run_page(recorded, most_rows=most_rows, most_points=most_points) for recorded in runs]
    groups, rows = groups_of(runs), [run.row for run in shown]
    return PageData(
        runs=shown,
        groups=groups,
        table=[cells(row) for row in rows],
        group_table=[group_cells(group, rows) for group in groups] if len(groups) < len(runs) else [],
        group_bars=group_bars(groups, rows) if len(runs) > 1 else [],
        notes=notes(rows),
        charts={
            "runs": [run.charts for run in shown],
            "compared": _compared(shown, groups) if len(runs) > 1 else [],
            "groups": [{"name": group.name, "runs": group.runs} for group in groups],
        },
    )


def _run_page(recorded: RecordedRun, *, most_rows: int, most_points: int) -> RunPage:
    run = recorded.run
    axis = time_axis(run, recorded.logs.parts)
    times = rank_times(recorded, axis)
    whole = since_fresh_start(run)
    started = whole.last(RunStarted)
    row = row_of(run, name=recorded.name)
    logged = lines.logged_lines(run, axis)
    is_whole = not missing_ranks(run, recorded.logs.parts, axis)
    samples = lines.throughput(run, times, axis, is_whole=is_whole)
    settings = started.settings if started is not None else {}
    each = max(80, most_points // (len(logged) + 4))
    charts: dict[str, object] = {
        "name": recorded.name,
        "end": _end(whole, axis, times),
        "logged": [line.to_data(most=each) for line in logged],
        "throughput": [samples.to_data(most=each)] if samples is not None else [],
        "sent": {kind: [line.to_data(most=each) for line in nodes] for kind, nodes in lines.sent_lines(times).items()},
        "exchanges": {kind: line.to_data(most=each) for kind, line in lines.exchange_lines(run, axis).items()},
        "period": [line.to_data(most=each) for line in [lines.period_line(run, axis)] if line is not None],
        "batches": [line.to_data(most=each) for line in lines.batch_lines(run, axis)],
        "timeline": timeline(times, most_rows=most_rows),
    }
    return RunPage(
        name=recorded.name,
        row=row,
        is_simulated=bool(settings.get("simulated")),
        figures=_figures(recorded, row),
        problems=recorded.problems,
        phases=phase_bars(run, times),
        phase_cells=phase_rows(run),
        plan=plan_bars(run),
        plan_legend=plan_legend(run),
        plan_sentences=plan_words(started.plan if started is not None else None),
        predictions=prediction_bars(run),
        prediction_cells=prediction_rows(run),
        periods=_periods(recorded),
        changes=_changes(recorded),
        remarks=remarks(run),
        settings=[(name, str(value)) for name, value in settings.items()],
        charts=charts,
        logged=logged,
    )


def _end(whole: Run, axis: TimeAxis, times: Sequence[RankTimes]) -> dict[str, float]:
    """Returns the training time and the step at which a run ended, or was seen last."""
    seconds = [axis.seconds(event.at_s) for event in whole.events if not isinstance(event, RunStarted)]
    steps = [int(getattr(event, "step", 0)) for event in whole.events]
    seconds += [float(part.ended_s[-1]) for part in times if len(part)]
    steps += [int(part.step[-1]) for part in times if len(part)]
    return {"t": max(seconds, default=0.0), "step": max(steps, default=0)}


def _figures(recorded: RecordedRun, row: TableRow) -> tuple[Figure, ...]:
    """Returns the headline figures: those of the table, and the last value under each name that was logged."""
    table = dict(zip(("run", "ranks", "period", "state", "time", "rate", "mb", "exchanges"), cells(row), strict=False))
    figures = [Figure("state", table["state"], row.note)] if row.state != "done" else []
    if row.seconds is not None:
        figures.append(Figure("time", f"{table['time']} s"))
    if row.samples_per_s is not None:
        figures.append(Figure("throughput", f"{table['rate']}", "samples/s"))
    values = since_fresh_start(recorded.run).latest_values()
    for name, value in sorted(values.items(), key=lambda item: item[0] != "accuracy"):
        is_part = name == "accuracy"
        text = "not finite" if value is None else f"{100 * value:.2f} %" if is_part else f"{value:.3g}"
        figures.append(Figure(f"last {name}", text))
    if row.mb_across is not None:
        figures.append(Figure("network interfaces", f"{table['mb']} MB", "sent by all nodes"))
    if row.exchanges is not None:
        sent = sum(rank.exchange_bytes for rank in phase_sums(recorded.run))
        words = f"{gigabytes(sent)} sent in them" if sent else ""
        figures.append(Figure("exchanges", table["exchanges"], words))
    times_s = [
        (p.compute_s, p.waiting_s, p.compute_s + p.gradients_s + p.exchange_s + p.waiting_s + p.other_s)
        for p in phase_sums(recorded.run)
    ]
    if any(total_s for _, _, total_s in times_s):
        computing = mean(compute_s / total_s for compute_s, _, total_s in times_s if total_s)
        waiting = mean(waiting_s / total_s for _, waiting_s, total_s in times_s if total_s)
        figures.append(Figure("computing", f"{computing:.0%}", f"waiting {waiting:.0%}, mean of ranks"))
    return tuple(figures[:12])


def _periods(recorded: RecordedRun) -> list[str]:
    chosen = since_fresh_start(recorded.run).of(PeriodChosen)
    sentences = [f"after step {event.step}: every {event.steps} steps, because {event.why}" for event in chosen]
    return _shortened(sentences)


def _changes(recorded: RecordedRun) -> list[str]:
    changes = since_fresh_start(recorded.run).of(Rebalanced)
    sentences = []
    for change in changes:
        shares = "; ".join(", ".join(f"{share:.3g}" for share in shares) for shares in change.shares)
        samples = ", ".join(map(str, change.samples))
        sentences.append(f"after step {change.step}: {samples} samples" + (f"; shares {shares}" if shares else ""))
    return _shortened(sentences)


def _shortened(sentences: list[str]) -> list[str]:
    if len(sentences) <= MOST_LISTED:
        return sentences
    half = MOST_LISTED // 2
    return [*sentences[:half], f"... {len(sentences) - MOST_LISTED} more ...", *sentences[-half:]]


def _compared(runs: Sequence[RunPage], groups: Sequence[Group]) -> list[dict[str, object]]:
    """Returns for each logged name the lines of all runs, and of each group the mean with its deviation."""
    names = list(dict.fromkeys(line.name for run in runs for line in run.logged))
    each = max(60, MOST_POINTS // (max(1, len(names)) * len(runs)))
    compared: list[dict[str, object]] = []
    for name in names:
        members = [[line for line in run.logged if line.name == name] for run in runs]
        series: list[dict[str, object]] = []
        for number, group in enumerate(groups):
            drawn = [line for place in group.runs for line in members[place]]
            if not drawn:
                continue
            series.append(
                {
                    "name": group.name,
                    "color": number,
                    "lines": [line.to_data(most=each) for line in drawn],
                    "mean": {axis: mean_line(drawn, axis=axis) for axis in ("t", "step")},
                }
            )
        compared.append({"name": name, "series": series})
    return compared
