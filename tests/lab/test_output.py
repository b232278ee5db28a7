"""What the user sees of the ranks, and the command line."""

import json
import sys

import pytest
from typer.testing import CliRunner

from evenly.cli.lab import app
from evenly.lab import LabResult
from evenly.lab._output import Captured, Prefixed, RankZero
from evenly.lab._ranks import RankSlot

SEATS = (
    RankSlot(rank=0, node=0, local_rank=0, label="node0:rank0"),
    RankSlot(rank=1, node=1, local_rank=0, label="node1:rank1"),
)


def test_prefixed_lines_come_whole(capsys):
    outlet = Prefixed()
    outlet.take("hel", slot=SEATS[0], stream="stdout")
    outlet.take("one\ntwo\n", slot=SEATS[1], stream="stdout")
    outlet.take("lo\nend", slot=SEATS[0], stream="stdout")
    outlet.take("", slot=SEATS[0], stream="stdout")
    lines = ["[node1:rank1] one", "[node1:rank1] two", "[node0:rank0] hello", "[node0:rank0] end"]
    assert capsys.readouterr().out.splitlines() == lines


def test_rank_zero_is_shown_as_it_is_and_others_only_when_they_fail(capsys):
    outlet = RankZero()
    outlet.take("50%\r", slot=SEATS[0], stream="stdout")
    outlet.take("careful\n", slot=SEATS[0], stream="stderr")
    outlet.take("not shown\n", slot=SEATS[1], stream="stdout")
    outlet.take("".join(f"line {number}\n" for number in range(30)), slot=SEATS[1], stream="stderr")
    assert capsys.readouterr() == ("50%\r", "careful\n")
    outlet.finish([SEATS[1]])
    shown = capsys.readouterr().err.splitlines()
    assert shown == [f"[node1:rank1] line {number}" for number in range(10, 30)]


def test_captured_text_is_kept_by_rank():
    outlet = Captured(SEATS)
    outlet.take("a", slot=SEATS[1], stream="stdout")
    outlet.take("b", slot=SEATS[1], stream="stdout")
    assert outlet.texts("stdout") == ("", "ab")
    assert outlet.texts("stderr") == ("", "")


def test_help_helps():
    text = CliRunner().invoke(app, ["run", "--help"]).output
    for word in ("COMMAND", "demo", "three-one", "two-by-two", "--output", "--timeout", "--json", "rate_mbit"):
        assert word in text
    assert "clean" in CliRunner().invoke(app, ["--help"]).output


def test_a_bad_cluster_is_a_sentence_and_not_a_trace():
    result = CliRunner().invoke(app, ["run", "nowhere", "--", "true"])
    assert result.exit_code == 2
    assert "cannot read a cluster from nowhere" in result.stderr


def test_check_says_what_is_missing(monkeypatch):
    monkeypatch.setattr("evenly.lab.missing", lambda: "The lab needs root.")
    result = CliRunner().invoke(app, ["check"])
    assert (result.exit_code, result.stdout) == (1, "The lab needs root.\n")
    monkeypatch.setattr("evenly.lab.missing", lambda: None)
    assert CliRunner().invoke(app, ["check"]).stdout == "ready\n"


@pytest.mark.lab
def test_a_run_ends_in_a_table_and_a_file(tmp_path):
    path = tmp_path / "result.json"
    say = [sys.executable, "-c", "import os; print('I am', os.environ['RANK'])"]
    result = CliRunner().invoke(app, ["run", "demo", "--json", str(path), "--", *say])
    assert result.exit_code == 0
    lines = [f"[big:rank{rank}] I am {rank}" for rank in (0, 1)]
    assert sorted(result.stdout.splitlines()) == [*lines, "[small:rank2] I am 2"]
    for word in ("node", "sent MB", "received MB", "exit codes", "big", "small", "0 0"):
        assert word in result.stderr
    assert LabResult.load(path).exit_codes == (0, 0, 0)
    assert json.loads(path.read_text())["first_failed"] is None


@pytest.mark.lab
def test_a_failure_is_the_exit_code_and_the_last_words():
    script = "echo out; [ $RANK != 1 ] || { echo lost my way >&2; exit 9; }"
    result = CliRunner().invoke(app, ["run", "two-by-two", "--output", "rank0", "--", "sh", "-c", script])
    assert result.exit_code == 9
    assert result.stdout == "out\n"
    assert "[node0:rank1] lost my way" in result.stderr
    assert "rank 1 failed first, with exit code 9" in result.stderr


@pytest.mark.lab
def test_a_timeout_is_exit_code_124():
    result = CliRunner().invoke(app, ["run", "demo", "--timeout", "0.3", "--", "sleep", "60"])
    assert result.exit_code == 124
    assert "timeout" in result.stderr
