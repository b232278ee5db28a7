"""What tests of measuring run on every rank."""

import importlib
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

import evenly
from evenly.planner import simulate


class Network(nn.Module):
    """Takes logarithms of what it is given, and has a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten())
        self.head, self.unused = nn.Linear(32 * 144, 10), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body((x.abs() + 1e-3).log()))


class Normed(Network):
    """Does not take a single sample."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x))


class Single(Network):
    """Gives NaN for a single sample."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return self.last(y / (y.std(0, keepdim=True) + 1e-3))


def measured(
    *,
    device: str,
    batch: int,
    memory: list[int] | None = None,
    network: str = "Network",
    sample_s: list[float] | None = None,
    haste: int = 4,
) -> dict[str, Any]:
    """Measures, plans, and returns the profile and what is predicted; less than the usual time is enough here."""
    importlib.import_module("evenly.survey.measure").QUICK_S /= 2
    importlib.import_module("evenly.calibration.joint_steps").QUICK_S /= haste
    dist.init_process_group("gloo")
    model = globals()[network]()
    if sample_s is not None:
        own_s = sample_s[dist.get_rank()]
        register_module_forward_pre_hook(  # on all modules, as tracing refuses those that have one
            lambda module, args: time.sleep(own_s * len(args[0])) if module.__class__ is nn.Flatten else None
        )
    example = torch.randn(batch, 3, 16, 16, device=device)
    told: list[str] = []
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    profile = evenly.measure(
        model.to(device), example, quick=True, memory_bytes=memory and memory[dist.get_rank()], tell=told.append
    )
    assert torch.equal(torch.rand(3), expected), "measuring changed the random numbers of the program"
    cluster, graph = evenly.discover(device=device), evenly.trace(model, example)
    made = evenly.plan(cluster, profile, graph, batch_size=batch)
    forecast = simulate(made, cluster, profile, graph, steps=10)
    dist.destroy_process_group()
    return {"profile": profile.to_json(), "told": told, "samples": made.batch_shares, "step_s": forecast.step_s}
