"""What one rank does in loops with Accelerate; processes call these functions."""

import contextlib
import io
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.integrations.batches import (
    SIZES,
    Batch,
    batch,
    batches_of,
    gan_networks,
    judge_loss,
    maker_loss,
    network,
    values,
)

warnings.simplefilter("ignore")


def rank() -> int:
    return int(os.environ["RANK"])


def accelerator(**settings: Any) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True, **settings)


def prepared(every: Any, *, module: nn.Module | None = None, settings: Any = None, **exchange: Any) -> tuple[Any, ...]:
    """Returns the accelerator, the synchronized model, the optimizer and the schedule."""
    from evenly.integrations.accelerate import prepare

    own, module = accelerator(**(settings or {})), module or network()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9)
    return own, *prepare(own, module, optimizer, schedule, every=every, **exchange)


def train(run: tuple[Any, ...], batches: list[Batch], *, clip: float | None = None) -> list[list[float]]:
    own, model, optimizer, schedule = run
    after = []
    for x, y in batches:
        with own.accumulate(model):
            own.backward(nn.functional.mse_loss(model(x), y))
            if own.sync_gradients and clip is not None:
                own.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if own.sync_gradients:
            after.append(values(model.module))
    return after


def finished(run: tuple[Any, ...]) -> list[float]:
    run[1].finish()
    run[0].unwrap_model.__self__.close()  # what end_training does, which also ends the process group
    return values(run[1].module)


def steps_of(every: Any, steps: int) -> dict[str, Any]:
    run = prepared(every)
    return {"steps": train(run, batches_of(rank(), steps)), "end": finished(run), "rate": run[3].get_last_lr()[0]}


def accumulated() -> list[list[float]]:
    run = prepared(2, settings={"gradient_accumulation_steps": 2})
    after = train(run, batches_of(rank(), 12), clip=0.5)
    finished(run)
    return after


def regression() -> dict[str, Any]:
    """Trains Accelerate's own small model, with a loader that Accelerate divides."""
    from accelerate.test_utils.training import RegressionDataset, RegressionModel

    from evenly.integrations.accelerate import prepare

    own, module = accelerator(), RegressionModel().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    loader = DataLoader(RegressionDataset(length=60, seed=0), batch_size=4)
    model, optimizer, loader = prepare(own, module, optimizer, loader, every=5)
    after = []
    with contextlib.redirect_stdout(io.StringIO()):  # the model prints its dtype
        for _ in range(10):
            for row in loader:
                own.backward(nn.functional.mse_loss(model(row["x"].double()), row["y"].double()))
                optimizer.step()
                optimizer.zero_grad()
                after.append(values(module))
            model.end_epoch()
    model.finish()
    model.close()
    return {"steps": after, "end": values(module)}


def saved_and_resumed(folder: str, every: Any, **exchange: Any) -> dict[str, Any]:
    """Saves after 7 of 12 steps, which is inside a period; then a second run goes on from there."""
    from safetensors.torch import load_file

    batches = batches_of(rank(), 12)
    run = prepared(every, **exchange)
    before = train(run, batches[:7])[-1]
    own, model = run[:2]
    own.save_state(folder)
    state = own.get_state_dict(model)
    with model.agreed():
        shown = values(own.unwrap_model(model))
        own.save_state(f"{folder}/inside")
    whole = train(run, batches[7:])
    ends = [finished(run)]
    found = {}
    for name in ("", "inside"):
        other = network()
        nn.init.zeros_(other[0].weight)  # what is loaded replaces it
        run = prepared(every, module=other, **exchange)
        run[0].load_state(str(Path(folder, name)))
        found[name] = train(run, batches[7:])
        ends.append(finished(run))
    saved = load_file(Path(folder, "model.safetensors"))
    return {
        "before": before,
        "whole": whole,
        "resumed": [found[""], found["inside"]],
        "ends": ends,
        "averages": [
            shown,
            torch.cat([value.reshape(-1) for value in state.values()]).tolist(),
            torch.cat([saved[name].reshape(-1) for name in state]).tolist(),
        ],
        "files": sorted(file.name for file in Path(folder).iterdir()),
        "states": sorted(file.name for file in Path(folder, "nodes").iterdir()),
    }


