"""`run.jsonl`: read whole, read when a crash cut its last line, refused when it was damaged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenly import Run
from evenly.errors import SpecError
from evenly.spec import EpochDone, Measured, RunFailed, StepsDone
from tests.spec.values import events

STEPS = [StepsDone(at_s=float(n), epoch=0, step=n, samples=8 * n) for n in (1, 2, 3)]


def write(folder, happened, *, cut=0):
    file = folder / "run.jsonl"
    whole = "".join(event.model_dump_json() + "\n" for event in happened).encode()
    file.write_bytes(whole[: len(whole) - cut])
    return file


@given(happened=st.lists(events, max_size=6))
def test_a_run_is_read_as_it_was_written(tmp_path_factory, happened):
    folder = tmp_path_factory.mktemp("run")
    file = write(folder, happened)
    assert Run.read(file) == Run.read(folder) == Run.read(str(folder)) == Run(events=happened)


@given(happened=st.lists(events, min_size=1, max_size=3), data=st.data())
def test_a_last_line_cut_short_is_left_out(tmp_path_factory, happened, data):
    last = len(happened[-1].model_dump_json().encode()) + 1
    file = write(tmp_path_factory.mktemp("run"), happened, cut=data.draw(st.integers(2, last)))
    assert Run.read(file) == Run(events=happened[:-1])


def test_a_last_line_without_its_end_of_line_counts(tmp_path):
    assert Run.read(write(tmp_path, STEPS, cut=1)) == Run(events=STEPS)


@pytest.mark.parametrize("broken", ["{", "no json", '{"event": "party"}', '{"event": "steps", "at_s": 1}', "[1]"])
def test_a_broken_line_in_the_middle_is_refused_with_its_number(tmp_path, broken):
    first, second, third = (event.model_dump_json() for event in STEPS)
    file = tmp_path / "run.jsonl"
    file.write_text("\n".join([first, "", second, broken, third]))
    with pytest.raises(SpecError, match=rf"{file}: line 4 of the run is not an event"):
        Run.read(file)


def test_a_last_line_that_is_whole_but_wrong_is_refused():
    with pytest.raises(SpecError, match=r"line 1 .* step.* Field required"):
        Run.from_lines(['{"event": "steps", "at_s": 1.0, "epoch": 0, "samples": 3}'])


def test_a_run_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SpecError, match=rf"{tmp_path}/run.jsonl: No such file"):
        Run.read(tmp_path)


def test_events_are_found_by_kind():
    measured = [
        Measured(at_s=1.0, step=1, values={"loss": 2.0, "accuracy": 0.25}),
        Measured(at_s=2.0, step=2, values={"loss": None}),
    ]
    run = Run(events=(STEPS[0], measured[0], STEPS[1], measured[1], EpochDone(at_s=3.0, epoch=1, step=2)))
    assert run.of(StepsDone) == STEPS[:2]
    assert run.last(StepsDone) == STEPS[1]
    assert run.of(RunFailed) == []
    assert run.last(RunFailed) is None
    assert run.latest_values() == {"loss": None, "accuracy": 0.25}


def test_a_file_that_is_no_run_is_refused():
    with pytest.raises(SpecError, match="line 1 of the run is not an event"):
        Run.from_lines([b"\xff\xfe bad"])
    assert Run.from_lines([b'{"event": "sta']).events == ()
