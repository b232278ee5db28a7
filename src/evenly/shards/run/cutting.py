"""Copies a tree of modules with only this rank's parts of parameters and buffers; the original is unchanged."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from evenly._torch.compiler import COMPILED_CALL, Uncompiled, uncompiled
from evenly._torch.modules import renew_weight_list, replace_tables
from evenly.comm import ShardGroup
from evenly.errors import SpecError
from evenly.graph import MODULE_ATTRIBUTES, Traced
from evenly.shards.parts.local_shards import LocalShard, local_shard_of, set_local_shard
from evenly.shards.run.rebinding import reachable, rebound
from evenly.spec.layout import COPIED, REPLICATED, Layout, TensorPlacement


def parameter_placements(traced: Traced, layout: Layout) -> list[tuple[str, TensorPlacement]]:
    """Returns the placement of each parameter and buffer that a layer reads, with its name in the network."""
    layers = {layer.name: layer for layer in traced.graph.layers}
    sources = {layer.name: layer.where for layer in traced.graph.layers if layer.op in ("parameter", "buffer")}
    placements_by_source: dict[str, TensorPlacement] = {}
    for choice in layout.choices:
        if layers[choice.layer].kind == "source":
            continue
        for name, need in zip(layers[choice.layer].inputs, choice.needs, strict=True):
            if name in sources:
                placements_by_source.setdefault(name, REPLICATED if need == COPIED else need)
    return [(sources[name], placement) for name, placement in placements_by_source.items()]


def cut_model(
    traced: Traced, layout: Layout, shard_group: ShardGroup, *, broadcast: Callable[[torch.Tensor], torch.Tensor]
) -> nn.Module:
    """Returns a copy of the network with this rank's parts; `broadcast` makes full tensors equal on all ranks."""
    placements = parameter_placements(traced, layout)
    names = _names(traced.model)
    placement_by_tensor: dict[int, TensorPlacement] = {}
    for name, placement in placements:
        if placement_by_tensor.setdefault(id(names[name]), placement) != placement:
            tied = sorted(other for other in names if names[other] is names[name])
            raise SpecError(
                f"the weights {tied} are one tensor, but the layers that use it are cut differently. "
                "Untie them before sharding."
            )

    _refuse_cut_in_whole(traced, placement_by_tensor)

    def local_shard_for(name: str, tensor: torch.Tensor) -> LocalShard:
        placement = placement_by_tensor.get(id(tensor), REPLICATED)
        if placement.state != "sharded":
            return LocalShard(name, tensor.shape, shard_group)
        return LocalShard(name, tensor.shape, shard_group, placement.dim, layout.cuts[placement.cut].segments)

    return copy_tree(traced, local_shard_for, broadcast)


def _refuse_cut_in_whole(traced: Traced, placement_by_tensor: Mapping[int, TensorPlacement]) -> None:
    """Raises `SpecError` if a module that is computed whole uses a tensor that another layer needs cut."""
    modules = {node.name for node in traced.program.graph.nodes if node.op == "call_module"}
    for layer in traced.graph.layers:
        if layer.kind != "opaque" or layer.name not in modules:
            continue
        for tensor in reachable(traced.model.get_submodule(layer.where)):
            if placement_by_tensor.get(id(tensor), REPLICATED).state == "sharded":
                name = next((name for name, candidate in _names(traced.model).items() if candidate is tensor), "?")
                raise SpecError(
                    f"the module {layer.where!r} is computed whole ({layer.note}), but uses {name!r}, which another "
                    "layer needs cut. Give it a tensor of its own, or let it be traced."
                )


def refuse_cut_modules(traced: Traced, network: nn.Module) -> None:
    """Raises `SpecError` if a trace calls a module as it is, but its parameters are cut in `network`."""
    for node in traced.program.graph.nodes:
        layer = (
            next((x for x in traced.graph.layers if x.name == node.name), None) if node.op == "call_module" else None
        )
        if layer is None or layer.kind != "opaque":
            continue
        for tensor in reachable(network.get_submodule(layer.where)):
            shard = local_shard_of(tensor)
            if shard is not None and shard.is_cut:
                raise SpecError(
                    f"the network was called in another mode, or with inputs of other sizes, than those it was cut by. "
                    f"The module {layer.where!r} is then computed whole ({layer.note}), but its {shard.name!r} is cut. "
                    "Shard the network with an example of these sizes, or let the module be traced."
                )


