"""A program that ends without `finish()` is told that its nodes hold different parameters."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch import nn
import evenly

dist.init_process_group("gloo")

def train(every, finishes):
    network = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    model = evenly.synchronize(network, optimizer, every=every)
    for _ in range(6):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if finishes:
        model.finish()

train(int(sys.argv[1]), sys.argv[2] == "finish")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("every", "end", "is_told"), [(4, "forget", True), (4, "finish", False), (3, "forget", False)])
def test_a_program_that_ends_between_exchanges_is_told(tmp_path: Path, every: int, end: str, is_told: bool) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "evenly", "launch", "--nodes", "1,1", str(program), str(every), end]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    told = done.stdout + done.stderr
    assert told.count("2 steps came after the last exchange") == (2 if is_told else 0), told
