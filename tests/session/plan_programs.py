"""What tests of plans in sessions run on every rank."""

import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evenly
from evenly.spec import Plan, Role


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)).double()


class Slow(nn.Module):
    """Takes its time for every sample, from some step on."""

    def __init__(self, body: nn.Module, sample_s: float, after: int) -> None:
        super().__init__()
        self.body, self.sample_s, self.after, self.steps = body, sample_s, after, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        time.sleep(len(x) * self.sample_s * (1 if self.steps <= self.after else 4))
        return self.body(x)


def fit(
    session: evenly.Session, plan: Plan, epochs: int = 2, size: int = 50, slow_s: float = 0.0, after: int = 10**9
) -> dict[str, Any]:
    """Trains and returns the parameters, the samples of each batch and the rank."""
    torch.manual_seed(5)
    dataset = TensorDataset(torch.randn(size, 6, dtype=torch.float64), torch.randint(4, (size,)))
    model = Slow(network(), slow_s, after)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trained, optimizer, loader = session.prepare(model, optimizer, dataset, plan=plan)
    sizes = []
    for _ in session.epochs(epochs):
        for x, y in loader:
            sizes.append(loader.samples)
            nn.functional.cross_entropy(trained(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    told = [value.flatten().tolist() for value in trained.module.parameters()]
    return {"parameters": told, "sizes": sizes, "rank": session.rank, "world": session.world_size}


def uneven(*, samples: list[int], folder: str | None = None) -> dict[str, Any]:
    """Trains with these samples on each rank; 0 leaves a rank out."""
    with evenly.Session(folder, device="cpu") as session:
        roles = [
            Role(rank=rank, node=session.cluster.node_of(rank), samples=count, left_out="" if count else "too slow")
            for rank, count in enumerate(samples)
        ]
        return fit(session, Plan(roles=tuple(roles)))
    return {"left_out": True}


def slowed(*, samples: list[int], slow_s: list[float], after: int, rebalance: bool) -> dict[str, Any]:
    """Trains on ranks that take their time for each sample; the last one four times as much after some steps."""
    with evenly.Session(device="cpu") as session:
        own = slow_s[session.rank]
        roles = [Role(rank=rank, node=0, samples=count) for rank, count in enumerate(samples)]
        last = session.rank == len(samples) - 1
        return fit(
            session,
            Plan(roles=tuple(roles), rebalance=rebalance),
            size=1200,
            slow_s=own,
            after=after if last else 10**9,
        )
    return {}


def measured(*, batch: int) -> dict[str, Any]:
    """Measures, plans and trains."""
    with evenly.Session(device="cpu") as session:
        plan = session.plan(network(), torch.randn(batch, 6, dtype=torch.float64), global_batch=batch)
        result = fit(session, plan, epochs=1)
        result["planned"] = [role.samples for role in plan.roles]
        result["explained"] = plan.explain()
        result["step_s"] = plan.predicted.step_s if plan.predicted else 0.0
        return result
    return {"left_out": True}
