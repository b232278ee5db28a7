"""A training in which one rank computes longer for a while, which the tests of stragglers run in processes."""

import io
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evenly
from evenly.session import straggler_watch

QUICK_S, SLOW_S = 0.02, 0.08  # of a forward


class Delayed(nn.Module):
    """A layer whose forward takes as long as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.seconds = QUICK_S

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.layer(x)


def train(folder: str, *, slow_rank: int, phases_s: list[float]) -> dict[str, Any]:
    """Trains for so many seconds as usual, with one slow rank, and as usual again."""
    straggler_watch.LOOK_S = 0.5
    torch.manual_seed(3)
    screen = io.StringIO()
    with evenly.Session(folder, checkpoint_every=None, timeout_s=60.0, device="cpu", nodes=None) as session:
        session._progress._stream = screen
        model = Delayed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = session.plan(batch_size=2, every=10)
        data = TensorDataset(torch.ones(6 * 2000, 4))
        network, _, loader = session.prepare(model, optimizer, data, plan=plan)
        slow: list[int] = []
        began = time.monotonic()
        for _ in session.epochs(1):
            for (x,) in loader:
                network(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                step = network.schedule.step
                if step % 5 == 0:  # ranks agree on the phase
                    elapsed_s = session.sum(time.monotonic() - began if session.rank == 0 else 0.0)[0]
                    is_slow = phases_s[0] < elapsed_s < phases_s[0] + phases_s[1]
                    slow += [step] if is_slow != bool(len(slow) % 2) else []
                    model.seconds = SLOW_S if is_slow and session.rank == slow_rank else QUICK_S
                    if elapsed_s > sum(phases_s):
                        break
            break
        hosts = [node.name for node in session.cluster.nodes for _ in node.ranks]
    return {"slow": slow, "told": screen.getvalue(), "hosts": hosts}


class DelayedBySamples(Delayed):
    """A layer whose forward takes as long as its samples say."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Takes 4 ms for a sample."""
        self.seconds = 0.004 * len(x)
        return super().forward(x)


def train_unequally(folder: str) -> None:
    """Trains for some seconds on two ranks of which the first takes three quarters of each batch."""
    straggler_watch.LOOK_S = 0.5
    with evenly.Session(folder, checkpoint_every=None, timeout_s=60.0, device="cpu", progress=False) as session:
        model = DelayedBySamples()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = session.plan(batch_size=8, every=10)
        samples = [12, 4]
        roles = [role.model_copy(update={"samples": samples[role.rank]}) for role in plan.roles]
        plan = plan.model_copy(update={"roles": tuple(roles)})
        network, _, loader = session.prepare(model, optimizer, TensorDataset(torch.ones(16 * 100, 4)), plan=plan)
        for _ in session.epochs(1):
            for (x,) in loader:
                network(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
