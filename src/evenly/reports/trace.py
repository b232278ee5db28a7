"""Run -> a trace that Perfetto and Chrome's tracing page open: a process per node, a thread per rank.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, "JSON object format".
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evenly.errors import SpecError
from evenly.reports.rank_times import PHASES, RankTimes, rank_times
from evenly.reports.reading import RecordedRun

ORDER = ("other", "compute", "waiting", "averaging", "exchange")  # of phases in a step, as far as it is known
NAMES = {"compute": "computing", "averaging": "averaging gradients"}
LEAST_US = 0.5  # shorter phases are left out


def trace_of(recorded: RecordedRun) -> dict[str, Any]:
    """Returns the trace of a run as the JSON object of the format; raises `SpecError` if its ranks recorded nothing."""
    times = [part for part in rank_times(recorded) if len(part)]
    if not times:
        raise SpecError(
            f"a trace of {recorded.name} was asked for, but its ranks recorded no steps: there is no ranks/ folder, "
            "or nothing in it can be read. Give the folder of a run that has one."
        )
    events = [*_names(times), *sorted(_events(times), key=lambda event: (event["ts"], -event.get("dur", 0.0)))]
    other = {"run": recorded.name, "problems": list(recorded.problems)}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def write_trace(recorded: RecordedRun, path: Path) -> None:
    """Writes the trace of a run to a file."""
    text = json.dumps(trace_of(recorded), separators=(",", ":"), allow_nan=False)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(
            f"the trace {path} cannot be written: {error.strerror}. Give a file in a folder that exists."
        ) from None


def _process(part: RankTimes) -> int:
    return part.started.node + 1  # 0 is the operating system's


def _names(times: list[RankTimes]) -> Iterator[dict[str, Any]]:
    """Yields the names of processes and threads, each once."""
    nodes = {part.started.node: part for part in times}
    for node, part in sorted(nodes.items()):
        host = f" ({part.started.host})" if part.started.host else ""
        common = {"ph": "M", "pid": _process(part), "tid": 0, "ts": 0}
        yield {**common, "name": "process_name", "args": {"name": f"node {node}{host}"}}
        yield {**common, "name": "process_sort_index", "args": {"sort_index": node}}
    for rank, part in sorted({part.started.rank: part for part in times}.items()):
        common = {"ph": "M", "pid": _process(part), "tid": rank, "ts": 0}
        device = f" ({part.started.device})" if part.started.device else ""
        yield {**common, "name": "thread_name", "args": {"name": f"rank {rank}{device}"}}
        yield {**common, "name": "thread_sort_index", "args": {"sort_index": rank}}


def _events(times: list[RankTimes]) -> Iterator[dict[str, Any]]:
    free_us: dict[int, float] = {}  # when the last event of each rank ended
    for part in times:
        yield from _rows(part, free_us)
        yield from _counters(part)


def _rows(part: RankTimes, free_us: dict[int, float]) -> Iterator[dict[str, Any]]:
    """Yields for each row the steps and, inside, their phases. Rows follow each other without overlapping."""
    place = {"ph": "X", "pid": _process(part), "tid": part.started.rank}
    for n in range(len(part)):
        begin_us = max(free_us.get(part.started.rank, 0.0), _us(part.began_s[n]))
        end_us = max(begin_us, _us(part.ended_s[n]))
        free_us[part.started.rank] = end_us
        last, count = int(part.step[n]), int(part.steps[n])
        name = f"step {last}" if count == 1 else f"steps {last - count + 1} to {last}"
        args = {"samples": float(part.samples[n]), "gradient_bytes": int(part.gradient_bytes[n])}
        yield {**place, "name": name, "cat": "step", "ts": begin_us, "dur": round(end_us - begin_us, 3), "args": args}
        yield from _phases(part, n, begin_us, end_us, place)


def _phases(part: RankTimes, n: int, begin_us: float, end_us: float, place: dict[str, Any]) -> Iterator[dict[str, Any]]:
    seconds = dict(zip(PHASES, part.phases_s[n].tolist(), strict=True))
    total_s = sum(seconds.values())
    at_us = begin_us
    for phase in ORDER:
        length_us = (end_us - begin_us) * seconds[phase] / total_s if total_s else 0.0
        if length_us >= LEAST_US:
            duration = round(max(0.0, min(length_us, end_us - at_us)), 3)
            yield {**place, "name": NAMES.get(phase, phase), "cat": phase, "ts": round(at_us, 3), "dur": duration}
        at_us = min(end_us, at_us + length_us)


def _counters(part: RankTimes) -> Iterator[dict[str, Any]]:
    """Yields the bytes that the rank has sent in exchanges so far, and those of its node's interfaces."""
    place = {"ph": "C", "pid": _process(part), "tid": part.started.rank}
    sent = 0
    for done in part.exchanges:
        sent += done.sent_bytes
        name = f"bytes sent in exchanges, rank {part.started.rank}"
        yield {**place, "name": name, "ts": _us(part.begins_s + done.at_s), "args": {"bytes": sent}}
    for link in part.links:
        args = {"bytes": link.sent_bytes}
        yield {**place, "name": "bytes over interfaces", "ts": _us(part.begins_s + link.at_s), "args": args}


def _us(seconds: float) -> float:
    return round(1e6 * max(0.0, float(seconds)), 3)
