"""The tensors that exchanges average: parameters, buffers, and optimizer state."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from evenly._torch.dtensor import is_dtensor
from evenly._torch.modules import own_persistent_buffers
from evenly.comm import LocalShard, local_shard_of, local_tensor
from evenly.errors import SpecError
from evenly.exchange.tensors.memory import distinct
from evenly.spec import Exchange

BEGIN_ELSEWHERE = {"Rprop": ("step_size",), "ASGD": ("eta", "mu"), "NAdam": ("mu_product",)}  # slots, not at zero

Choose = Callable[..., dict[str, torch.Tensor]]  # `distinct`, or a `DistinctTensors`
StatePlacement = Callable[[torch.optim.Optimizer, torch.Tensor, str, torch.Tensor], LocalShard | None]


@dataclass(frozen=True)
class Rows:
    """The rows [start, stop) of a tensor."""

    start: int
    stop: int


@dataclass(frozen=True)
class AveragedTensor:
    """A tensor that is averaged: a parameter, or optimizer state laid out like its parameter."""

    home: str  # the parameter's name
    label: str  # what it is called on all ranks: the parameter's name or, for state, index.slot; with rows [a:b]
    tensor: torch.Tensor
    slot: str = ""  # of the optimizer's state
    rows: Rows | None = None  # of the parameter, if only some of them


def persistent_buffers(model: torch.nn.Module, choose: Choose = distinct) -> dict[str, torch.Tensor]:
    """Returns the buffers that belong to the state of the model, such as BatchNorm's; masks and caches often do not.

    Those that share the memory of another one, or of a trained parameter, are left out.
    """
    return choose(_persistent_buffers(model), fixed=_trained(model))


def averages(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor can be averaged: real or complex floats."""
    return tensor.is_floating_point() or tensor.is_complex()


def parameter_entries(parameters: Mapping[str, torch.Tensor], choose: Choose = distinct) -> list[AveragedTensor]:
    """Returns these parameters, each once, in their order.

    Those that share the memory of another one (`b.data = a.data`) are left out: a change would be added twice.
    """
    return [AveragedTensor(name, name, parameter) for name, parameter in choose(parameters.items()).items()]


def current_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[tuple[str, str], torch.Tensor]:
    """Returns the current parameters, and the optimizer's tensors by slot: training loops may replace them."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[name, ""] = local_tensor(parameter).detach()
        for slot, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[name, str(slot)] = local_tensor(value)
    return tensors


def state_entries(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, place_state: StatePlacement | None = None
) -> list[AveragedTensor]:
    """Returns the optimizer's tensors that have the shape of their parameter (momenta), named alike on all ranks.

    For a parameter that is cut over ranks, `place_state` gives the placement of its state.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    entries = []
    for index, parameter in enumerate(_parameters(optimizer)):
        for slot, value in sorted(optimizer.state.get(parameter, {}).items(), key=lambda item: str(item[0])):
            if _is_laid_out_like(optimizer, parameter, str(slot), value, place_state):
                entries.append(AveragedTensor(names[id(parameter)], f"{index}.{slot}", local_tensor(value), str(slot)))
    return entries


def by_slot(entries: Sequence[AveragedTensor]) -> list[list[AveragedTensor]]:
    """Returns the entries of each slot of the optimizer's state."""
    return [[entry for entry in entries if entry.slot == slot] for slot in sorted({entry.slot for entry in entries})]


def require_resettable(optimizer: torch.optim.Optimizer, exchange: Exchange) -> None:
    """Raises `SpecError` if state that does not start at zero is to be reset."""
    slots = BEGIN_ELSEWHERE.get(type(optimizer).__name__, ())
    if any(group.get("initial_accumulator_value") for group in optimizer.param_groups):  # Adagrad
        slots = ("sum",)
    for slot in slots:
        if exchange.policy_of(slot) == "reset":
            raise SpecError(
                f"optimizer_state resets {slot!r} of {type(optimizer).__name__}, which does not start at zero. Keep or "
                "average it."
            )


def reset_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    homes: Mapping[str, Rows | None],
    chosen: Callable[[str], bool],
) -> None:
    """Sets the chosen state of the parameters `homes` to zero, as it was before the first step.

    If only rows of a parameter are reset, its counters belong to the last rows. Some optimizers count steps in their
    groups: such a count belongs to the last parameter of the group.
    """
    last_of_group = {id(group["params"][-1]): group for group in optimizer.param_groups if group["params"]}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {}) if name in homes else {}
        rows = homes.get(name)
        is_last = rows is None or rows.stop == parameter.shape[0]
        for slot in [slot for slot in state if chosen(str(slot))]:
            value = state[slot]
            if isinstance(value, torch.Tensor) and rows is not None and value.shape == parameter.shape:
                value.narrow(0, rows.start, rows.stop - rows.start).zero_()
            elif isinstance(value, torch.Tensor) and is_last:
                value.zero_()
            elif isinstance(value, int | float) and is_last:
                state[slot] = type(value)(0)
        group = last_of_group.get(id(parameter), {}) if name in homes and is_last and chosen("step") else {}
        if isinstance(group.get("step"), int | float):
            group["step"] = type(group["step"])(0)


def _is_laid_out_like(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    slot: str,
    value: object,
    place_state: StatePlacement | None,
) -> bool:
    if not isinstance(value, torch.Tensor) or not averages(value) or value.shape != parameter.shape:
        return False
    if is_dtensor(parameter):
        return is_dtensor(value) and value.placements == parameter.placements
    placement = local_shard_of(parameter)
    if placement is None:
        return True
    return slot != "step" if place_state is None else place_state(optimizer, parameter, slot, value) == placement


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _trained(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, local_tensor(p)) for name, p in model.named_parameters() if p.requires_grad)


def _persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in own_persistent_buffers(module):
            yield f"{prefix}.{name}" if prefix else name, local_tensor(buffer)
