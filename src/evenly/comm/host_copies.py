"""Host copies of GPU tensors for process groups that only send from host memory."""

import torch

from evenly._torch.process_groups import backend_name
from evenly.comm.groups import Group
from evenly.comm.memory.group import MemoryGroup


def to_host(tensor: torch.Tensor, group: Group, *, filled: bool = True) -> torch.Tensor:
    """Returns `tensor` where the group can send it: itself, or a pinned copy on the host for a GPU behind gloo.

    It waits only for the current stream, so other streams of the device keep running. A rank that only receives needs
    no `filled` copy.
    """
    if not tensor.is_cuda or _serves(group, tensor):
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    if not filled:
        return copy
    copy.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(tensor.device))
    done.synchronize()
    return copy


def to_device(received: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns `received` on `device`."""
    return received if received.device == device else received.to(device, non_blocking=True)


def _serves(group: Group, tensor: torch.Tensor) -> bool:
    if isinstance(group, MemoryGroup):
        return group.place(tensor) is not None
    return backend_name(group, "cuda") == "nccl"
