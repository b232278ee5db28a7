"""What the GPU tests run on every rank, in processes of their own that share one CUDA device."""

from typing import Any

import torch
from torch import nn

import evenly
from tests.nodes.test_exactness import OPTIMIZERS, batches, network


def train(
    nodes: list[list[int]],
    *,
    optimizer: str,
    every: int | str,
    steps: int = 6,
    precision: str = "double",
    exchange: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the parameters and buffers after every step, as nested lists."""
    torch.backends.cudnn.deterministic = True
    with evenly.Session(device="cuda") as session:
        model = network(seed=session.rank).cuda()
        if precision != "double":
            model.float()
        made = OPTIMIZERS[optimizer](model)
        synchronized = evenly.synchronize(model, made, every=every, nodes=nodes, **(exchange or {}))
        scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16", init_scale=2.0**8)
        trace = [_numbers(model)]
        for row in batches(session.world_size, steps):
            x, y = (tensor.cuda() for tensor in row[session.rank])
            made.zero_grad()
            kind = torch.float16 if precision == "fp16" else torch.bfloat16
            with torch.autocast("cuda", kind, enabled=precision in ("fp16", "bf16")):
                loss = nn.functional.cross_entropy(synchronized(x.to(next(model.parameters()).dtype)), y)
            scaler.scale(loss).backward()
            scaler.step(made)
            scaler.update()
            trace.append(_numbers(model))
        synchronized.finish()
        trace.append(_numbers(model))
        synchronized.close()
        return {
            "device": str(next(model.parameters()).device),
            "trace": trace,
            "kind": session.cluster.device_of(0).kind,
        }


def poison() -> str:
    """Trains with a NaN on rank 1 in step 3 and returns the error that ended this rank."""
    with evenly.Session(device="cuda") as session:
        model = nn.Linear(4, 1).cuda()
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        synchronized = evenly.synchronize(model, made, every=2, nodes=[[0, 1], [2]])
        try:
            for step in range(1, 40):
                loss = synchronized(torch.ones(3, 4, device="cuda")).mean()
                (loss * (float("nan") if session.rank == 1 and step == 3 else 1.0)).backward()
                made.step()
                made.zero_grad()
        except evenly.errors.NonFiniteError as error:
            return str(error)
        finally:
            synchronized.close()
    return "nothing was noticed"


def starved(*, overlap: int) -> dict[str, Any]:
    """Leaves rank 1 no memory for an exchange; returns the error, and how far parameters are from local training."""
    with evenly.Session(device="cuda") as session:
        model = nn.Linear(3000, 3000, bias=False).cuda()
        nn.init.zeros_(model.weight)
        made = torch.optim.SGD(model.parameters(), lr=1.0)
        synchronized = evenly.synchronize(model, made, every=2, overlap=overlap, nodes=[[0], [1]])
        x = torch.full((1, 3000), float(1 + session.rank), device="cuda")
        error: BaseException | None = None
        steps = 0
        try:
            for _ in range(6):
                synchronized(x).sum().backward()
                if session.rank == 1 and steps == 1:
                    torch.cuda.synchronize()
                    torch.cuda.empty_cache()
                    total = torch.cuda.get_device_properties(0).total_memory
                    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**22) / total)
                steps += 1
                made.step()
                made.zero_grad(set_to_none=False)
        except evenly.EvenlyError as problem:
            error = problem
        torch.cuda.set_per_process_memory_fraction(1.0)
        away = float((model.weight + steps * x[0, 0]).abs().max())
        synchronized.close(may_differ=True)
        return {"error": f"{type(error).__name__}: {error}", "away": away}


def _numbers(model: nn.Module) -> list[Any]:
    return [tensor.detach().double().cpu().tolist() for tensor in (*model.parameters(), *model.buffers())]
