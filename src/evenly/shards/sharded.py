"""The module to call: a network of which every rank holds its parts of the layers."""

from collections.abc import Mapping
from inspect import Signature, signature
from typing import Any

import torch
from torch import nn

from evenly._errors import MismatchError, SpecError
from evenly.comm import Traffic, Wire
from evenly.graph import Traced
from evenly.shards.chance import Dice
from evenly.shards.cutting import cut_model
from evenly.shards.program import Program
from evenly.spec.layout import Layout


class Sharded(nn.Module):
    """A network whose layers are cut over the ranks of a wire; parameters are plain local tensors under their names."""

    def __init__(self, traced: Traced, layout: Layout, wire: Wire, *, seed: int) -> None:
        super().__init__()
        local = cut_model(traced, layout, wire)
        self._parameters, self._buffers, self._modules = local._parameters, local._buffers, local._modules
        self.training = local.training
        self.layout, self.wire = layout, wire
        self._dice = Dice(seed)
        self._signature: Signature = signature(traced.model.forward)
        self._shapes = traced.example
        self._program = Program(traced, layout, self, wire, self._dice)
        self._expected = {name: tensor.shape for name, tensor in self.named_parameters()}

    @property
    def traffic(self) -> Traffic:
        """What the ranks have sent so far: messages and bytes."""
        return self.wire.traffic

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the network returns for these arguments, on every rank."""
        bound = self._signature.bind(*args, **kwargs).arguments
        self._check(bound)
        try:
            return self._program.run(bound)
        except Exception as error:
            self.wire.alarm.ring(error)
            raise

    def _check(self, given: Mapping[str, Any]) -> None:
        for name, shape in self._shapes.items():
            value = given.get(name)
            if not isinstance(value, torch.Tensor) or value.shape[1:] != shape[1:] or value.ndim != len(shape):
                case = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise SpecError(
                    f"the input {name!r} is {case}, but the network was sharded with an example of shape {shape}; only "
                    "the batch may differ. Shard it with an example of this shape."
                )
        strange = [n for n in given if n not in self._shapes and given[n] is not None]
        if strange:
            raise SpecError(
                f"the argument {strange[0]!r} was not in the example with which the network was sharded. "
                "Give an example with all arguments."
            )
        now = {name: tensor.shape for name, tensor in self.named_parameters()}
        if now != self._expected:
            changed = next(n for n in {**now, **self._expected} if now.get(n) != self._expected.get(n))
            raise MismatchError(
                f"the parameter {changed!r} was {_said(self._expected.get(changed))} when the network was sharded, and "
                f"now is {_said(now.get(changed))}. Change the network first, then shard it."
            )


def _said(shape: torch.Size | None) -> str:
    return "not there" if shape is None else f"of shape {tuple(shape)}"
