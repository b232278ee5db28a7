"""The reducer inside of torch's DistributedDataParallel, which fills buckets with gradients.

The methods are those that DDP calls itself, of torch 2.11 and 2.13.
"""

import inspect
from collections.abc import Sequence
from typing import Any

from torch.nn.parallel import DistributedDataParallel


def without_buffers() -> dict[str, Any]:
    """Returns DDP's argument, whatever its name in this version of torch, that keeps buffers from travelling."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def rebuild_buckets(ddp: DistributedDataParallel) -> None:
    """Lays the buckets out in the order in which gradients came; a collective.

    DDP does it at its second forward, which ranks that never call DDP's forward would not reach together.
    """
    ddp.reducer._rebuild_buckets()


def arm(ddp: DistributedDataParallel) -> Sequence[int]:
    """Has the next backward go through DDP's buckets, and returns when each parameter was last ready, in ns."""
    ddp.reducer.prepare_for_backward([])
    return ready_times(ddp)


def ready_times(ddp: DistributedDataParallel) -> Sequence[int]:
    """Returns when each parameter was last ready, in ns of its backward; public by name, but not documented."""
    times: Sequence[int] = ddp.reducer.get_backward_stats()
    return times


def mark_ready(ddp: DistributedDataParallel, place: int) -> None:
    """Tells the reducer that the parameter at `place` gets no gradient in this backward.

    Raises `RuntimeError` if it was ready before.
    """
    ddp.reducer._autograd_hook(place)  # type: ignore[attr-defined]  # torch's annotations lack it


def remove_hooks(ddp: DistributedDataParallel) -> None:
    """Takes DDP's hooks off the parameters, which may train on without it; DDP does so for torch.compile.

    Nothing else does: DDP would fill buckets as long as the parameters live.
    """
    ddp.reducer._remove_autograd_hooks()