def measured() -> dict[str, Any]:
    """Evaluates the average on 10 samples, which Accelerate divides over 3 ranks by repeating some."""
    from evenly.integrations.accelerate import prepare

    own, module = accelerator(), network()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    x = torch.cat([x for x, _ in batches_of(0, 3)])[:10]
    model, optimizer, loader = prepare(own, module, optimizer, DataLoader(x, batch_size=2), every=100)
    train((own, model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 100)), [batch(rank(), 0)])
    with model.agreed(), torch.no_grad():
        outputs = torch.cat([own.gather_for_metrics(model(part)) for part in loader])
        average = values(module)
    model.finish()
    model.close()
    return {"outputs": outputs.tolist(), "average": average}


def by_hand() -> dict[str, Any]:
    """Trains two networks, each with its optimizer, on one accelerator."""
    from evenly.integrations.accelerate import prepare

    own = accelerator()
    plain = gan_networks()
    optimizers = [torch.optim.AdamW(part.parameters(), lr=0.01) for part in plain]
    (maker, maker_optimizer), (judge, judge_optimizer) = (
        prepare(own, part, optimizer, every=3) for part, optimizer in zip(plain, optimizers, strict=True)
    )
    after = []
    for noise, real in batches_of(rank(), 7):
        own.backward(judge_loss(judge, maker, noise, real))
        judge_optimizer.step()
        judge_optimizer.zero_grad()
        own.backward(maker_loss(judge.module, maker, noise))
        maker_optimizer.step()
        maker_optimizer.zero_grad()
        judge_optimizer.zero_grad()
        after.append([*values(plain[0]), *values(plain[1])])
    for model in (maker, judge):
        model.finish()
        model.close()
    own.unwrap_model.__self__.close()  # a model may be closed before
    return {"steps": after, "end": [*values(plain[0]), *values(plain[1])]}


def fed() -> list[list[float]]:
    import evenly
    from evenly.integrations.accelerate import prepare
    from evenly.spec import Role

    plan = evenly.Plan(roles=tuple(Role(rank=r, node=r // 2, samples=s) for r, s in enumerate(SIZES)))
    data = torch.utils.data.TensorDataset(*(torch.cat(parts) for parts in zip(*batches_of(0, 7), strict=True)))
    own, module = accelerator(), network()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    loader = evenly.feed(data, plan, rank=rank(), shuffle=False)
    model, optimizer, loader = prepare(own, module, optimizer, loader, every="global")
    run = own, model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 100)
    after = train(run, loader)
    finished(run)
    return after


def refusals() -> dict[str, str]:
    from accelerate import DataLoaderConfiguration, DistributedDataParallelKwargs

    import evenly
    from evenly.integrations.accelerate import prepare

    def message(*others: Any, every: Any = 2, **settings: Any) -> str:
        module = network()
        try:
            prepare(accelerator(**settings), module, torch.optim.SGD(module.parameters()), *others, every=every)
        except evenly.EvenlyError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"

    return {
        "seconds": message(every="30s"),
        "even_batches": message(dataloader_config=DataLoaderConfiguration(even_batches=False)),
        "comm_hook": message(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="bf16")]),
        "other": message(network()),
    }


def run_all(folder: str) -> dict[str, Any]:
    return {
        "every step": steps_of(1, 10),
        "every five": steps_of(5, 50),
        "accumulated": accumulated(),
        "regression": regression(),
        "resumed": saved_and_resumed(f"{folder}/plain", 5),
        "resumed overlapped": saved_and_resumed(f"{folder}/overlapped", 4, overlap=4, codec="int8"),
        "measured": measured(),
        "by hand": by_hand(),
        "fed": fed(),
        "refused": refusals(),
    }
