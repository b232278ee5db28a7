"""The published cases of heterogeneous model parallelism: convolution pairs on CIFAR-10 and MNIST, cut in shares.

Reference: Moreno-Álvarez, Haut, Paoletti, Rico-Gallego, Neurocomputing 441, 2021.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypedDict

import torch
from pydantic import Field, field_validator
from torch import nn
from torch.utils.data import TensorDataset

from evenly.recipes.config import RecipeConfig
from evenly.recipes.data import load_images
from evenly.recipes.published import PublishedCifarNet, PublishedMnistNet
from evenly.session import Session
from evenly.shards import Adafactor
from evenly.spec import Event, Plan
from evenly.spec.layout import check_shares

CASES = {"cifar": (PublishedCifarNet, "cifar10"), "mnist": (PublishedMnistNet, "mnist")}


class Sizes(TypedDict, total=False):
    """The sizes of a network that can be changed."""

    filters: Sequence[int]
    hidden: int


FILTERS = (
    "of each convolution, in pairs; none: as published, cifar [60,60,120,120,240,240,480,480], mnist [30,30,60,60]"
)
HIDDEN = "outputs of the layer before the last; none: as published, cifar 256, mnist 128"


class SharesConfig(RecipeConfig):
    """What can be set for the recipes `cifar` and `mnist`."""

    shares: Annotated[tuple[float, ...], Field(description="of each rank that holds a part, such as [70, 25, 5]")] = ()
    cut_batch: Annotated[bool, Field(description="cut early layers along the batch where that sends fewer bytes")] = (
        False
    )
    epochs: Annotated[int, Field(ge=1, description="passes over the data")] = 3
    batch_size: Annotated[int, Field(ge=1, description="samples of one network in a step")] = 200
    optimizer: Annotated[
        Literal["adafactor", "sgd", "adam"], Field(description="adafactor (as published), sgd or adam")
    ] = "adafactor"
    lr: Annotated[float | None, Field(gt=0, description="learning rate; none: 0.01, for adam 0.001")] = None
    every: Annotated[str, Field(description="K' between nodes: a number of steps, 'epoch' or 'global'")] = "epoch"
    filters: Annotated[tuple[int, ...] | None, Field(description=FILTERS)] = None
    hidden: Annotated[int | None, Field(ge=1, description=HIDDEN)] = None
    train_limit: Annotated[int | None, Field(ge=1, description="use only the first images")] = None
    test_limit: Annotated[int | None, Field(ge=1, description="test with only the first images")] = None
    checkpoint_every: Annotated[int | Literal["epoch"] | None, Field(description="steps, 'epoch', or none")] = "epoch"
    seed: Annotated[int, Field(description="of weights and of the order of samples")] = 0

    @field_validator("shares", mode="after")
    @classmethod
    def _are_shares(cls, shares: tuple[float, ...]) -> tuple[float, ...]:
        return check_shares(shares) if shares else shares


def train_shares(
    config: SharesConfig,
    *,
    case: str = "cifar",
    folder: Path | None = None,
    data: Path | None = None,
    resume: bool = True,
    listener: Callable[[Event], None] | None = None,
    plan: Plan | None = None,
    device: str = "auto",
) -> float:
    """Trains on all ranks together, as `plan` says if there is one, and returns the test accuracy at the end."""
    build, dataset = CASES[case]
    train, test = load_images(dataset, data, train_limit=config.train_limit).normalised()
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
        sizes: Sizes = {}
        if config.filters is not None:
            sizes["filters"] = config.filters
        if config.hidden is not None:
            sizes["hidden"] = config.hidden
        model = build(**sizes)
        example = train.tensors[0][: config.batch_size]
        plan = plan or session.plan(
            model,
            example,
            batch_size=config.batch_size,
            shares=config.shares or None,
            cut_batch=config.cut_batch,
            every=config.every,
        )
        size = sum(parameter.numel() for parameter in model.parameters())
        settings = {**config.model_dump(), "shares": "/".join(f"{s:g}" for s in config.shares), "case": case}
        session.describe(**{**settings, "filters": str(config.filters), "parameters": size})
        optimizer = _optimizer(config, model)
        trained, _, loader = session.prepare(model, optimizer, train, plan=plan)
        for epoch in session.epochs(config.epochs):
            loss = torch.zeros(())
            for x, y in loader:
                loss = nn.functional.cross_entropy(trained(x), y)
                loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotation here
                optimizer.step()
                optimizer.zero_grad()
            session.log(loss=float(loss.detach()), epoch=epoch + 1)
        accuracy = _accuracy(trained, test, session, config)
        session.log(accuracy=accuracy)
    return accuracy


def _optimizer(config: SharesConfig, model: nn.Module) -> torch.optim.Optimizer:
    lr = config.lr or (0.001 if config.optimizer == "adam" else 0.01)
    if config.optimizer == "adafactor":
        return Adafactor(model.parameters(), lr=lr)
    if config.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=lr)
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


@torch.no_grad()
def _accuracy(model: nn.Module, test: TensorDataset, session: Session, config: SharesConfig) -> float:
    """Returns the fraction of test images that are right; the ranks of a replica test all of them."""
    images, labels = (tensor[: config.test_limit or len(tensor)] for tensor in test.tensors)
    model.eval()
    right = 0
    for x, y in zip(torch.split(images, config.batch_size), torch.split(labels, config.batch_size), strict=True):
        right += int((model(x.to(session.device)).argmax(1).cpu() == y).sum())
    model.train()
    return right / len(labels)