def copy_tree(
    traced: Traced,
    local_shard_for: Callable[[str, torch.Tensor], LocalShard],
    broadcast: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> nn.Module:
    """Returns a copy of a network with every tensor replaced by its part; shared modules and tensors stay shared."""

    def part(name: str, tensor: torch.Tensor) -> torch.Tensor:
        local_shard = local_shard_for(name, tensor)
        full = tensor
        if broadcast is not None:
            full = broadcast(tensor.detach().clone(memory_format=torch.contiguous_format))
        piece = local_shard.part(full)
        if isinstance(tensor, nn.Parameter):
            piece = nn.Parameter(piece, requires_grad=tensor.requires_grad)
        vars(piece).update(vars(tensor))  # attributes that users set on parameters
        set_local_shard(piece, local_shard)
        return piece

    copy = _copied(traced.model, part)
    for name, module in copy.named_modules():
        module.training = traced.modes[name]  # another thread may be tracing the same network
    renew_weight_lists(copy)
    return copy


def renew_weight_lists(model: nn.Module) -> None:
    """Makes recurrent modules of a cut network refer to their present parts of the weights."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            shards = [local_shard_of(parameter) for parameter in module.parameters()]
            renew_weight_list(module, is_cut=any(shard is not None and shard.is_cut for shard in shards))


def meta_tree(model: nn.Module, local_shards_of: Mapping[str, LocalShard | None], trainable: set[str]) -> nn.Module:
    """Returns a copy of a cut network with full meta tensors; all other attributes are unchanged."""

    def full(name: str, tensor: torch.Tensor) -> torch.Tensor:
        local_shard = local_shards_of.get(name)
        meta_tensor = torch.empty(
            tensor.shape if local_shard is None else local_shard.shape, dtype=tensor.dtype, device="meta"
        )
        return (
            nn.Parameter(meta_tensor, requires_grad=name in trainable)
            if isinstance(tensor, nn.Parameter)
            else meta_tensor
        )

    return _copied(model, full)


def _copied(model: nn.Module, replace_tensor: Callable[[str, torch.Tensor], torch.Tensor]) -> nn.Module:
    """Returns a copy of a tree of modules with every tensor replaced; references into the tree lead to the copy."""
    tensors: dict[int, torch.Tensor] = {}  # the copy of each, by the identity of the original
    modules: dict[int, nn.Module] = {}

    def replaced(name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in tensors:
            tensors[id(tensor)] = replace_tensor(name, tensor)
        return tensors[id(tensor)]

    def copied(module: nn.Module, prefix: str) -> nn.Module:
        if id(module) in modules:
            return modules[id(module)]
        kind = type(module) if uncompiled(module) is module else Uncompiled
        copy = modules[id(module)] = object.__new__(kind)
        copy.__dict__ = {name: value for name, value in module.__dict__.items() if name != COMPILED_CALL}
        replace_tables(
            copy,
            tensor=lambda name, tensor: replaced(prefix + name, tensor),
            child=lambda name, child: copied(child, f"{prefix}{name}.") if child is not None else None,
        )
        if getattr(copy, "inplace", False):
            copy.__dict__["inplace"] = False
        return copy

    root = copied(model, "")
    copies: dict[int, nn.Module | torch.Tensor] = {**tensors, **modules}
    for module in root.modules():
        for name, value in list(vars(module).items()):
            if name not in MODULE_ATTRIBUTES:
                is_result = isinstance(value, torch.Tensor) and not value.is_leaf  # stored by a forward
                vars(module)[name] = value.detach() if is_result else rebound(value, copies)
    return root


def _names(model: nn.Module) -> Mapping[str, torch.Tensor]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return parameters | dict(model.named_buffers(remove_duplicate=False))
