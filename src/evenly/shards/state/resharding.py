"""Moves units between ranks while a network trains: parameters, gradients, buffers and optimizer state."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from evenly._torch import pytree
from evenly._torch.autograd import has_hooks
from evenly._torch.modules import tensor_tables
from evenly.errors import SpecError
from evenly.shards.optim.optimizers import state_placement
from evenly.shards.parts.guard import unguard
from evenly.shards.parts.local_shards import LocalShard, local_shard_of, retire, set_local_shard
from evenly.shards.run.cutting import parameter_placements, renew_weight_lists
from evenly.shards.run.program import Program
from evenly.shards.run.sharded import Sharded
from evenly.spec.layout import REPLICATED, Layout

OWN_HOOKS = 1  # hooks of this library on a parameter; the new parameter gets them too
NewLocalShard = Callable[[str, LocalShard], LocalShard]  # (name, old local shard) -> new local shard


def immovable(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Returns why units of a network cannot move between ranks; an empty text if they can."""
    for tensor in (*model.parameters(), *model.buffers()):
        if local_shard_of(tensor) is None:
            return "a tensor replaced another after sharding"
    for name, hooked in model.named_parameters():
        if has_hooks(hooked, besides=OWN_HOOKS):
            return f"a hook on {name!r} would be lost"
    for parameter, key, value in _slots(optimizer):
        local_shard = local_shard_of(parameter)
        has_shard = state_placement(optimizer, parameter, key, value) is not None
        if local_shard is not None and local_shard.is_cut and value.numel() != 1 and not has_shard:
            return f"{type(optimizer).__name__}'s {key!r} of {local_shard.name!r} has no rule"
    return ""


@torch.no_grad()
def reshard(model: Sharded, optimizer: torch.optim.Optimizer, layout: Layout) -> None:
    """Cuts a network anew, in place, between two steps; all of its ranks call it together.

    Only indices that change ranks are sent. Parameters whose part changes its size are replaced, in the network and in
    the optimizer; the network computes the same as before.

    Args:
        model: the network.
        optimizer: an optimizer of its parameters; its state moves with them.
        layout: the new layout, over the same ranks.
    """
    if layout.graph != model.layout.graph or layout.members != model.layout.members:
        raise SpecError(
            f"reshard was given a layout for ranks {list(layout.members)}, but the network is cut over ranks "
            f"{list(model.layout.members)}, or is another one. Make a layout for the same network and ranks."
        )
    model._require_open()
    unguard([*model.parameters(), *model.buffers()])
    program = model._program
    if program is not None:
        with model.shard_group.reporting():
            _Move(model, optimizer, _new_local_shards(program, layout)).run()
        model._program = Program(program.traced, layout, model, model.shard_group, model._dropout_stream)
        model._variant_programs.clear()
    model.layout = layout
    model._traced_program.record_local_shards()
    model._agreed_batch = (0, False, 0)


def _new_local_shards(program: Program, layout: Layout) -> NewLocalShard:
    placements = dict(parameter_placements(program.traced, layout))

    def local_shard_for(name: str, old: LocalShard) -> LocalShard:
        placement = placements.get(name, REPLICATED)
        if placement.state != "sharded":
            return LocalShard(old.name, old.shape, old.shard_group)
        return LocalShard(old.name, old.shape, old.shard_group, placement.dim, layout.cuts[placement.cut].segments)

    return local_shard_for


class _Move:
    """Moves all tensors of a network and its optimizer, one after another, in the same order on every rank."""

    def __init__(self, model: Sharded, optimizer: torch.optim.Optimizer, local_shard_for: NewLocalShard) -> None:
        self._model, self._optimizer = model, optimizer
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self._tensors = {id(tensor): tensor for _, tensor in named}
        self._before: dict[int, LocalShard] = {}
        self._after: dict[int, LocalShard] = {}
        for name, tensor in named:
            old = local_shard_of(tensor)
            if old is None:
                raise SpecError(
                    f"reshard needs the local shard of {name!r}, but it has none: it replaced another tensor. "
                    "Shard the network anew."
                )
            self._before[id(tensor)] = old
            new_shard = local_shard_for(name, old)  # of several names of one tensor, any may be the cut one
            if new_shard.is_cut or id(tensor) not in self._after:
                self._after[id(tensor)] = new_shard
        self._tables_of: dict[int, list[tuple[dict[str, torch.Tensor], str]]] = {}
        for module in model.modules():
            for table in tensor_tables(module):
                for name, tensor in table.items():
                    self._tables_of.setdefault(id(tensor), []).append((table, name))
        self._groups: dict[int, list[tuple[list[torch.Tensor], int]]] = {}
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                self._groups.setdefault(id(parameter), []).append((group["params"], index))
        slots = [(id(value), state_placement(optimizer, p, key, value)) for p, key, value in _slots(optimizer)]
        self._slots_before = {key: shard for key, shard in slots if shard is not None}

    def run(self) -> None:
        """Moves all tensors, one at a time, so that only one is in memory twice."""
        while self._tensors:
            key, tensor = next(iter(self._tensors.items()))
            del self._tensors[key]
            new = self._moved_tensor(tensor)
            for table, name in self._tables_of[key]:
                table[name] = new
            for params, index in self._groups.get(key, ()):
                params[index] = new
            self._move_slots(tensor, new)
        renew_weight_lists(self._model)

    def _moved_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the moved tensor: the same object if its part keeps its shape."""
        before, after = self._before[id(tensor)], self._after[id(tensor)]
        if before == after:
            return tensor
        part = moved(tensor, before, after)
        gradient = None if tensor.grad is None else moved(tensor.grad, before, after)
        if part.shape == tensor.shape:
            tensor.detach().copy_(part)
            new = tensor
        elif isinstance(tensor, nn.Parameter):
            new = nn.Parameter(part, requires_grad=tensor.requires_grad)
            vars(new).update(vars(tensor))  # attributes that users set on parameters
            tensor.grad = None
            retire(tensor)
        else:
            new = part
            vars(new).update(vars(tensor))
        new.grad = gradient
        set_local_shard(new, after)
        return new

    def _move_slots(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Cuts the optimizer's state of a parameter as the new one is."""
        entries = self._optimizer.state.pop(old, None) if id(old) in self._groups else None
        if entries is not None:
            for key in entries if self._before[id(old)] != self._after[id(old)] else ():
                entries[key] = pytree.tree_map(partial(self._moved_slot, key, new), entries[key])
            self._optimizer.state[new] = entries

    def _moved_slot(self, key: str, new: torch.Tensor, value: object) -> object:
        before = self._slots_before.get(id(value))
        after = state_placement(self._optimizer, new, key, new)
        if before is None or after is None or not isinstance(value, torch.Tensor):
            return value
        return moved(value, before, after)


def moved(part: torch.Tensor, before: LocalShard, after: LocalShard) -> torch.Tensor:
    """Returns this rank's part after a tensor is redistributed from the cut `before` to the cut `after`."""
    if before.dim is None:
        return part.detach() if after.dim is None else after.part(part)
    if after.dim is None:
        return before.full(part)
    if before.dim == after.dim:
        return before.shard_group.redeal(part.detach(), before.dim, before.segments, after.segments).wait()
    return after.part(before.full(part))


def _slots(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
    """Yields the tensors of an optimizer's state, with their parameter and name."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                yield from ((parameter, key, leaf) for leaf in pytree.tree_leaves(value) if torch.is_tensor(leaf))
