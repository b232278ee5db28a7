"""Checkpoints of a state that follows from its step, saved by ranks that are threads of one process."""

import os
from contextlib import contextmanager
from pathlib import Path

import torch

from evenly.checkpoints import Checkpoints, KeptCheckpoints
from tests.checkpoints.trained_runs import gatherer_of
from tests.ranks import run_ranks

NODES = [[0], [1]]


class Grown:
    """A tracked object whose state follows from a step and a rank."""

    def __init__(self, rank: int, size: int = 20_000):
        self.rank, self.size = rank, size
        self.step = 0

    def state_dict(self):
        g = torch.Generator().manual_seed(1000 * self.step + self.rank)
        return {"step": self.step, "rank": self.rank, "weights": torch.randn(self.size, generator=g)}

    def load_state_dict(self, state):
        self.step = state["step"]
        own = self.state_dict()
        assert state["rank"] == self.rank
        assert torch.equal(state["weights"], own["weights"]), f"the state of step {self.step} is not whole"


@contextmanager
def opened(rank_group, root: Path, nodes=NODES):
    """Yields the checkpoints of a run in `root`, as a session has them."""
    with gatherer_of(rank_group) as gatherer:
        checkpoints = Checkpoints(root, gatherer, rank=rank_group.rank, nodes=nodes)
        try:
            yield checkpoints
        finally:
            checkpoints.close()


def resume(checkpoints: Checkpoints, grown: Grown) -> int:
    """Loads the newest checkpoint that is whole, checks it, and returns its step; 0 if there is none."""
    restored = checkpoints.load_newest()
    if restored is not None:
        grown.load_state_dict(restored["rank"]["tracked"]["grown"])
        assert grown.step == restored["manifest"]["step"]
    return grown.step


def save(checkpoints: Checkpoints, grown: Grown, step: int, *, keep: int = 2) -> Path:
    grown.step = step
    return checkpoints.save(step, [], {"grown": grown}, epoch=step, keep=KeptCheckpoints(keep))


def save_steps(root: Path, steps, *, size: int = 20_000, keep: int = 2, nodes=NODES) -> None:
    """Saves the checkpoints of some steps, on all ranks."""

    def act(rank_group):
        with opened(rank_group, root, nodes) as checkpoints:
            grown = Grown(rank_group.rank, size)
            for step in steps:
                save(checkpoints, grown, step, keep=keep)

    run_ranks(sum(map(len, nodes)), act)


def save_until_killed(root: str, connection) -> None:
    """Resumes, says from which step, and saves one step after another, saying each that is complete."""
    torch.set_num_threads(1)

    def act(rank_group):
        with opened(rank_group, Path(root)) as checkpoints:
            grown = Grown(rank_group.rank)
            step = resume(checkpoints, grown)
            while True:
                if rank_group.rank == 0:
                    connection.send(step)
                step += 1
                save(checkpoints, grown, step)

    try:
        run_ranks(2, act)
    except BaseException as error:
        connection.send(f"{type(error).__name__}: {error}")
    os._exit(1)
