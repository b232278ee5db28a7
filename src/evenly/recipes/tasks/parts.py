"""What all tasks share: optimizer, precision, the settings in the record of a run."""

import logging
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenly.checkpoints.weight_files import read_weights
from evenly.errors import SpecError
from evenly.recipes.config import TrainConfig
from evenly.recipes.networks import build_network
from evenly.recipes.optim import build_optimizer
from evenly.session import Session
from evenly.session.session import Setting

logger = logging.getLogger(__name__)


def make_network(config: TrainConfig, name: str = "", **shape: int) -> nn.Module:
    """Returns the network of the settings, or `name`, for data of this shape; the settings' options come last."""
    options: dict[str, Any] = {**shape, **config.network}
    return build_network(name or config.model, **options)


def make_optimizer(config: TrainConfig, network: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer of the settings for the parameters of `network`."""
    return build_optimizer(
        config.optimizer,
        network.parameters(),
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        **config.optimizer_options,
    )


def autocast(config: TrainConfig, session: Session) -> AbstractContextManager[object]:
    """Returns the context in which the network computes."""
    return torch.autocast(session.device.type, torch.bfloat16, enabled=config.precision == "bf16")


def describe(session: Session, config: TrainConfig, *networks: nn.Module, total_steps: int) -> None:
    """Puts the settings into the record of the run; options of a table become settings of their own."""
    settings: dict[str, Setting] = {"total_steps": total_steps}
    for name, value in config.model_dump().items():
        if isinstance(value, dict):
            settings |= {option: _setting(entry) for option, entry in value.items()}
        else:
            settings[name] = "/".join(f"{s:g}" for s in config.shares) if name == "shares" else _setting(value)
    size = sum(parameter.numel() for network in networks for parameter in network.parameters())
    session.describe(**settings, parameters=size, torch=str(torch.__version__))


def load_pretrained(network: nn.Module, file: str) -> None:
    """Loads weights of another training; layers that it lacks, or has in another shape, begin anew."""
    state, own = read_weights(Path(file)), network.state_dict()
    fitting = {name: value for name, value in state.items() if name in own and value.shape == own[name].shape}
    if not fitting:
        raise SpecError(
            f"pretrained={file!r} was asked for, but none of its {len(state)} tensors fits this network, which begins "
            f"with {next(iter(own), 'nothing')}; the file begins with {next(iter(state), 'nothing')}. Give weights of "
            "the same network."
        )
    network.load_state_dict(fitting, strict=False)
    logger.info(
        "%d of %d tensors come from %s; new: %s", len(fitting), len(own), file, ", ".join(own.keys() - fitting.keys())
    )


def rank_batch(config: TrainConfig, session: Session) -> int:
    """Returns the samples of one rank, or of one network that is cut over several, in a step."""
    if config.global_batch is None:
        return config.batch_size
    takers = session.world_size // (len(config.shares) or 1)
    if takers == 0 or config.global_batch % takers:
        raise SpecError(
            f"global_batch={config.global_batch} was asked for, but {takers} ranks or cut networks take equal parts of "
            "it. Give a multiple of that number, or batch_size."
        )
    return config.global_batch // takers


def _setting(value: object) -> Setting:
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)
