"""Networks that torch holds sharded inside a node: FSDP2 (`fully_shard`), or DTensors by hand (tensor parallelism)."""

from itertools import pairwise
from typing import TYPE_CHECKING
from weakref import ref

import torch

from evenly._torch.dtensor import fsdp_modules, is_dtensor, mesh_group, shard_dim_of
from evenly.comm import (
    CollectiveWaiter,
    FailureMonitor,
    LocalShard,
    ShardGroup,
    open_group_inside,
    rank_group_of,
    report_on_error,
    set_local_shard,
)
from evenly.errors import SpecError
from evenly.spec.layout import Segments

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class TorchShards:
    """How DTensors of a network lie over the ranks of their mesh, for exchanges and checkpoints.

    Gradients inside the mesh are torch's business. With FSDP each rank has its own batch, and so its own buffers; with
    tensor parallelism by hand the ranks of the mesh are given the same batch.
    """

    def __init__(self, module: torch.nn.Module, shard_group: ShardGroup) -> None:
        self.shard_group = shard_group
        self.fsdp_modules = fsdp_modules(module)
        for name, parameter in module.named_parameters():
            set_local_shard(parameter, _placement(name, parameter, shard_group))
        for name, buffer in module.named_buffers():
            if is_dtensor(buffer) or not self.has_own_batches:
                set_local_shard(buffer, _placement(name, buffer, shard_group))
        self._hooks = [
            part.register_load_state_dict_pre_hook(_ReshardHook(self)) for part in module.modules() if self.fsdp_modules
        ]

    @property
    def has_own_batches(self) -> bool:
        """Whether each rank has a batch of its own."""
        return bool(self.fsdp_modules)

    def reshard(self) -> None:
        """Lets the modules of FSDP hold their parameters as shards again, which they gather for a forward."""
        for module in self.fsdp_modules:
            module.reshard()

    def close(self) -> None:
        """Removes the hooks, and closes the group of the mesh."""
        for hook in self._hooks:
            hook.remove()
        self.shard_group.close()


class _ReshardHook:
    """Reshards a network before `load_state_dict` writes into it or a submodule."""

    def __init__(self, owner: TorchShards) -> None:
        self._owner = ref(owner)

    def __call__(self, module: torch.nn.Module, *args: object) -> None:
        if (owner := self._owner()) is not None:
            owner.reshard()


def open_torch_shards(
    module: torch.nn.Module, *, timeout_s: float, parent: FailureMonitor | None = None
) -> TorchShards | None:
    """Returns how the DTensors of `module` lie; None if it has none. All ranks of their mesh call it together."""
    for part in fsdp_modules(module):
        part.reshard()
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    meshes = {tensor.device_mesh: name for name, tensor in named.items() if is_dtensor(tensor)}
    if not meshes:
        return None
    mesh, *others = meshes
    if mesh.ndim > 1:
        raise SpecError(
            f"{meshes[mesh]!r} is a DTensor on a mesh of {mesh.ndim} dims, {tuple(mesh.shape)}; synchronize averages "
            "networks that are sharded over one dim inside a node. Give fully_shard or parallelize_module the mesh of "
            "one node, mesh['gpu']; exchanges take the place of the other dims."
        )
    if any(_ranks(other) != _ranks(mesh) for other in others):
        raise SpecError(
            f"{meshes[mesh]!r} lies on the ranks {_ranks(mesh)} and {meshes[others[0]]!r} on {_ranks(others[0])}; "
            "synchronize needs one mesh for all parameters. Shard the whole network over the same ranks."
        )
    _require_sharded_whole(module, named)
    inside = rank_group_of(mesh_group(mesh), timeout_s=timeout_s).scoped("synchronize")
    monitor = FailureMonitor(inside, parent=parent)
    with report_on_error(monitor, closes=True):
        CollectiveWaiter(monitor, label="synchronize, on the ranks of a mesh", timeout_s=timeout_s).barrier()
        group = open_group_inside(inside, "mesh", range(inside.size), None, timeout_s=timeout_s)
        return TorchShards(module, ShardGroup(group, monitor, timeout_s=timeout_s))


def _require_sharded_whole(module: torch.nn.Module, named: dict[str, torch.Tensor]) -> None:
    """Raises `SpecError` for trained parameters that FSDP leaves out: it would not average their gradients."""
    if not fsdp_modules(module):
        return
    for name, tensor in named.items():
        if tensor.requires_grad and not is_dtensor(tensor):
            raise SpecError(
                f"the network has modules of FSDP, but its parameter {name!r} is in none of them, so that nobody would "
                "average its gradients inside the node. Call fully_shard on the whole network, too, after its parts."
            )


def _ranks(mesh: "DeviceMesh") -> list[int]:
    return list(map(int, mesh.mesh.flatten().tolist()))


def _placement(name: str, tensor: torch.Tensor, shard_group: ShardGroup) -> LocalShard:
    if not is_dtensor(tensor):
        return LocalShard(name, tensor.shape, shard_group)
    try:
        dim = shard_dim_of(tensor)
    except ValueError as error:
        raise SpecError(
            f"{name!r} is a DTensor placed as {error}; exchanges need one that is whole, or divided along a dim, on "
            "each rank: Replicate() or Shard(dim)."
        ) from None
    if dim is None:
        return LocalShard(name, tensor.shape, shard_group)
    segments = chunks(tensor.shape[dim], shard_group.size)
    return LocalShard(name, tensor.shape, shard_group, dim, segments)


def chunks(length: int, ranks: int) -> tuple[Segments, ...]:
    """Returns the indices of each rank as DTensor divides them, like `torch.chunk`; the last ranks may have none.

    >>> chunks(5, 4)
    (((0, 2),), ((2, 4),), ((4, 5),), ())
    """
    size = -(-length // ranks)
    borders = [min(length, rank * size) for rank in range(ranks + 1)]
    return tuple(((start, stop),) if start < stop else () for start, stop in pairwise(borders))
