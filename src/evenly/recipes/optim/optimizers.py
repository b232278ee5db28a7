"""From a name to an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from evenly.errors import SpecError
from evenly.recipes.optim.catalogue import OPTIMIZERS, OptimizerInfo, require_known

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.optimizer import ParamsT

_USUAL_MOMENTUM = {"sgd": 0.9}
_USUAL_BETA2 = 0.999


def build_optimizer(
    name: str,
    params: ParamsT,
    *,
    lr: float | None = None,
    momentum: float | None = None,
    weight_decay: float = 0.0,
    **options: object,
) -> Optimizer:
    """Returns the optimizer of this name, on whole networks and on networks cut by `evenly.shard`.

    Args:
        name: one of `OPTIMIZERS`.
        params: parameters or groups of them.
        lr: learning rate; None: the usual one of the optimizer.
        momentum: of SGD and RMSprop, or the first beta of the others; None: the usual one.
        weight_decay: added to the gradient, or decoupled: `OptimizerInfo.decay` of the optimizer says which.
        options: further arguments of the optimizer, `OptimizerInfo.options`.

    Example:
        >>> import torch
        >>> build_optimizer("sgd", [torch.nn.Parameter(torch.ones(2))], nesterov=True).defaults["momentum"]
        0.9
    """
    if name.lower().replace("-", "") == "kfac":
        raise SpecError(
            "the optimizer 'kfac' was asked for; K-FAC is not here: no maintained library of it for PyTorch installs "
            "beside torch 2.11 to 2.13, and its factors of whole layers could be neither averaged across nodes nor cut "
            f"over ranks. Choose one of: {', '.join(OPTIMIZERS)}."
        )
    require_known("optimizer", name, OPTIMIZERS)
    info = OPTIMIZERS[name]
    for option in options:
        require_known("option", option, info.options, of=f"the optimizer {name!r}")
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    settings |= {**info.fixed, **_momentum(name, info, momentum, settings)}
    settings |= {"lr": info.lr if lr is None else lr, "weight_decay": weight_decay}
    make = _find(name, info)
    try:
        return make(params, **settings)
    except (TypeError, ValueError, RuntimeError) as error:
        given = ", ".join(f"{key}={value}" for key, value in settings.items())
        raise SpecError(
            f"the optimizer {name!r} was asked for with {given}; {info.callable} refuses that: {error}. "
            "Change the setting it names."
        ) from error


def _momentum(name: str, info: OptimizerInfo, momentum: float | None, options: dict[str, object]) -> dict[str, object]:
    """Returns the argument that sets the momentum, if there is one to set."""
    if momentum is None:
        return {"momentum": _USUAL_MOMENTUM[name]} if name in _USUAL_MOMENTUM else {}
    if info.momentum is None:
        raise SpecError(f"momentum={momentum} was given to the optimizer {name!r}, which has none. Leave it out.")
    if info.momentum in options:
        raise SpecError(
            f"momentum={momentum} and {info.momentum}={options[info.momentum]} were given to the optimizer {name!r}, "
            "but momentum is the first beta. Give one of them."
        )
    return {"momentum": momentum} if info.momentum == "momentum" else {"betas": (momentum, _USUAL_BETA2)}


def _find(name: str, info: OptimizerInfo) -> Callable[..., Optimizer]:
    try:
        module = import_module(info.module)
    except ModuleNotFoundError as error:
        if info.extra is None or error.name != info.module:
            raise
        raise SpecError(
            f"the optimizer {name!r} was asked for; it comes from {info.module}, which is not installed. Install it: "
            f"pip install 'evenly[{info.extra}]'."
        ) from error
    make: Callable[..., Optimizer] = getattr(module, info.callable)
    return make
