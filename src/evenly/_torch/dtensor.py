"""DTensors, and modules of FSDP2 (`fully_shard`), which hold their parameters as DTensors.

Private names, the same in torch 2.11 and 2.13 unless noted: `DTensor._local_tensor` (`to_local()` makes another object
at each call, and takes part in autograd), `FSDPModule._get_fsdp_state()`, `_fsdp_param_groups` of the state (2.11 has
one group at most, `_fsdp_param_group`), `_reduce_scatter_comm` of a group, which `set_custom_reduce_scatter` sets and
nothing reads, and `fsdp_params` of a group, with what each keeps of gradients that are not reduced yet.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

__all__ = [
    "ScaledReduceScatter",
    "are_scaled",
    "fsdp_modules",
    "is_dtensor",
    "local_part",
    "mesh_group",
    "placed_like",
    "redistributed_like",
    "scale_reduce_scatters",
    "shard_dim_of",
    "unsharded_gradients",
]

PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_dtensor(tensor: torch.Tensor) -> "TypeGuard[DTensor]":
    """Returns whether a tensor is a DTensor; does not import them where nothing else has."""
    if type(tensor) in PLAIN:
        return False
    library = sys.modules.get("torch.distributed.tensor")
    return library is not None and isinstance(tensor, library.DTensor)


def local_part(tensor: "DTensor") -> torch.Tensor:
    """Returns this rank's part: the memory itself, and one object as long as it is not replaced."""
    return tensor._local_tensor


def placed_like(like: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Returns `full`, which every rank has, placed like `like` if that is a DTensor; sends nothing."""
    if not is_dtensor(like) or is_dtensor(full):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def shard_dim_of(tensor: "DTensor") -> int | None:
    """Returns the dim that is divided over the ranks of the mesh; None if each has all of it.

    Raises:
        ValueError: naming the placement, for one that is not a part or a copy of the whole tensor.
    """
    from torch.distributed.tensor import Replicate, Shard

    (placement,) = tensor.placements
    if isinstance(placement, Replicate):
        return None
    if type(placement) is not Shard:
        raise ValueError(repr(placement))
    return placement.dim % max(tensor.ndim, 1)


def mesh_group(mesh: "DeviceMesh") -> dist.ProcessGroup:
    """Returns the process group of a mesh of one dim."""
    return mesh.get_group()


def fsdp_modules(module: torch.nn.Module) -> "list[FSDPModule]":
    """Returns the modules in it that `fully_shard` was called with."""
    library = sys.modules.get("torch.distributed.fsdp")
    if library is None:
        return []
    return [part for part in module.modules() if isinstance(part, library.FSDPModule)]


class ScaledReduceScatter:
    """The reduce-scatter of an FSDP module, of this rank's gradients times `factor()`.

    FSDP's own factor cannot differ between ranks: for some dtypes it is applied to the sum.
    """

    def __init__(self, inner: Any, factor: Callable[[], float], count: Callable[[int], None]) -> None:
        self.inner = inner
        self._factor, self._count = factor, count

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns memory for what is sent."""
        tensor: torch.Tensor = self.inner.allocate(*args, **kwargs)
        return tensor

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Scales the input, which is a copy of the gradients, and starts the collective."""
        factor = self._factor()
        if factor == 0:
            input_tensor.zero_()  # 0 * NaN would not be 0
        elif factor != 1:
            input_tensor.mul_(factor)
        self._count(input_tensor.nbytes - output_tensor.nbytes)
        work: dist.Work | None = self.inner(
            output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op
        )
        return work


def scale_reduce_scatters(
    modules: "Iterable[FSDPModule]", factor: Callable[[], float], count: Callable[[int], None]
) -> Callable[[], None]:
    """Scales what each rank gives to the reduce-scatters of these modules; returns a function that ends it.

    `count` is called with the bytes that each sends to other ranks.
    """
    groups = [group for module in modules for group in _parameter_groups(module)]
    for group in groups:
        group._reduce_scatter_comm = ScaledReduceScatter(group._reduce_scatter_comm, factor, count)

    def restore() -> None:
        for group in groups:
            if isinstance(group._reduce_scatter_comm, ScaledReduceScatter):
                group._reduce_scatter_comm = group._reduce_scatter_comm.inner

    return restore


def are_scaled(modules: "Iterable[FSDPModule]") -> bool:
    """Returns whether the reduce-scatters of these modules are still those that were put there."""
    groups = (group for module in modules for group in _parameter_groups(module))
    return all(isinstance(group._reduce_scatter_comm, ScaledReduceScatter) for group in groups)


def unsharded_gradients(modules: "Iterable[FSDPModule]") -> list[torch.Tensor]:
    """Returns the gradients that FSDP keeps for a later reduce-scatter."""
    kept = []
    for group in (group for module in modules for group in _parameter_groups(module)):
        for parameter in group.fsdp_params:
            unsharded = getattr(parameter, "_unsharded_param", None)
            kept += [parameter.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad]
    return [gradient for gradient in kept if gradient is not None]


def redistributed_like(like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a DTensor placed like another one; all ranks of their mesh call it together if it is not yet."""
    if not is_dtensor(like) or not is_dtensor(tensor) or tensor.placements == like.placements:
        return tensor
    return tensor.redistribute(placements=like.placements)


def _parameter_groups(module: "FSDPModule") -> Iterator[Any]:
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return (group for group in groups if group is not None)
