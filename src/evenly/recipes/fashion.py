"""A small ResNet on Fashion-MNIST, by node-based communications or by the global baseline."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import nn
from torch.utils.data import TensorDataset

from evenly.recipes.config import RecipeConfig
from evenly.recipes.data import load_images
from evenly.recipes.resnet import SmallResNet
from evenly.session import Session
from evenly.spec import Event, Plan
from evenly.spec.exchange import StatePolicy


class FashionConfig(RecipeConfig):
    """What can be set for the recipe `fashion`."""

    epochs: Annotated[int, Field(ge=1, description="passes over the data")] = 3
    batch_size: Annotated[int, Field(ge=1, description="samples of one rank in a step")] = 32
    every: Annotated[str, Field(description="K': a number of steps, '30s', '2%' of the time, 'epoch' or 'global'")] = (
        "epoch"
    )
    overlap: Annotated[int, Field(ge=0, description="steps made during an exchange")] = 0
    fragments: Annotated[int, Field(ge=1, description="parts of the parameters, exchanged one by one")] = 1
    codec: Annotated[str, Field(description="format of sent parameters: fp32, bf16, int8 or int4")] = "fp32"
    outer: Annotated[Literal["nesterov"] | None, Field(description="nesterov, or none: plain averaging")] = None
    optimizer_state: Annotated[StatePolicy, Field(description="keep, average or reset momenta")] = "keep"
    lr: Annotated[float, Field(gt=0, description="highest learning rate")] = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0)] = 5e-4
    width: Annotated[int, Field(ge=1, description="channels of the first stage")] = 16
    blocks: Annotated[int, Field(ge=1, description="residual blocks a stage")] = 1
    train_limit: Annotated[int | None, Field(ge=1, description="use only the first images")] = None
    test_limit: Annotated[int | None, Field(ge=1, description="test with only the first images")] = None
    precision: Annotated[Literal["fp32", "bf16"], Field(description="fp32, or bf16: autocast")] = "fp32"
    evaluate_every: Annotated[int, Field(ge=0, description="epochs; 0: only at the end")] = 1
    checkpoint_every: Annotated[int | Literal["epoch"] | None, Field(description="steps, 'epoch', or none")] = "epoch"
    seed: int = 0


def train_fashion(
    config: FashionConfig,
    *,
    folder: Path | None = None,
    data: Path | None = None,
    resume: bool = True,
    listener: Callable[[Event], None] | None = None,
    plan: Plan | None = None,
    device: str = "auto",
) -> float:
    """Trains on all ranks together, as `plan` says if there is one, and returns the test accuracy at the end."""
    train, test = load_images("fashion", data, train_limit=config.train_limit).normalised()
    torch.manual_seed(config.seed)
    accuracy = math.nan  # on a rank that the plan leaves out
    with Session(
        folder,
        device=device,
        seed=config.seed,
        resume=resume,
        checkpoint_every=config.checkpoint_every,
        progress=listener is None,
    ) as session:
        if listener is not None:
            session.listen(listener)
        model = SmallResNet(config.width, blocks=config.blocks)
        wishes = config.model_dump(include={"overlap", "fragments", "codec", "outer", "optimizer_state"})
        plan = plan or session.plan(batch_size=config.batch_size, every=config.every, **wishes)
        steps = config.epochs * math.ceil(len(train) / sum(plan.batch_shares))
        size = sum(parameter.numel() for parameter in model.parameters())
        session.describe(**config.model_dump(), total_steps=steps, parameters=size)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay, nesterov=True
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _warm_cosine(step, steps))
        synchronized, _, loader = session.prepare(model, optimizer, train, plan=plan)
        session.track(schedule=schedule)
        for epoch in session.epochs(config.epochs):
            loss = torch.zeros(())
            for x, y in loader:
                with torch.autocast(session.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
                    loss = nn.functional.cross_entropy(synchronized(x), y)
                loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotation here
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            session.log(loss=float(loss.detach()), epoch=epoch + 1)
            if config.evaluate_every and (epoch + 1) % config.evaluate_every == 0 and epoch + 1 < config.epochs:
                with synchronized.agreed():
                    session.log(accuracy=_accuracy(synchronized, test, session, config.test_limit))
        accuracy = _accuracy(synchronized, test, session, config.test_limit)
        session.log(accuracy=accuracy)
    return accuracy


def _warm_cosine(step: int, steps: int) -> float:
    warm = max(1, steps // 20)
    return min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * min(step, steps) / steps)))


@torch.no_grad()
def _accuracy(model: nn.Module, test: TensorDataset, session: Session, limit: int | None) -> float:
    """Returns the fraction of test images that are right; each rank tests its part."""
    images, labels = (tensor[: limit or len(tensor)] for tensor in test.tensors)
    mine = slice(session.rank, None, session.world_size)
    was_training = model.training
    model.eval()
    right = 0
    for x, y in zip(torch.split(images[mine], 256), torch.split(labels[mine], 256), strict=True):
        right += int((model(x.to(session.device)).argmax(1).cpu() == y).sum())
    model.train(was_training)
    return session.sum(right)[0] / len(labels)
