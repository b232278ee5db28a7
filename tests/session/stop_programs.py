"""Training programs that end early, which the tests of stops run in processes of their own."""

import os
import signal
from typing import Any

import torch
from torch import nn

import evenly
from tests.session.programs import dataset, digest, network


def leave(
    folder: str,
    *,
    how: str,
    at: int = 5,
    epochs: int = 4,
    every: int | str = 4,
    checkpoint_every: int | str | None = "epoch",
    rank: int = 1,
) -> dict[str, Any]:
    """Trains, leaves the loop over epochs in the way `how`, and returns what the rank holds inside the session."""
    torch.manual_seed(17)
    made, losses = 0, []
    with evenly.Session(folder, checkpoint_every=checkpoint_every, timeout_s=30.0, device="cpu") as session:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        plan = session.plan(batch_size=4, every=every)
        synchronized, _, loader = session.prepare(model, optimizer, dataset(), plan=plan)
        for epoch in session.epochs(epochs):
            for x, y in loader:
                loss = nn.functional.cross_entropy(synchronized(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                made += 1
                losses.append(float(loss))
                step = synchronized.schedule.step
                if step == at and how == "inner break":
                    break
                if step == at and session.rank == rank and how == "stop":
                    session.stop("the loss is low enough")
                if step == at and session.rank == rank and how in ("SIGTERM", "SIGUSR1"):
                    os.kill(os.getpid(), getattr(signal, how))
                if step == at and session.rank == rank and how == "raise":
                    raise KeyError("a broken sample")
            if epoch == 1 and how in ("break", "inner break"):
                break
        if how == "SIGKILL":  # the last checkpoint is complete, the record has no end
            os.kill(os.getpid(), signal.SIGKILL)
        return {
            "made": made,
            "epoch": epoch if made else None,
            "step": synchronized.schedule.step,
            "model": digest(*model.parameters(), *model.buffers()),
            "losses": losses,
        }
