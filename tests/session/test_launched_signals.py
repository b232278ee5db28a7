"""A signal to a launcher, or to all of its processes, saves a checkpoint and ends the run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

SCRIPT = """
import sys, time
import torch
from torch.utils.data import TensorDataset
import evenly

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with evenly.Session(sys.argv[1], timeout_s=30) as session:
    plan = session.plan(batch_size=4, every=100)
    model, optimizer, loader = session.prepare(model, optimizer, TensorDataset(torch.ones(2400, 4)), plan=plan)
    for _ in session.epochs(1):
        for (x,) in loader:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.1)
            print("step of rank", session.rank, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("whole_tree", [True, False])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 0)])
def test_a_signal_saves_and_ends_all(tmp_path: Path, number: signal.Signals, code: int, whole_tree: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "evenly", "launch", "--nodes", "2,1", str(script), str(tmp_path / "run")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as launcher:
        assert launcher.stdout is not None
        lines: set[str] = set()
        while len(lines) < 3:  # all ranks are in the loop
            lines.add(launcher.stdout.readline())
        started = psutil.Process(launcher.pid).children(recursive=True)
        for pid in [launcher.pid, *(process.pid for process in started if whole_tree)]:
            os.kill(pid, number)
        _, errors = launcher.communicate(timeout=100)
    assert launcher.returncode == code, errors
    assert not any(process.is_running() for process in started)
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1, errors
    assert not (tmp_path / "run" / ".owner").exists()
    assert "Traceback" not in errors
