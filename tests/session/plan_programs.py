"""What tests of plans in sessions run on every rank."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evenly
from evenly.spec import Plan, Role


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)).double()


def fit(session: evenly.Session, plan: Plan, epochs: int = 2) -> dict[str, Any]:
    """Trains and returns the parameters, the samples of each batch and the rank."""
    torch.manual_seed(5)
    dataset = TensorDataset(torch.randn(50, 6, dtype=torch.float64), torch.randint(4, (50,)))
    model = network()
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
