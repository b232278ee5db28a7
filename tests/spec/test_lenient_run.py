"""A record that is broken, cut, empty, foreign or huge: what can be read is there, and one sentence for the rest."""

import pytest

from evenly import Run
from evenly.spec import read_leniently
from tests.reports.runs import finished, measured, started, steps, write


def lines(*events):
    return [event.model_dump_json() for event in events]


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "run", started(), steps(10), measured(loss=0.5), finished()) / "run.jsonl"


def test_a_whole_record_is_read_as_always(file):
    assert read_leniently(file) == (Run.read(file), ())
    assert read_leniently(file.parent) == (Run.read(file), ())


def test_a_last_line_that_a_crash_cut_short_is_no_problem(file):
    file.write_text(file.read_text()[:-20])
    assert read_leniently(file) == (Run.read(file), ())
    assert len(read_leniently(file).run.events) == 3


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("nonsense", "1 line is not an event and left out, first line 2: "),
        ('{"event": "dance"}', "1 line is not an event and left out, first line 2: "),
        ('{"event": "steps", "at_s": 1.0, "epoch": 0, "step": ' + "1" * 400 + ', "samples": 1}', "it holds the number"),
        ('{"event": "steps", "at_s": 1.0}', "first line 2: steps.epoch Field required."),
        ("[" * 100_000, "first line 2: "),
    ],
)
def test_a_broken_line_is_left_out_and_told(file, line, told):
    first, *rest = file.read_text().splitlines()
    file.write_text("\n".join([first, line, *rest]))
    run, (problem,) = read_leniently(file)
    assert problem.startswith(f"{file}: ")
    assert told in problem
    assert len(run.events) == 4


def test_many_broken_lines_are_one_sentence(file):
    file.write_text("junk\n" * 1000 + file.read_text() + "junk\n" * 1000)
    run, (problem,) = read_leniently(file)
    assert "2000 of 2004 lines are not an event and left out, first line 1" in problem
    assert len(run.events) == 4


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"\x89PNG\r\n\x1a\n\0\0\0", "is not the record of a run: none of its 3 lines is an event (line 1: "),
        (b'{"hello": "world"}', "is not the record of a run: its only line is not an event (line 1: "),
        (b"\xff\xfe" * 50, "is not the record of a run"),
    ],
)
def test_a_foreign_file_is_told(file, text, told):
    file.write_bytes(text)
    run, (problem,) = read_leniently(file)
    assert told in problem
    assert run.events == ()


def test_of_a_huge_file_the_beginning_is_read(file):
    text = file.read_bytes()
    file.write_bytes(text * 3)
    run, (problem,) = read_leniently(file, most_bytes=len(text) + 5)
    assert problem == f"{file} has more than {len(text) + 5} bytes; what follows was not read."
    assert len(run.events) == 4


@pytest.mark.parametrize("path", ["nowhere", "bad\0name"])
def test_a_file_that_is_not_there(tmp_path, path):
    run, (problem,) = read_leniently(tmp_path / path)
    assert problem.startswith(f"cannot read a run from {tmp_path / path}")
    assert run.events == ()
