"""Units that change hands while a network trains: parameters, gradients, buffers, and the optimizer's state of them."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from evenly._torch import pytree
from evenly._torch.autograd import has_hooks
from evenly._torch.modules import tensor_tables
from evenly.errors import SpecError
from evenly.shards.optim.optimizers import state_placement
from evenly.shards.parts.guard import unguard
from evenly.shards.parts.local_shards import LocalShard, local_shard_of, place, retire
from evenly.shards.run.cutting import homes
from evenly.shards.run.program import Program
from evenly.shards.run.sharded import Sharded
from evenly.spec.layout import REPLICATED, Layout

OURS = 1  # hooks on a parameter that averages gradients, and is led over
Homes = Callable[[str, LocalShard], LocalShard]  # where the tensor of this name lies from now on


def immovable(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Returns why units of a network cannot change hands; empty if they can."""
    for tensor in (*model.parameters(), *model.buffers()):
        if local_shard_of(tensor) is None:
            return "a tensor was put in place of another after sharding"
    for name, own in model.named_parameters():
        if has_hooks(own, besides=OURS):
            return f"a hook on {name!r} would be lost"
    for parameter, key, value in _slots(optimizer):
        home = local_shard_of(parameter)
        has_place = state_placement(optimizer, parameter, key, value) is not None
        if home is not None and home.is_cut and value.numel() != 1 and not has_place:
            return f"{type(optimizer).__name__}'s {key!r} of {home.name!r} has no rule"
    return ""


@torch.no_grad()
def reshard(model: Sharded, optimizer: torch.optim.Optimizer, layout: Layout) -> None:
    """Cuts a network anew, in place, between two steps; all of its ranks call it together.

    Only what changes hands travels. Parameters whose part has another size become new ones, in the network and in the
    optimizer; what is computed stays the same.

    Args:
        model: the network.
        optimizer: an optimizer of its parameters; its state moves with them.
        layout: how it is cut from now on, over the same ranks.
    """
    if layout.graph != model.layout.graph or layout.members != model.layout.members:
        raise SpecError(
            f"a network cut over the ranks {list(model.layout.members)} was to be cut anew by a layout for "
            f"{list(layout.members)}, or for another network. Make a layout for the same network and ranks."
        )
    model._require_open()
    unguard([*model.parameters(), *model.buffers()])
    program = model._program
    if program is not None:
        with model.shard_group.telling():
            _Move(model, optimizer, _homes(program, layout)).run()
        model._program = Program(program.traced, layout, model, model.shard_group, model._dropout_stream)
    model.layout = layout
    model._traced_program.place()
    model._stand = (0, False, 0)


def _homes(program: Program, layout: Layout) -> Homes:
    records = dict(homes(program.traced, layout))

    def placed(name: str, old: LocalShard) -> LocalShard:
        record = records.get(name, REPLICATED)
        if record.state != "sharded":
            return LocalShard(old.name, old.shape, old.shard_group)
        return LocalShard(old.name, old.shape, old.shard_group, record.dim, layout.cuts[record.cut].segments)

    return placed


class _Move:
    """All tensors of one network and its optimizer, moved one after another, in the same order on every rank."""

    def __init__(self, model: Sharded, optimizer: torch.optim.Optimizer, placed: Homes) -> None:
        self._model, self._optimizer = model, optimizer
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self._tensors = {id(tensor): tensor for _, tensor in named}
        self._before: dict[int, LocalShard] = {}
        self._after: dict[int, LocalShard] = {}
        for name, tensor in named:
            old = local_shard_of(tensor)
            if old is None:
                raise SpecError(f"{name!r} of a network cut over ranks does not say where it lies. Shard it anew.")
            self._before[id(tensor)] = old
            found = placed(name, old)  # of several names of one tensor, any may be the one that is cut
            if found.is_cut or id(tensor) not in self._after:
                self._after[id(tensor)] = found
        self._seats: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for module in model.modules():
            for held in tensor_tables(module):
                for name, own in held.items():
                    self._seats.setdefault(id(own), []).append((held, name))
        self._groups: dict[int, list[tuple[list[torch.Tensor], int]]] = {}
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                self._groups.setdefault(id(parameter), []).append((group["params"], index))
        slots = [(id(value), state_placement(optimizer, p, key, value)) for p, key, value in _slots(optimizer)]
        self._slots_before = {key: found for key, found in slots if found is not None}

    def run(self) -> None:
        """Moves everything, one tensor after another, so that only one is held twice."""
        while self._tensors:
            key, tensor = next(iter(self._tensors.items()))
            del self._tensors[key]
            new = self._moved_tensor(tensor)
            for held, name in self._seats[key]:
                held[name] = new
            for params, index in self._groups.get(key, ()):
                params[index] = new
            self._move_slots(tensor, new)

    def _moved_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor to go on with: the same where its part keeps its shape."""
        before, after = self._before[id(tensor)], self._after[id(tensor)]
        if before == after:
            return tensor
        part = moved(tensor, before, after)
        gradient = None if tensor.grad is None else moved(tensor.grad, before, after)
        if part.shape == tensor.shape:
            tensor.detach().copy_(part)
            made = tensor
        elif isinstance(tensor, nn.Parameter):
            made = nn.Parameter(part, requires_grad=tensor.requires_grad)
            vars(made).update(vars(tensor))  # marks that users put on parameters
            tensor.grad = None
            retire(tensor)
        else:
            made = part
            vars(made).update(vars(tensor))
        made.grad = gradient
        place(made, after)
        return made

    def _move_slots(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Cuts the optimizer's state of a parameter as the new one is."""
        held = self._optimizer.state.pop(old, None) if id(old) in self._groups else None
        if held is not None:
            for key in held if self._before[id(old)] != self._after[id(old)] else ():
                held[key] = pytree.tree_map(partial(self._moved_slot, key, new), held[key])
            self._optimizer.state[new] = held

    def _moved_slot(self, key: str, new: torch.Tensor, value: Any) -> Any:
        before = self._slots_before.get(id(value))
        after = state_placement(self._optimizer, new, key, new)
        return value if before is None or after is None else moved(value, before, after)


def moved(part: torch.Tensor, before: LocalShard, after: LocalShard) -> torch.Tensor:
    """Returns this rank's part of a tensor that lay as `before` says and will lie as `after` says."""
    if before.dim is None:
        return part.detach() if after.dim is None else after.part(part)
    if after.dim is None:
        return before.full(part)
    if before.dim == after.dim:
        return before.shard_group.redeal(part.detach(), before.dim, before.segments, after.segments).wait()
    return after.part(before.full(part))


def _slots(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
    """Yields the tensors of an optimizer's state, with their parameter and name."""
    state: Mapping[Any, Any] = optimizer.state
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in state.get(parameter, {}).items():
                yield from ((parameter, key, leaf) for leaf in pytree.tree_leaves(value) if torch.is_tensor(leaf))
