"""The CSV file has one row for every line that a rank recorded, with its numbers."""

import csv

import pytest

from evenly.errors import SpecError
from evenly.reports.rank_table import COLUMNS, write_rank_table
from tests.reports.recorded import of_parts, recorded


def test_one_row_for_every_recorded_line(tmp_path):
    runs = [recorded(tmp_path / "a"), recorded(tmp_path / "b", seed=1)]
    write_rank_table(runs, tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert tuple(rows[0]) == COLUMNS
    files = [file for run in ("a", "b") for file in (tmp_path / run / "ranks").iterdir()]
    assert len(rows) == sum(len(file.read_text().splitlines()) - 1 for file in files)
    own = [row for row in rows if (row["run"], row["rank"]) == ("b", "2")]
    part = runs[1].logs.parts[2]
    assert [float(row["compute_s"]) for row in own if row["event"] == "steps"] == [row.compute_s for row in part.steps]
    sent = [int(row["sent_bytes"]) for row in own if row["event"] == "exchange"]
    assert sent == [done.sent_bytes for done in part.exchanges]
    assert {row["event"] for row in own} == {"steps", "exchange", "link"}


def test_a_run_without_rank_files_has_no_rows(tmp_path):
    with pytest.raises(SpecError, match="no rank has recorded anything"):
        write_rank_table([of_parts()], tmp_path / "out.csv")
