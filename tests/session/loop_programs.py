"""Training loops with the words of a session, which the tests run in processes of their own."""

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenly
from evenly.spec import EveryGradient, Role


class Dicts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples that are dicts."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(size, 5, generator=generator, dtype=torch.float64)
        self.y = self.x.sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


class Net(nn.Module):
    """Takes a batch that is a dict, and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(batch["x"]), batch["y"])


def plan_of(samples: list[int], nodes: list[int]) -> evenly.Plan:
    roles = tuple(
        Role(rank=rank, node=node, samples=count) for rank, (node, count) in enumerate(zip(nodes, samples, strict=True))
    )
    return evenly.Plan(roles=roles, period=EveryGradient(), rebalance=False)


def accumulate(samples: list[int], nodes: list[int], *, count: int, size: int = 23, epochs: int = 2) -> dict[str, Any]:
    """Trains with a DataLoader, dict batches, a scheduler that needs the steps, and several batches to a step."""
    torch.manual_seed(1)
    data = Dicts(size)
    with evenly.Session(device="cpu", seed=4) as session:
        model, plan = Net(), plan_of(samples, nodes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = DataLoader(data, batch_size=99, shuffle=True)
        steps = session.steps_per_epoch(loader, plan, accumulate=count)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps * epochs)
        trained, optimizer, batches = session.prepare(model, optimizer, loader, plan=plan)
        made = 0
        for _ in session.epochs(epochs):
            for batch in batches:
                with session.accumulate(count) as part:
                    part.backward(trained(batch))
                if part.is_last:
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
                    made += 1
        return {
            "made": made,
            "steps": steps * epochs,
            "counted": trained.schedule.step,
            "parameters": [p.tolist() for p in model.parameters()],
        }


def words(*, shares: list[float] | None = None) -> dict[str, Any]:
    """Returns what the words of a session give on this rank."""
    validation = TensorDataset(torch.arange(7.0).reshape(7, 1))
    with evenly.Session(device="cpu", timeout_s=60.0) as session:
        session.seed_everything(5)
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        early = session.feed(validation, train=False, batch_size=2)
        before = [batch.flatten().tolist() for (batch,) in early]
        model = nn.Linear(1, 1)
        example = torch.zeros(4, 1)
        plan = session.plan(model, example, batch_size=4, shares=shares, every="2s")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trained, _, _ = session.prepare(model, optimizer, validation, plan=plan, verify=False)
        total = count = 0.0
        for (x,) in early:
            with torch.no_grad():
                trained(x)
            total, count = total + float(x.sum()) * bool(early.samples), count + early.samples
        rank = session.rank
        gathered = session.gather({"t": torch.full((rank, 2), rank, dtype=torch.int8), "word": ("a", rank)})
        session.print("only", "once", sep="-")
        session.log(loss=torch.tensor(0.5))
        return {
            "before": before,
            "after": [batch.flatten().tolist() for (batch,) in early],
            "mean": session.mean(total / count if count else float("nan"), count=count),
            "equal": session.mean(torch.tensor([float(rank), 1.0])).tolist(),
            "gathered": [[row["t"].tolist(), str(row["t"].dtype), row["word"]] for row in gathered],
            "is_main": session.is_main,
            "drawn": drawn,
        }
