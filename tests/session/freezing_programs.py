"""A program that trains the head of a network first, and all of it later, in processes of its own."""

import os
from typing import Any

import torch
from torch import nn

import evenly
from tests.session.programs import dataset, digest, wait_for_checkpoint


def network() -> nn.Module:
    return nn.Sequential(nn.Conv1d(6, 9, 3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 5), nn.Tanh(), nn.Linear(5, 3))


def train(
    folder: str, *, crash_step: int = 0, repeats: bool = True, adds_group: bool = False, exchange: dict[str, Any] | None
) -> dict[str, Any]:
    """Unfreezes the convolution after epoch 1 and freezes the next layer after epoch 2; may stop in the middle."""
    torch.manual_seed(17)
    with evenly.Session(folder, checkpoint_every=2, timeout_s=60.0, device="cpu") as session:
        model = network()
        model[0].requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained if adds_group else list(model.parameters()), lr=0.01)
        plan = session.plan(batch_size=4, every=4, **(exchange or {}))
        synchronized, _, loader = session.prepare(model, optimizer, dataset(), plan=plan)
        made = 0
        for epoch in session.epochs(4):
            if epoch >= 1 if repeats else epoch == 1:
                model[0].requires_grad_(True)
                if adds_group and len(optimizer.param_groups) == 1:
                    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.001})
            if epoch >= 2 if repeats else epoch == 2:
                model[3].requires_grad_(False)
            for x, y in loader:
                nn.functional.cross_entropy(synchronized(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                made += 1
                if made == crash_step and session.rank == 1:
                    wait_for_checkpoint(folder, made - made % 2)
                    os._exit(9)
        return {"made": made, "model": digest(*model.parameters())}
