"""A program that catches the error of a lost rank, does not close its model, and ends with an exit code of its own."""

import os
import signal
import sys

import torch
import torch.distributed as dist

import evenly
from evenly.errors import EvenlyError

OWN_CODE = 3


def main() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    synchronized = evenly.synchronize(model, optimizer, every=2, nodes=[[0, 1], [2]], timeout_s=60.0)
    how, lost_rank = sys.argv[1:]
    try:
        for step in range(200):
            if step == 5 and os.environ["RANK"] == lost_rank:
                _leave(how)
            synchronized(torch.ones(4, 32)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except EvenlyError as error:
        print(f"caught {type(error).__name__}", flush=True)
        return OWN_CODE
    return 0


def _leave(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        sys.exit(4)
    raise ValueError("an error of the program")


if __name__ == "__main__":
    sys.exit(main())
