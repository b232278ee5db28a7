"""Run -> ranks that took part but have no record here: their files may be on other hosts."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from evenly.reports.fresh_start import since_fresh_start
from evenly.reports.plan_table import named
from evenly.reports.time_axis import TimeAxis
from evenly.spec import RankPart, Run, RunStarted, StepsDone
from evenly.spec.rank_log import FOLDER

SURE_S = 2.0  # after so long in a start, every rank has written its first lines
MOST_RANKS = 2**16  # a record of a rank above is damaged

Starts = list[tuple[RunStarted | None, list[RankPart]]]


def missing_ranks(run: Run, parts: Sequence[RankPart], axis: TimeAxis) -> dict[int, list[int]]:
    """Returns for each start of the run the ranks that recorded no step here; starts that miss none are left out."""
    missing = {}
    for number, (started, found) in enumerate(_starts(run, parts, axis)):
        recorded = {part.started.rank for part in found}
        absent = [rank for rank in _expected(started, recorded) if rank not in recorded]
        if absent and _is_long(run, found, axis, number):
            missing[number] = absent
    return missing


def missing_words(run: Run, parts: Sequence[RankPart], axis: TimeAxis, *, folder: Path) -> list[str]:
    """Returns sentences that name the missing ranks and their hosts.

    A start of which no rank has a record gets none: earlier versions had no such files, and large ones are begun anew.
    """
    starts = _starts(run, parts, axis)
    sentences: dict[tuple[int, ...], str] = {}
    for number, ranks in missing_ranks(run, parts, axis).items():
        started, found = starts[number]
        if found and tuple(ranks) not in sentences:
            sentences[tuple(ranks)] = _sentence(ranks, started, len(starts), folder / FOLDER)
    return list(sentences.values())


def _sentence(ranks: Sequence[int], started: RunStarted | None, starts: int, folder: Path) -> str:
    hosts = list(dict.fromkeys(_hosts(ranks, started)))
    source = f"host {hosts[0]}" if len(hosts) == 1 else f"hosts {', '.join(hosts)}" if hosts else "their hosts"
    part = f" of the start after step {started.resumed_step}" if started is not None and starts > 1 else ""
    has, their = ("has", "its file") if len(ranks) == 1 else ("have", "their files")
    return (
        f"{named(ranks)} {has} no record in {folder}{part}, so that steps, waiting and sent bytes are shown of the "
        f"other ranks only. Copy {their} <rank>.jsonl into it from {source}."
    )


def _hosts(ranks: Sequence[int], started: RunStarted | None) -> Iterator[str]:
    for node in started.cluster.nodes if started is not None else ():
        if node.name and not set(ranks).isdisjoint(node.ranks):
            yield node.name


def _starts(run: Run, parts: Sequence[RankPart], axis: TimeAxis) -> Starts:
    """Returns the event of each start on the axis, and the parts in it that have steps."""
    events: Mapping[float, RunStarted] = {event.at_s: event for event in since_fresh_start(run).of(RunStarted)}
    starts: Starts = [(events.get(began), []) for began in axis.began_at_s]
    for part in parts:
        number = axis.start_of_part(part)
        if number is not None and part.steps:
            starts[number][1].append(part)
    return starts


def _expected(started: RunStarted | None, recorded: set[int]) -> list[int]:
    """Returns the ranks that took part; without a record of that, those up to the last that recorded something."""
    if started is None:
        return list(range(min(max(recorded, default=-1) + 1, MOST_RANKS)))
    roles = started.plan.roles if started.plan is not None else ()
    left_out = {role.rank for role in roles if role.left_out}
    return sorted(rank for node in started.cluster.nodes for rank in node.ranks if rank not in left_out)


def _is_long(run: Run, found: Sequence[RankPart], axis: TimeAxis, number: int) -> bool:
    """Whether so much was trained in a start that all its ranks have recorded something."""
    seconds = [part.steps[-1].ended_s for part in found]
    for event in since_fresh_start(run).of(StepsDone):
        if axis.start_of(event.at_s) == number:
            seconds.append(event.at_s - axis.began_at_s[number])
    return max(seconds, default=0.0) > SURE_S
