"""Run folder -> all that was recorded in it, with a sentence for everything that could not be read."""

from dataclasses import dataclass
from pathlib import Path

from evenly.errors import SpecError
from evenly.reports.missing_ranks import missing_words
from evenly.reports.time_axis import time_axis
from evenly.spec import RankLogs, Run, read_leniently, read_rank_logs


@dataclass(frozen=True)
class RecordedRun:
    """The events of a run, what its ranks recorded, and what could not be read of either."""

    name: str
    run: Run
    logs: RankLogs
    problems: tuple[str, ...] = ()


def read_recorded(path: str | Path, *, with_ranks: bool = True) -> RecordedRun:
    """Returns what can be read of a run folder or `run.jsonl` file; raises `SpecError` if that is nothing.

    Without `with_ranks` the files of ranks are not read.
    """
    file = Path(path)
    lenient = read_leniently(file)
    folder = file.parent if file.suffix == ".jsonl" else file
    logs = read_rank_logs(folder) if with_ranks else RankLogs(())
    problems = (*lenient.problems, *logs.problems)
    if not lenient.run.events and not logs.parts:
        raise SpecError(" ".join(problems))
    axis = time_axis(lenient.run, logs.parts)
    missing = missing_words(lenient.run, logs.parts, axis, folder=folder)
    return RecordedRun(name_of(file), lenient.run, logs, (*problems, *missing))


def name_of(path: Path) -> str:
    """Returns the name of a run: that of its folder."""
    folder = path.parent if path.suffix == ".jsonl" else path
    return folder.name or folder.resolve().name
