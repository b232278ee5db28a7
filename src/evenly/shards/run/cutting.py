"""The tree of modules with only this rank's parts of parameters and buffers; the network given stays as it is."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from evenly._torch.modules import replace_tables
from evenly.comm import ShardGroup
from evenly.errors import SpecError
from evenly.graph import OF_TORCH, Traced
from evenly.shards.parts.local_shards import LocalShard, place
from evenly.shards.run.rebinding import reachable, rebound
from evenly.spec.layout import COPIED, REPLICATED, Layout, TensorPlacement


def homes(traced: Traced, layout: Layout) -> list[tuple[str, TensorPlacement]]:
    """Returns the state in which each parameter and buffer lives, with its name in the network."""
    layers = {layer.name: layer for layer in traced.graph.layers}
    sources = {layer.name: layer.where for layer in traced.graph.layers if layer.op in ("parameter", "buffer")}
    found: dict[str, TensorPlacement] = {}
    for choice in layout.choices:
        if layers[choice.layer].kind == "source":
            continue
        for name, need in zip(layers[choice.layer].inputs, choice.needs, strict=True):
            if name in sources:
                found.setdefault(name, REPLICATED if need == COPIED else need)
    return [(sources[name], record) for name, record in found.items()]


def cut_model(
    traced: Traced, layout: Layout, shard_group: ShardGroup, *, share: Callable[[torch.Tensor], torch.Tensor]
) -> nn.Module:
    """Returns a copy of the network that holds this rank's parts; `share` gives every rank the same full tensor."""
    records = homes(traced, layout)
    names = _names(traced.model)
    known: dict[int, TensorPlacement] = {}
    for name, record in records:
        if known.setdefault(id(names[name]), record) != record:
            tied = sorted(other for other in names if names[other] is names[name])
            raise SpecError(
                f"the weights {tied} are one tensor, but the layers that use it are cut in ways that do not agree. "
                "Untie them before sharding."
            )

    _refuse_cut_in_whole(traced, known)

    def placed(name: str, tensor: torch.Tensor) -> LocalShard:
        record = known.get(id(tensor), REPLICATED)
        if record.state != "sharded":
            return LocalShard(name, tensor.shape, shard_group)
        return LocalShard(name, tensor.shape, shard_group, record.dim, layout.cuts[record.cut].segments)

    return copy_tree(traced, placed, share)


def _refuse_cut_in_whole(traced: Traced, known: Mapping[int, TensorPlacement]) -> None:
    """Raises `SpecError` if a module that is computed whole would see a part of a tensor that another one has cut."""
    modules = {node.name for node in traced.program.graph.nodes if node.op == "call_module"}
    for layer in traced.graph.layers:
        if layer.op != "opaque" or layer.name not in modules:
            continue
        for tensor in reachable(traced.model.get_submodule(layer.where)):
            if known.get(id(tensor), REPLICATED).state == "sharded":
                name = next((name for name, own in _names(traced.model).items() if own is tensor), "?")
                raise SpecError(
                    f"the module {layer.where!r} is computed whole ({layer.note}), but uses {name!r}, which another "
                    "layer needs cut. Give it a tensor of its own, or let it be traced."
                )


def copy_tree(
    traced: Traced,
    placed: Callable[[str, torch.Tensor], LocalShard],
    share: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> nn.Module:
    """Returns a copy of a network with every tensor replaced by its part; shared modules and tensors stay shared."""

    def part(name: str, tensor: torch.Tensor) -> torch.Tensor:
        placement = placed(name, tensor)
        full = tensor.detach().clone(memory_format=torch.contiguous_format) if share is not None else tensor
        piece = placement.part(share(full) if share is not None else full)
        if isinstance(tensor, nn.Parameter):
            piece = nn.Parameter(piece, requires_grad=tensor.requires_grad)
        vars(piece).update(vars(tensor))  # marks that users put on parameters
        place(piece, placement)
        return piece

    made = _copied(traced.model, part)
    for name, module in made.named_modules():
        module.training = traced.modes[name]  # another thread may be tracing the same network
    return made


def hollow_tree(model: nn.Module, local_shards_of: Mapping[str, LocalShard | None], trainable: set[str]) -> nn.Module:
    """Returns a copy of a network of parts with full tensors that have no data, and with all attributes as they are."""

    def full(name: str, tensor: torch.Tensor) -> torch.Tensor:
        placement = local_shards_of.get(name)
        made = torch.empty(tensor.shape if placement is None else placement.shape, dtype=tensor.dtype, device="meta")
        return nn.Parameter(made, requires_grad=name in trainable) if isinstance(tensor, nn.Parameter) else made

    return _copied(model, full)


def _copied(model: nn.Module, part: Callable[[str, torch.Tensor], torch.Tensor]) -> nn.Module:
    """Returns a copy of a tree of modules with every tensor replaced; what refers into the tree refers to the copy."""
    copies: dict[int, Any] = {}

    def replaced(name: str, tensor: torch.Tensor | None) -> Any:
        if tensor is not None and id(tensor) not in copies:
            copies[id(tensor)] = part(name, tensor)
        return None if tensor is None else copies[id(tensor)]

    def copied(module: nn.Module, prefix: str) -> nn.Module:
        if id(module) in copies:
            found: nn.Module = copies[id(module)]
            return found
        made = copies[id(module)] = object.__new__(type(module))
        made.__dict__ = dict(module.__dict__)
        replace_tables(
            made,
            tensor=lambda name, tensor: replaced(prefix + name, tensor),
            child=lambda name, child: copied(child, f"{prefix}{name}.") if child is not None else None,
        )
        if getattr(made, "inplace", False):
            made.__dict__["inplace"] = False
        return made

    root = copied(model, "")
    for module in root.modules():
        for name, value in list(vars(module).items()):
            if name not in OF_TORCH:
                is_result = isinstance(value, torch.Tensor) and not value.is_leaf  # kept by a forward
                vars(module)[name] = value.detach() if is_result else rebound(value, copies)
    return root


def _names(model: nn.Module) -> Mapping[str, torch.Tensor]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return parameters | dict(model.named_buffers(remove_duplicate=False))
