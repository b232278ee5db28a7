"""The reducer of torch's DistributedDataParallel, which fills buckets with gradients.

DDP itself calls these methods in torch 2.11 and 2.13.
"""

import inspect
from collections.abc import Sequence
from typing import Any

from torch.nn.parallel import DistributedDataParallel


def no_buffer_broadcast() -> dict[str, Any]:
    """Returns the argument of DDP that turns off the broadcast of buffers; its name depends on the version of torch."""
    parameters = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers": False}


def rebuild_buckets(ddp: DistributedDataParallel) -> None:
    """Rebuilds the buckets in the order in which gradients were computed; a collective.

    DDP does it in its second forward, which ranks that never call DDP's forward would not reach together.
    """
    ddp.reducer._rebuild_buckets()


def prepare_backward(ddp: DistributedDataParallel) -> Sequence[int]:
    """Makes the next backward use DDP's buckets; returns when each parameter was last ready, in ns."""
    ddp.reducer.prepare_for_backward([])
    return ready_times(ddp)


def ready_times(ddp: DistributedDataParallel) -> Sequence[int]:
    """Returns when each parameter was last ready, in ns of its backward; public by name, but not documented."""
    times: Sequence[int] = ddp.reducer.get_backward_stats()
    return times


def mark_ready(ddp: DistributedDataParallel, index: int) -> None:
    """Tells the reducer that the parameter at `index` gets no gradient in this backward.

    Raises `RuntimeError` if it was ready before.
    """
    ddp.reducer._autograd_hook(index)  # type: ignore[attr-defined]  # torch's annotations lack it


def remove_hooks(ddp: DistributedDataParallel) -> None:
    """Removes DDP's hooks from the parameters, which may be trained without it; DDP does so for torch.compile.

    Nothing else removes them: DDP would fill buckets as long as the parameters live.
    """
    ddp.reducer._remove_autograd_hooks()
