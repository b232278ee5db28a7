"""A training program that logs, saves weights and keeps the best checkpoints."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import evenly
from evenly.shards import Sharded, full_state_dict
from tests.session.programs import dataset, network


def train(
    folder: str,
    *,
    values: list[float | None],
    keep_best: Any = "accuracy",
    shares: list[float] | None = None,
    only_rank_0: bool = False,
    checkpoint_every: int | str | None = "epoch",
    epochs: int | None = None,
    bad_place: str | None = None,
) -> dict[str, Any]:
    """Logs one of `values` at the end of each epoch; returns the weights that `agreed()` showed there, as lists."""
    torch.manual_seed(17)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    shown: dict[int, Any] = {}
    keep_best = tuple(keep_best) if isinstance(keep_best, list) else keep_best
    with evenly.Session(
        folder, device="cpu", keep=1, keep_best=keep_best, checkpoint_every=checkpoint_every, timeout_s=60.0
    ) as session:
        plan = session.plan(model, dataset().tensors[0][:4], batch_size=4, every=4, shares=shares)
        synchronized, _, loader = session.prepare(model, optimizer, dataset(), plan=plan)
        for epoch in session.epochs(epochs or len(values)):
            for x, y in loader:
                nn.functional.cross_entropy(synchronized(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            if not only_rank_0 or session.rank == 0:
                session.log(accuracy=values[epoch] if session.rank == 0 else 1.0 - epoch)  # rank 0's counts
            with synchronized.agreed():
                module = synchronized.module
                state = full_state_dict(module)["model"] if isinstance(module, Sharded) else module.state_dict()
                shown[synchronized.schedule.step] = {name: tensor.tolist() for name, tensor in state.items()}
        saved = session.save(f"{folder}/last.safetensors")
        problem = None
        if bad_place is not None:
            try:
                session.save(bad_place)
            except evenly.EvenlyError as error:
                problem = f"{type(error).__name__}: {error}"
        return {"shown": shown, "saved": str(saved), "is_there": Path(saved).is_file(), "problem": problem}
