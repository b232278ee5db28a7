"""What tests of sessions with cut networks run on every rank."""

import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evenly
from evenly.shards import Adafactor, Sharded, full_state_dict
from evenly.shards.optim.optimizers import state_placement
from tests.session.programs import wait_for_checkpoint


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
                    wait_for_checkpoint(folder or "", steps - steps % 2)
                    os._exit(7)
        network = trained.module
        full = full_state_dict(network)["model"] if isinstance(network, Sharded) else network.state_dict()
        result = [value.double().flatten().tolist() for value in full.values()]
        return {"parameters": result, "explained": plan.explain(), "first_step": first}


def train_factored(*, by_hand: bool) -> dict[str, Any]:
    """Returns the full parameters and this rank's state of the optimizer where all ranks of a network hold the same.

    Exchanges average the state of Adafactor. Rank 1 of a network holds one column of the second layer, whose `row_var`
    has the shape of that column and is nevertheless no part of it.
    """
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 5)).double()
    with evenly.Session(device="cpu", checkpoint_every=None) as session:
        example = torch.zeros(8, 6).double()
        plan = session.plan(model, example, batch_size=8, shares=[3, 1], every=1, optimizer_state="average")
        if by_hand:
            network = evenly.shard(model, plan)
            optimizer = Adafactor(network.parameters(), lr=0.05)
            trained = evenly.synchronize(network, optimizer, every=1, optimizer_state="average")
        else:
            trained, optimizer, _ = session.prepare(model, Adafactor(model.parameters(), lr=0.05), plan=plan)
        data = torch.Generator().manual_seed(session.rank // 2)  # each network trains with its own batches
        for _ in range(3):
            x = torch.randn(8, 6, generator=data, dtype=torch.float64)
            y = torch.randint(5, (8,), generator=data)
            nn.functional.cross_entropy(trained(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.finish()
        full = full_state_dict(trained.module)["model"]
        result = {
            "parameters": [value.flatten().tolist() for value in full.values()],
            "replicated": replicated_state(trained.module, optimizer),
        }
        if by_hand:
            trained.close()
            network.close()
        return result


def replicated_state(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[float]]:
    """Returns the entries of the optimizer's state that all ranks of a network cut over them must hold alike."""
    found = {}
    for name, parameter in network.named_parameters():
        for key, value in optimizer.state[parameter].items():
            placement = state_placement(optimizer, parameter, key, value)
            if placement is not None and not placement.is_cut:
                found[f"{name} {key}"] = value.flatten().tolist()
    return found
