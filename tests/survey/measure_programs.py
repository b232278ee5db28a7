"""What tests of measuring run on every rank."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import evenly
from evenly.planner import simulate


def measured(*, device: str, batch: int) -> dict[str, Any]:
    """Measures, plans, and returns the profile and what is predicted."""
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten(), nn.Linear(32 * 144, 10))
    example = torch.randn(batch, 3, 16, 16, device=device)
    told: list[str] = []
    profile = evenly.measure(model.to(device), example, quick=True, tell=told.append)
    cluster, graph = evenly.discover(device=device), evenly.trace(model, example)
    made = evenly.plan(cluster, profile, graph, batch_size=batch)
    forecast = simulate(made, cluster, profile, graph, steps=10)
    dist.destroy_process_group()
    return {"profile": profile.to_json(), "told": told, "samples": made.batch_shares, "step_s": forecast.step_s}
