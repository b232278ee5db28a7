"""The state of an outer optimizer over one slice as vectors, one value for each element, so that slices may change."""

from collections.abc import Callable, Mapping
from typing import final

import torch

STEPPED = "stepped"  # 1 for elements that the outer optimizer has stepped, else 0


@final
class OuterState:
    """Converts the state of outer optimizers, which `make` builds over a parameter, to vectors and back."""

    def __init__(self, make: Callable[[torch.Tensor], torch.optim.Optimizer]) -> None:
        parameter = torch.nn.Parameter(torch.zeros(2))
        parameter.grad = torch.zeros(2)
        optimizer = make(parameter)
        for group in optimizer.param_groups:
            group.update({option: False for option in ("capturable", "fused") if group.get(option)})  # need a GPU
        optimizer.step()
        slots = {str(slot): value for slot, value in optimizer.state[parameter].items() if value is not None}
        self._vectors = {slot: float(value[0]) for slot, value in slots.items() if _is_vector(value, parameter)}
        self._numbers = [slot for slot in slots if slot not in self._vectors]

    @property
    def new_values(self) -> dict[str, float]:
        """The values of elements that were not stepped before, by name of the vector."""
        return {STEPPED: 0.0, **dict.fromkeys(self._numbers, -torch.inf), **self._vectors}

    def vectors(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Returns the state of an optimizer; numbers, such as its steps, are written to every element."""
        (parameter,) = optimizer.param_groups[0]["params"]
        state = optimizer.state.get(parameter, {})
        vectors = {slot: torch.full_like(parameter, value) for slot, value in self.new_values.items()}
        for slot in vectors.keys() & state.keys():
            if state[slot] is not None:
                vectors[slot].copy_(torch.as_tensor(state[slot]))
        vectors[STEPPED].fill_(float(bool(state)))
        return {slot: vector.detach() for slot, vector in vectors.items()}

    def put(self, optimizer: torch.optim.Optimizer, vectors: Mapping[str, torch.Tensor]) -> None:
        """Gives an optimizer that has made no step the state of these vectors.

        Numbers are those of the elements that were stepped before; without such elements it stays as it is.
        """
        (parameter,) = optimizer.param_groups[0]["params"]
        if not parameter.numel() or not bool(vectors[STEPPED].any()):
            return
        parameter.grad = torch.zeros_like(parameter)
        before = parameter.detach().clone()
        optimizer.step()  # makes the state, on the devices and in the types that this optimizer uses
        parameter.grad = None
        parameter.detach().copy_(before)
        state = optimizer.state[parameter]
        for slot in [slot for slot in (*self._vectors, *self._numbers) if state.get(slot) is not None]:
            value, vector = state[slot], vectors[slot]
            if slot in self._vectors:
                value.copy_(vector)
            elif isinstance(value, torch.Tensor):
                value.fill_(vector.max().item())
            else:
                state[slot] = type(value)(vector.max().item())


def _is_vector(value: object, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape
