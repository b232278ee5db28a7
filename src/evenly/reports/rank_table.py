"""Runs -> CSV: one row for every line that a rank recorded."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from evenly.errors import SpecError
from evenly.reports.reading import RecordedRun
from evenly.spec import LinkBytes, RankExchange, RankPart, StepTimes

IDENTITY = ("run", "rank", "node", "host", "device", "began_at_s", "event", "at_s")
FIELDS = tuple(
    dict.fromkeys(
        [
            *(name for name in StepTimes._fields if name != "ended_s"),
            *(name for kind in (RankExchange, LinkBytes) for name in kind.model_fields if name not in IDENTITY),
        ]
    )
)
COLUMNS = (*IDENTITY, *FIELDS)


def write_rank_table(runs: Sequence[RecordedRun], path: Path) -> None:
    """Writes all lines of all ranks as CSV under `COLUMNS`; a field that a kind of line does not have is empty.

    `at_s` counts from `began_at_s`, seconds since 1970 by the rank's clock; a row of steps has the time of its end.
    """
    if not any(recorded.logs.parts for recorded in runs):
        names = ", ".join(recorded.name for recorded in runs)
        raise SpecError(
            f"a CSV file of {names} was asked for, but no rank has recorded anything: there is no ranks/ folder, or "
            "nothing in it can be read. Give the folder of a run that has one."
        )
    try:
        with path.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, COLUMNS, restval="", lineterminator="\n")
            writer.writeheader()
            for recorded in runs:
                for part in recorded.logs.parts:
                    writer.writerows(_rows(part, recorded.name))
    except OSError as error:
        raise SpecError(
            f"the file {path} cannot be written: {error.strerror}. Give a file in a folder that exists."
        ) from None


def _rows(part: RankPart, name: str) -> Iterator[dict[str, object]]:
    started = part.started
    identity = {
        "run": name,
        "rank": started.rank,
        "node": started.node,
        "host": started.host,
        "device": started.device,
        "began_at_s": started.at_s,
    }
    for row in part.steps:
        fields = dict(zip(StepTimes._fields, row, strict=True))
        yield {**identity, "event": "steps", "at_s": fields.pop("ended_s"), **fields}
    for event in (*part.exchanges, *part.links):
        yield {**identity, **event.model_dump()}
