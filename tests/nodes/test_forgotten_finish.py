"""A program that ends without `finish()` is told that its nodes hold different parameters."""

import os
import subprocess
import sys
from pathlib import Path

from evenly.launch.ports import free_port

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
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env={**os.environ, **world, "RANK": str(rank), "GROUP_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for said in [rank.communicate(timeout=100)[0] for rank in ranks]:
        assert said.count("2 steps came after the last exchange") == 1, said  # every=4
        assert said.count("came after the last exchange") == 1, said  # none of the one that finishes or is in time
    assert [rank.returncode for rank in ranks] == [0, 0]
