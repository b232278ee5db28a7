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


def small_network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))


def small_data(size: int = 10) -> TensorDataset:
    x = torch.randn(size, 5, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, x.sum(1, keepdim=True))


def accumulate_plainly() -> list[float]:
    """Returns the parameters after the steps of `accumulate_cut`, on one device."""
    model = small_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = small_data().tensors
    for start, stop in ((0, 8), (8, 10)):
        nn.functional.mse_loss(model(x[start:stop]), y[start:stop]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value for p in model.parameters() for value in p.flatten().tolist()]


def accumulate_cut() -> list[float]:
    """Makes a step of two batches of four, then one of two samples; one epoch before is broken off inside a step."""
    data = small_data()
    with evenly.Session(device="cpu") as session:
        model = small_network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = session.plan(model, data.tensors[0][:4], batch_size=4, shares=[2, 1])
        trained, optimizer, loader = session.prepare(model, optimizer, data, plan=plan, shuffle=False)
        for epoch in session.epochs(2):
            for x, y in loader:
                with session.accumulate(2) as batch:
                    batch.backward(nn.functional.mse_loss(trained(x), y))
                if epoch == 0:
                    optimizer.zero_grad()
                    break
                if batch.is_last:
                    optimizer.step()
                    optimizer.zero_grad()
        full = evenly.shards.full_state_dict(trained.module)["model"]
        return [value for name, _ in model.named_parameters() for value in full[name].flatten().tolist()]


def exchange_every_second_epoch(folder: str, *, epochs: int) -> list[int]:
    """Returns the exchanges made before each epoch but the first, and at the end."""
    with evenly.Session(folder, device="cpu") as session:
        model = small_network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        plan = session.plan(batch_size=2, every="2 epochs")
        trained, optimizer, loader = session.prepare(model, optimizer, small_data(), plan=plan)
        exchanges = []
        for epoch in session.epochs(epochs):
            exchanges.append(trained.schedule.exchanges)
            for x, y in loader:
                nn.functional.mse_loss(trained(x), y).backward()
                if epoch:
                    optimizer.step()
                    optimizer.zero_grad()
            if not epoch:
                optimizer.step()
                optimizer.zero_grad()
        return [*exchanges[1:], trained.schedule.exchanges]
