"""Shards a network by a layout, after checking that all ranks have the same network and layout."""

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from evenly._torch.tracing import is_constant
from evenly.comm import (
    CollectiveWaiter,
    FailureMonitor,
    RankGroup,
    ShardGroup,
    gather_json,
    open_group,
    open_group_inside,
    report_on_error,
    require_same,
)
from evenly.errors import SpecError
from evenly.graph import Example, Traced, trace_module
from evenly.layouts import TransferCosts, lay_out
from evenly.shards.optim.probe import watch_optimizers
from evenly.shards.parts.local_shards import LocalShard
from evenly.shards.run.cutting import copy_tree, cut_model
from evenly.shards.run.rank_check import mark_uncut, tally_of
from evenly.shards.run.sharded import Sharded
from evenly.spec import Device
from evenly.spec.layout import Layout, check_shares


def shard_model(
    model: nn.Module,
    example: Example,
    *,
    rank_group: RankGroup,
    shares: Sequence[float],
    layer_shares: Mapping[str, Sequence[float]] | None = None,
    cut_batch: bool = False,
    devices: Sequence[Device] | None = None,
    timeout_s: float = 600.0,
) -> Sharded:
    """Returns the module of this rank; all ranks of the group call it with the same network and shares."""
    numbers = check_shares(shares, ranks=rank_group.size)
    traced = trace_module(model, example)
    rates = TransferCosts.of_devices(devices or ())
    layout = lay_out(traced.graph, numbers, rates=rates, layer_shares=layer_shares, cut_batch=cut_batch)
    return join_shards(traced, layout, rank_group=rank_group, devices=devices, timeout_s=timeout_s)


def join_shards(
    traced: Traced,
    layout: Layout,
    *,
    rank_group: RankGroup,
    devices: Sequence[Device] | None = None,
    timeout_s: float = 600.0,
    parent: FailureMonitor | None = None,
) -> Sharded:
    """Returns the module of this rank, cut as the layout says; all ranks start with the weights of rank 0."""
    if layout.graph != traced.graph.fingerprint:
        raise SpecError(
            "the layout was made for another network, or for an example of another shape. Make a plan for this one."
        )
    check_shares(layout.shares, ranks=rank_group.size)
    scoped_group = rank_group.scoped("shards")
    monitor = FailureMonitor(scoped_group, parent=parent)
    with report_on_error(monitor, closes=True):
        return _join(traced, layout, scoped_group, monitor, devices, timeout_s)


def _join(
    traced: Traced,
    layout: Layout,
    scoped_group: RankGroup,
    monitor: FailureMonitor,
    devices: Sequence[Device] | None,
    timeout_s: float,
) -> Sharded:
    waiter = CollectiveWaiter(monitor, label="the start of a network cut over ranks", timeout_s=timeout_s)
    waiter.barrier()
    devices_used = [parameter.device for parameter in traced.model.parameters()]
    device = next((used for used in devices_used if used.type != "cpu"), None)  # the host is always reached
    everybody = open_group_inside(
        scoped_group,
        "everybody",
        range(scoped_group.size),
        devices,
        timeout_s=timeout_s,
        device=device,
        backend="gloo",  # it sends values of the host, too
    )
    require_same(_settings(traced, layout), everybody, waiter)
    seed = gather_json(torch.initial_seed() % (1 << 40) + scoped_group.serial, everybody, waiter)[layout.members[0]]
    all_ranks_group = ShardGroup(everybody, monitor, timeout_s=timeout_s)
    source = layout.members[0]
    if scoped_group.rank not in layout.members:
        alone = open_group(
            scoped_group, f"alone{scoped_group.rank}", [scoped_group.rank], backend="gloo", timeout_s=timeout_s
        )
        return _join_without_share(
            traced, layout, ShardGroup(alone, monitor, timeout_s=timeout_s), all_ranks_group, source
        )
    group = open_group_inside(
        scoped_group,
        "shards",
        layout.members,
        None if devices is None else [devices[rank] for rank in layout.members],
        timeout_s=timeout_s,
        device=device,
    )
    shard_group = ShardGroup(group, monitor, timeout_s=timeout_s)
    local = cut_model(traced, layout, shard_group, broadcast=lambda tensor: all_ranks_group.broadcast(tensor, source))
    mark_uncut(traced.model.parameters(), tally_of(shard_group))
    sharded = Sharded(traced, layout, shard_group, local, seed=seed, all_ranks_group=all_ranks_group, source=source)
    sharded.on_close.append(watch_optimizers())
    return sharded


def example_of(layout: Layout) -> dict[str, torch.Tensor]:
    """Returns meta tensors in the shapes of the example that a layout was made with."""
    dtypes = {tensor.name: getattr(torch, tensor.dtype) for tensor in layout.inputs}
    tensors = {t.name: torch.empty(t.shape, dtype=dtypes[t.name], device="meta") for t in layout.inputs}
    return {t.name: tensors[t.name].requires_grad_(t.has_grad) for t in layout.inputs}


def _join_without_share(
    traced: Traced, layout: Layout, alone: ShardGroup, all_ranks_group: ShardGroup, source: int
) -> Sharded:
    """Returns the module of a rank without a share: it has empty parts and its own group, and receives the outputs."""

    def empty_shard(name: str, tensor: torch.Tensor) -> LocalShard:
        all_ranks_group.broadcast(tensor.detach().clone(memory_format=torch.contiguous_format), source)
        return LocalShard(name, tensor.shape, alone, 0, ((),)) if tensor.ndim else LocalShard(name, tensor.shape, alone)

    sharded = Sharded(
        traced, layout, alone, copy_tree(traced, empty_shard), seed=0, all_ranks_group=all_ranks_group, source=source
    )
    sharded.on_close.append(watch_optimizers())
    return sharded


def _settings(traced: Traced, layout: Layout) -> list[str]:
    """Returns one line for each setting that must be equal on all ranks."""
    lines = [f"shares {list(layout.shares)}"]
    for layer in traced.graph.layers:
        lines.append(f"{layer.kind} {layer.where or layer.name!r}: {layer.model_dump_json()}")
    lines += [f"module {name!r}: {module.extra_repr()}" for name, module in traced.model.named_modules()]
    for name, value in vars(traced.program).items():
        if is_constant(name) and isinstance(value, torch.Tensor):
            lines.append(f"constant {name}: {hashlib.sha256(repr(value.tolist()).encode()).hexdigest()[:16]}")
    programs = {"program": traced.program} | ({"evaluation": traced.evaluation.program} if traced.evaluation else {})
    for name, program in programs.items():
        lines.append(f"{name} {hashlib.sha256(program.code.encode()).hexdigest()[:16]}")
    lines.append(f"layout {hashlib.sha256(layout.model_dump_json().encode()).hexdigest()[:16]}")
    return lines
