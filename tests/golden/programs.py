"""Short runs of every kind, through the public face only: the losses of each rank, bit for bit."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import evenly

NODES = [[0, 1], [2]]
STEPS = 9

SYNCHRONIZED: dict[str, dict[str, Any]] = {
    "every 3 steps": {"every": 3},
    "global": {"every": "global"},
    "overlap": {"every": 3, "overlap": 2},
    "bf16": {"every": 2, "codec": "bf16"},
    "int8 and overlap": {"every": 3, "codec": "int8", "overlap": 1},
    "int4 in fragments": {"every": 4, "codec": "int4", "fragments": 2, "overlap": 1},
    "outer Nesterov": {"every": 3, "outer": "nesterov"},
    "averaged momenta": {"every": 3, "optimizer_state": "average"},
}


def network() -> nn.Module:
    """Returns a small network with normalization, in double precision."""
    torch.manual_seed(11)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 5),
    ).double()  # fmt: skip


def batch(seed: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns samples and classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 2, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(5, (size,), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch_of: Callable[[int], Any]) -> list[str]:
    """Returns the loss of each step as a hexadecimal number."""
    losses = []
    for step in range(STEPS):
        x, y = batch_of(step)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()).hex())
    return losses


def synchronized_run(**settings: Any) -> list[str]:
    """Trains on three ranks in two nodes, with batches of unequal size."""
    rank = dist.get_rank()
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    synchronized = evenly.synchronize(model, optimizer, nodes=NODES, timeout_s=60.0, **settings)
    losses = train(synchronized, optimizer, lambda step: batch(100 * rank + step, rank + 2))
    synchronized.finish()
    losses.append(float(sum(p.detach().square().sum() for p in model.parameters())).hex())
    synchronized.close()
    return losses


def cut_run() -> list[str]:
    """Trains a network that is cut over three ranks in unequal shares."""
    model = evenly.shard(network(), batch(0, 4)[0], shares=[5, 2, 1])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = train(model, optimizer, lambda step: batch(step, 4))
    model.close()
    return losses


def session_run(folder: str, *, epochs: int, cut: bool) -> list[str]:
    """Trains with a session by a plan from given speeds; goes on where an earlier call ended."""
    data = TensorDataset(*batch(5, 36))
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    with evenly.Session(folder, device="cpu", checkpoint_every=2, timeout_s=60.0) as session:
        if cut:
            plan = session.plan(model, data.tensors[0][:4], shares=[3, 1], batch_size=4, every=2)
        else:
            graph = evenly.trace(model, data.tensors[0][:4])
            profile = evenly.Profile.from_speeds(session.cluster, graph, speeds=[4, 2, 3], flops_per_s=1e6)
            plan = evenly.plan(session.cluster, profile, graph, batch_size=9, every=2, cut=False)
        trained, optimizer, loader = session.prepare(model, optimizer, data, plan=plan)
        for _ in session.epochs(epochs):
            for x, y in loader:
                loss = nn.functional.cross_entropy(trained(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()).hex())
    return losses


def run_by_hand() -> dict[str, list[str]]:
    """Returns the losses of this rank in all runs of `synchronize` and `shard`."""
    dist.init_process_group("gloo")
    losses = {name: synchronized_run(**settings) for name, settings in SYNCHRONIZED.items()}
    losses["cut over three ranks"] = cut_run()
    dist.destroy_process_group()
    return losses
