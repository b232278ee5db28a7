"""What tests of sessions with cut networks run on every rank."""

import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evenly
from evenly.shards import Sharded, full_state_dict


def train(
    *,
    shares: list[float] | None,
    cut_batch: bool = False,
    folder: str | None = None,
    crash_at: int | None = None,
    keep: bool = False,
) -> dict[str, Any]:
    """Returns the full parameters at the end; `crash_at` ends the process after that step."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.0),
        nn.Conv2d(8, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 5),
    ).double()  # fmt: skip
    dataset = TensorDataset(torch.randn(40, 2, 4, 4, dtype=torch.float64), torch.randint(5, (40,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    steps, first = 0, 0
    with evenly.Session(folder, device="cpu", checkpoint_every=2 if folder else None) as session:
        example = dataset.tensors[0][:8]
        plan = session.plan(model, example, batch_size=8, shares=shares, cut_batch=cut_batch)
        trained, optimizer, loader = session.prepare(model, optimizer, dataset, plan=plan)
        first = trained.schedule.step
        for _ in session.epochs(2):
            for x, y in loader:
                nn.functional.cross_entropy(trained(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
                if steps == crash_at:
                    os._exit(7)
        network = trained.module
        full = full_state_dict(network)["model"] if isinstance(network, Sharded) else network.state_dict()
        result = [value.double().flatten().tolist() for value in full.values()]
        return {"parameters": result, "explained": plan.explain(), "first_step": first}
