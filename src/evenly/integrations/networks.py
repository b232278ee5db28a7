"""Which network each optimizer trains, where a LightningModule optimizes by hand."""

from collections.abc import Sequence

import torch

from evenly.errors import SpecError


def network_of(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[str, torch.nn.Module]:
    """Returns the innermost part of `module` that has exactly the parameters of `optimizer`, and its name.

    >>> parts = torch.nn.ModuleDict({"generator": torch.nn.Linear(2, 3), "judge": torch.nn.Linear(3, 1)})
    >>> network_of(parts, torch.optim.SGD(parts["judge"].parameters()))[0]
    'judge'
    """
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found = [
        (name, part)
        for name, part in module.named_modules()
        if {id(parameter) for parameter in part.parameters() if parameter.requires_grad} == trained
    ]
    if found:
        return found[-1]  # parts come before the parts of these
    raise SpecError(
        f"a LightningModule with automatic_optimization = False has a {type(optimizer).__name__} whose parameters are "
        "not those of one module in it, so there is no network to synchronize with other ranks. Put what an optimizer "
        "trains into one nn.Module, call that, and freeze what no optimizer trains by requires_grad_(False)."
    )


def networks_of(
    module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, tuple[torch.nn.Module, torch.optim.Optimizer]]:
    """Returns for each optimizer, under the name of its network, the network and the optimizer."""
    found: dict[str, tuple[torch.nn.Module, torch.optim.Optimizer]] = {}
    for optimizer in optimizers:
        name, network = network_of(module, optimizer)
        if name in found:
            raise SpecError(
                f"two optimizers of a LightningModule train {name or 'it'!r}. Give each parameter to one optimizer."
            )
        found[name] = network, optimizer
    return found
