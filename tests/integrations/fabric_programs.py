"""What one rank does in loops with Fabric; processes call these functions."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations.batches import SIZES, Batch, batches_of, gan_networks, judge_loss, maker_loss, network, values

warnings.simplefilter("ignore")


def rank() -> int:
    return int(os.environ["RANK"])


def fabric_of(every: Any, **exchange: Any) -> Any:
    import lightning

    from evenly.integrations.lightning import EvenlyFabricStrategy

    fabric = lightning.Fabric(strategy=EvenlyFabricStrategy(every, **exchange))
    fabric.launch()
    return fabric


def prepared(every: Any, *, module: nn.Module | None = None, **exchange: Any) -> tuple[Any, ...]:
    """Returns Fabric, the model, the optimizer, the schedule and the plain network."""
    fabric, module = fabric_of(every, **exchange), module or network()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9)
    return fabric, *fabric.setup(module, optimizer), schedule, module


def train(
    run: tuple[Any, ...], batches: list[Batch], *, count: int = 1, clip: float | None = None
) -> list[list[float]]:
    fabric, model, optimizer, schedule, module = run
    after = []
    for number, (x, y) in enumerate(batches, start=1):
        is_last = number % count == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            fabric.backward(nn.functional.mse_loss(model(x), y) / count)
        if is_last:
            if clip is not None:
                fabric.clip_gradients(model, optimizer, max_norm=clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            after.append(values(module))
    return after


def finished(run: tuple[Any, ...]) -> list[float]:
    run[0].strategy.finish()
    run[0].strategy.teardown()
    return values(run[-1])


def steps_of(every: Any, steps: int) -> dict[str, Any]:
    run = prepared(every)
    return {"steps": train(run, batches_of(rank(), steps)), "end": finished(run), "world": run[0].world_size}


def accumulated() -> list[list[float]]:
    run = prepared(2)
    after = train(run, batches_of(rank(), 12), count=2, clip=0.5)
    finished(run)
    return after


def saved_and_resumed(folder: str, every: Any, **exchange: Any) -> dict[str, Any]:
    """Saves after 7 of 12 steps, which is inside a period; then a second run goes on from there."""
    batches, path = batches_of(rank(), 12), str(Path(folder, "state.ckpt"))
    run = prepared(every, **exchange)
    before = train(run, batches[:7])[-1]
    fabric, model, optimizer, schedule, module = run
    fabric.save(path, {"model": model, "optimizer": optimizer, "schedule": schedule, "epoch": 3})
    with fabric.strategy.agreed():
        shown = values(module)
    whole = train(run, batches[7:])
    ends = [finished(run)]
    other = network()
    nn.init.zeros_(other[0].weight)  # what is loaded replaces it
    run = prepared(every, module=other, **exchange)
    rest = run[0].load(path, {"model": run[1], "optimizer": run[2], "schedule": run[3]}, weights_only=False)
    resumed = train(run, batches[7:])
    ends.append(finished(run))
    saved = torch.load(path, weights_only=False)["model"]
    return {
        "before": before,
        "whole": whole,
        "resumed": resumed,
        "ends": ends,
        "rest": rest,
        "averages": [shown, torch.cat([value.reshape(-1) for value in saved.values()]).tolist()],
        "files": sorted(file.name for file in Path(folder).iterdir()),
    }


def by_hand() -> list[list[float]]:
    """Trains two networks, each with its optimizer."""
    plain = gan_networks()
    fabric = fabric_of(3)
    (maker, maker_optimizer), (judge, judge_optimizer) = (
        fabric.setup(part, torch.optim.AdamW(part.parameters(), lr=0.01)) for part in plain
    )
    after = []
    for noise, real in batches_of(rank(), 7):
        fabric.backward(judge_loss(judge, maker, noise, real))
        judge_optimizer.step()
        judge_optimizer.zero_grad()
        fabric.backward(maker_loss(plain[1], maker, noise))
        maker_optimizer.step()
        maker_optimizer.zero_grad()
        judge_optimizer.zero_grad()
        after.append([*values(plain[0]), *values(plain[1])])
    fabric.strategy.finish()
    fabric.strategy.teardown()
    return after


def epochs() -> dict[str, Any]:
    """Trains with a loader that Fabric divides, and exchanges at the end of epochs."""
    run = prepared("epoch")
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*batches_of(0, 6), strict=True)))  # 24 samples
    loader = run[0].setup_dataloaders(DataLoader(data, batch_size=4))
    ends = []
    for _ in range(2):
        train(run, list(loader))
        run[0].strategy.end_epoch()
        ends.append(values(run[-1]))
    return {"ends": ends, "end": finished(run), "batches": len(loader)}


def fed() -> list[list[float]]:
    """Trains with the unequal batches of `evenly.feed`, whose samples are the weights."""
    import evenly
    from evenly.spec import Role

    plan = evenly.Plan(roles=tuple(Role(rank=r, node=r // 2, samples=s) for r, s in enumerate(SIZES)))
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*batches_of(0, 7), strict=True)))
    loader = evenly.feed(data, plan, rank=rank(), shuffle=False)
    fabric, model, optimizer, _, module = prepared("global", count=lambda *_: loader.samples)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 100)
    run = fabric, model, optimizer, schedule, module
    after = train(run, loader)
    finished(run)
    return after


def refusals() -> dict[str, str]:
    import evenly

    def message(act: Any) -> str:
        try:
            act()
        except evenly.EvenlyError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"

    fabric, module = fabric_of(2), network()
    optimizers = [torch.optim.SGD(module.parameters()) for _ in range(2)]
    return {
        "seconds": message(lambda: fabric_of("30s")),
        "optimizers": message(lambda: fabric.setup(module, *optimizers)),
        "module": message(lambda: fabric.setup_module(module)),
        "optimizer": message(lambda: fabric.setup_optimizers(optimizers[0])),
        "frozen": message(lambda: fabric.setup_module(network().requires_grad_(False))),
    }


def run_all(folder: str) -> dict[str, Any]:
    return {
        "every step": steps_of(1, 10),
        "every five": steps_of(5, 50),
        "accumulated": accumulated(),
        "resumed": saved_and_resumed(f"{folder}/plain", 5),
        "resumed overlapped": saved_and_resumed(f"{folder}/overlapped", 4, overlap=4, codec="int8"),
        "by hand": by_hand(),
        "epochs": epochs(),
        "fed": fed(),
        "refused": refusals(),
    }
