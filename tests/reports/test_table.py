"""What a run came to, whether it is done, failed, stopped or was resumed; and the table of several."""

import pytest
from hypothesis import given

from evenly import Run, report
from evenly.errors import SpecError
from evenly.reports import HEADERS, TableRow, cells, notes, row_of
from tests.reports.runs import WARM, checkpoint, epoch, failed, finished, measured, started, steps, write
from tests.spec.values import runs


def row(*events) -> TableRow:
    return row_of(Run(events=events))


def test_a_run_that_is_done():
    done = row(started(), steps(100), measured(loss=0.5), measured(accuracy=0.875), finished())
    assert done == TableRow("first", "3+1", "50", "done", "", 10.0, 640.0, 1.6, 4, 0.875)
    assert cells(done) == ("first", "3+1", "50", "done", "10.0", "640", "1.6", "4", "87.50")
    assert notes([done]) == []


def test_a_run_that_failed_says_why():
    broken = row(started(), steps(10), failed())
    assert (broken.state, broken.seconds, broken.accuracy) == ("failed", None, None)
    assert cells(broken) == ("first", "3+1", "50", "failed", "-", "-", "-", "-", "-")
    assert notes([broken]) == ["first failed: PeerError: rank 3 on far stopped: DataError: no data"]


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ([steps(10), measured(loss=0.5)], "after step 20"),
        ([steps(10), epoch(12)], "after step 12"),
        ([steps(10), checkpoint(14)], "after step 14"),
        ([], "before its first recorded step"),
    ],
)
def test_a_run_that_stopped_says_how_far_it_came(events, told):
    stopped = row(started(), *events)
    assert (stopped.state, stopped.note) == ("unfinished", told)
    assert notes([stopped]) == [f"first unfinished {told}"]


def test_a_resumed_run_that_stopped_again_came_at_least_to_where_it_resumed():
    assert row(started(), steps(10), failed(), started(resumed=40)).note == "after step 40"


def test_a_failure_is_forgotten_once_the_run_went_on():
    assert row(started(), failed(), started(resumed=10), finished()).state == "done"
    assert row(started(), finished(), started(resumed=200), failed()).state == "failed"


def test_the_parts_of_a_resumed_run_are_summed():
    first, second = finished(10.0, 6400, 4), finished(30.0, 25600, 6)
    whole = row(started(), measured(accuracy=0.5), first, started(resumed=200), second)
    assert (whole.seconds, whole.samples_per_s, whole.mb_across, whole.exchanges) == (40.0, 800.0, 8.0, 10)
    assert whole.accuracy == 0.5


def test_a_run_that_was_already_done_keeps_its_numbers():
    again = row(started(), finished(), started(resumed=200), finished(1e-3, 0, 0))
    assert cells(again) == cells(row(started(), finished()))


def test_a_fresh_start_in_the_same_folder_counts_alone():
    fresh = row(started(), measured(accuracy=0.9), finished(99.0), started(), finished(10.0))
    assert (fresh.seconds, fresh.accuracy) == (10.0, None)


@pytest.mark.parametrize(("every", "told"), [("epoch", "epoch"), ("global", "global"), (7, "7"), (WARM, "8")])
def test_the_period_in_a_word(every, told):
    assert row(started(every=every)).period == told


def test_a_run_without_a_start_is_still_a_row():
    assert cells(row()) == ("run", "?", "?", "unfinished", "-", "-", "-", "-", "-")
    assert row(measured(accuracy=None), finished()).accuracy is None


@given(runs)
def test_every_run_has_a_row(run):
    assert len(cells(row_of(run))) == len(HEADERS)
    assert len(report(run).splitlines()) >= 2


def test_the_table_of_values_folders_and_files(tmp_path):
    value = Run(events=(started(name="value"), measured(accuracy=0.5), finished()))
    folder = write(tmp_path / "folder", started(every="epoch"), finished(100.0))
    file = write(tmp_path / "file", started(every="global"), failed("ValueError: no")) / "run.jsonl"
    assert report(value, str(folder), file) == (
        "run     ranks  period  state   time s  samples/s  MB   exch.  acc. %\n"
        "value   3+1    50      done    10.0    640        1.6  4      50.00\n"
        "folder  3+1    epoch   done    100.0   64         1.6  4      -\n"
        "file    3+1    global  failed  -       -          -    -      -\n"
        "file failed: ValueError: no"
    )


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(SpecError, match=rf"cannot read a run from {tmp_path}/run.jsonl"):
        report(tmp_path)
