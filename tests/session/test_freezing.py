"""Runs that freeze and unfreeze layers resume bit for bit, or say which change was not repeated."""

import pytest

from tests.processes import collect, run_processes, start_processes
from tests.ranks import ragged

TRAIN = "tests.session.freezing_programs:train"
NODES = ragged(2, 1)


@pytest.mark.parametrize(
    "exchange",
    [
        {"overlap": 2, "outer": "nesterov"},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"overlap": 3, "fragments": 2, "codec": "int8"}, marks=pytest.mark.slow),
    ],
)
def test_resumed_after_layers_were_unfrozen_and_frozen_bit_for_bit(tmp_path, exchange):
    whole = run_processes(NODES, TRAIN, {"folder": str(tmp_path / "whole"), "exchange": exchange})
    folder, steps = str(tmp_path / "cut"), whole[0]["made"] // 4
    crash = {"folder": folder, "exchange": exchange, "crash_step": 2 * steps + 3}  # after both changes
    assert all(rank.code != 0 for rank in collect(start_processes(NODES, TRAIN, crash)))
    resumed = run_processes(NODES, TRAIN, {"folder": folder, "exchange": exchange})
    assert [rank["model"] for rank in resumed] == [rank["model"] for rank in whole]
    assert resumed[0]["made"] < whole[0]["made"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"repeats": False}, "was trained, but it is frozen here"),
        ({"adds_group": True}, "Groups that the run added later are added before it resumes"),
    ],
)
def test_a_run_that_does_not_repeat_its_changes_is_refused(tmp_path, settings, words):
    program = {"folder": str(tmp_path / "cut"), "exchange": {}, **settings}
    collect(start_processes(ragged(1, 1), TRAIN, {**program, "crash_step": 15}))
    ended = collect(start_processes(ragged(1, 1), TRAIN, program))
    assert all(rank.code != 0 for rank in ended)
    assert words in ended[0].errors
