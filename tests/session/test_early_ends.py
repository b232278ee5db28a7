"""A loop that is left early ends its run like the last epoch; a signal saves, and the run resumes where it was."""

import os
import signal
import time

import pytest

import evenly
from evenly.checkpoints import folder as folders
from evenly.errors import SpecError
from evenly.reports import report
from evenly.session.stopping import stopping_on_signals
from evenly.spec import Run, RunStopped
from tests.processes import collect, run_processes, start_processes
from tests.ranks import ragged

LEAVE = "tests.session.stop_programs:leave"


def saved_steps(folder):
    return [int(path.name.removeprefix("step-")) for path in folders.checkpoints(folder / "checkpoints")]


@pytest.mark.parametrize("how", ["break", pytest.param("inner break", marks=pytest.mark.slow), "stop"])
def test_a_loop_left_early_ends_the_run_like_its_last_epoch(tmp_path, how):
    arguments = {"folder": str(tmp_path / "run"), "how": how, "at": 7, "epochs": 5}
    ranks = run_processes(ragged(2, 1), LEAVE, arguments)
    assert len({rank["model"] for rank in ranks}) == 1, "all nodes hold the same model inside the session"
    assert len({rank["step"] for rank in ranks}) == 1
    assert saved_steps(tmp_path / "run")[-1] == ranks[0]["step"]
    stopped = Run.read(tmp_path / "run").last(RunStopped)
    assert stopped is not None
    assert stopped.step == ranks[0]["step"]
    assert "stopped early" in report(tmp_path / "run")
    again = run_processes(ragged(2, 1), LEAVE, arguments)
    assert [rank["made"] for rank in again] == [0, 0, 0], "a second start trains nothing"
    assert "stopped early" in report(tmp_path / "run")
    assert {rank["model"] for rank in again} == {ranks[0]["model"]}
    more = run_processes(ragged(2, 1), LEAVE, {**arguments, "epochs": 6, "how": ""})
    assert more[0]["made"] > 0, "more epochs continue it"


@pytest.mark.slow
def test_all_ranks_stop_after_the_same_step_whoever_asks(tmp_path):
    arguments = {"folder": str(tmp_path / "run"), "how": "stop", "at": 6, "every": "epoch", "epochs": 40}
    ranks = run_processes(ragged(1, 1, 1), LEAVE, arguments)
    assert len({rank["step"] for rank in ranks}) == 1
    assert 6 < ranks[0]["step"] < 40 * 5
    assert len({rank["model"] for rank in ranks}) == 1


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), pytest.param("SIGUSR1", 0, marks=pytest.mark.slow)])
def test_a_signal_saves_and_the_run_resumes_bit_for_bit(tmp_path, name, code):
    arguments = {"how": name, "at": 6, "every": 4, "epochs": 12}
    whole = run_processes(ragged(2, 1), LEAVE, {**arguments, "folder": str(tmp_path / "whole"), "how": ""})
    folder = tmp_path / "run"
    ended = collect(start_processes(ragged(2, 1), LEAVE, {**arguments, "folder": str(folder)}))
    assert [rank.code for rank in ended] == [code] * 3, [rank.errors for rank in ended]
    assert not any("Traceback" in rank.errors for rank in ended)
    step = saved_steps(folder)[-1]
    assert 6 <= step < whole[0]["step"]
    assert "a second start resumes here" in report(folder)
    resumed = run_processes(ragged(2, 1), LEAVE, {**arguments, "folder": str(folder), "how": ""})
    assert [rank["model"] for rank in resumed] == [rank["model"] for rank in whole]
    assert [rank["losses"] for rank in resumed] == [rank["losses"][step:] for rank in whole], "no step is lost"


def test_a_finished_run_ends_with_a_checkpoint_and_a_second_start_does_nothing(tmp_path):
    arguments = {"folder": str(tmp_path / "run"), "how": "", "epochs": 2, "checkpoint_every": 4}
    ranks = run_processes(ragged(2, 1), LEAVE, arguments)
    assert ranks[0]["step"] % 4
    assert saved_steps(tmp_path / "run")[-1] == ranks[0]["step"]
    again = run_processes(ragged(2, 1), LEAVE, arguments)
    assert [(rank["made"], rank["model"]) for rank in again] == [(0, ranks[0]["model"])] * 3


def test_an_error_in_the_loop_is_no_early_end(tmp_path):
    arguments = {"folder": str(tmp_path / "run"), "how": "raise", "at": 3}
    ended = collect(start_processes(ragged(1, 1), LEAVE, arguments))
    assert all(rank.code for rank in ended)
    assert "a broken sample" in ended[0].errors
    assert Run.read(tmp_path / "run").last(RunStopped) is None


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the child does nothing
def test_a_forked_process_ends_by_a_signal_as_usual():
    requests = []
    with stopping_on_signals(requests.append):
        child = os.fork()
        if not child:
            time.sleep(30)
            os._exit(0)
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        os.kill(os.getpid(), signal.SIGUSR1)
    assert requests == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_epochs_before_prepare_are_refused():
    with evenly.Session() as session, pytest.raises(SpecError, match="before prepare"):
        next(session.epochs(2))
