"""A program that ends without `finish()` is told that its nodes hold different parameters."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import torch
import torch.distributed as dist
from torch import nn
import evenly

dist.init_process_group("gloo")

def train(every, *, finishes=False):
    network = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    model = evenly.synchronize(network, optimizer, every=every)
    for _ in range(6):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if finishes:
        model.finish()

train(4)
train(5, finishes=True)
train(3)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_program_that_ends_between_exchanges_is_told(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "evenly", "launch", "--nodes", "1,1", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    told = done.stdout + done.stderr
    assert told.count("2 steps came after the last exchange") == 2, told  # every=4, on both ranks
    assert told.count("came after the last exchange") == 2, told  # none of the one that finishes or of the one in time
