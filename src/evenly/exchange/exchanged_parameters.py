"""Which parameters exchanges average: those that are trained, and those that were trained before."""

from collections.abc import Collection
from typing import final

import torch

from evenly.comm import local_tensor


@final
class ExchangedParameters:
    """The parameters that were trained at the last forward or at one before it.

    A layer that is frozen later is still averaged: nodes hold different values of it until the next exchange, and an
    optimizer may go on to change it, by momentum or weight decay, if its gradients are zero instead of None.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._exchanged = set(self._trained)

    def follow(self, trained: Collection[str]) -> None:
        """Takes over which parameters are trained from now on."""
        self._trained = set(trained)
        self._exchanged |= self._trained

    def resume(self, trained: Collection[str] | None, exchanged: Collection[str] | None) -> None:
        """Restores what a checkpoint's run trained and exchanged; without these what is trained now is exchanged."""
        self._trained = self._trained if trained is None else set(trained)
        self._exchanged = self._trained | set(exchanged or ())

    def description(self) -> str:
        """Returns a text that is equal on ranks that train and exchange the same."""
        return f"trained {sorted(self._trained)}, exchanged {sorted(self._exchanged)}"

    def current(self) -> dict[str, torch.Tensor]:
        """Returns the parameters that exchanges average, in the order of the model; of DTensors this rank's parts."""
        named = self._module.named_parameters()
        return {name: local_tensor(parameter) for name, parameter in named if name in self._exchanged}
