"""Guards the tensors of a cut network, except inside this library and in an optimizer's step."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from evenly.shards.parts.local_shards import LocalShard, local_shard_of
from evenly.shards.parts.part_tensors import BUFFER, PARAMETER, make_part, make_plain

CutTensors = list[tuple[torch.Tensor, LocalShard]]


class TrialMode(threading.local):
    """Whether this thread makes trial steps with a copy of an optimizer. Sums over ranks are then left out."""

    is_on = False

    @contextmanager
    def on(self) -> Iterator[None]:
        """Turns the mode on inside the block."""
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False


trial_mode = TrialMode()


def cut_tensors_of(tensors: Iterable[torch.Tensor]) -> CutTensors:
    """Returns the parameters and buffers that are cut over several ranks, with their local shards."""
    pairs = ((tensor, local_shard_of(tensor)) for tensor in tensors)
    cut = [(tensor, local_shard) for tensor, local_shard in pairs if local_shard is not None and local_shard.is_cut]
    return [
        (tensor, local_shard)
        for tensor, local_shard in cut
        if local_shard.shard_group.size > 1 or not local_shard.segments[0]  # a rank without a share is alone in a group
    ]


def guard(tensors: CutTensors) -> None:
    """Makes these parameters and buffers, and their gradients, raise an error for operations that need full tensors."""
    for tensor, local_shard in tensors:
        make_part(tensor, local_shard, PARAMETER if isinstance(tensor, torch.nn.Parameter) else BUFFER)


def unguard(tensors: Iterable[torch.Tensor]) -> None:
    """Makes parameters, buffers and their gradients plain tensors."""
    for tensor in tensors:
        make_plain(tensor)
        if tensor.grad is not None:
            make_plain(tensor.grad)


@contextmanager
def unguarded(tensors: CutTensors) -> Iterator[None]:
    """Makes tensors plain inside the block: this library's own operations need no guard."""
    for tensor, _ in tensors:
        make_plain(tensor)
    try:
        yield
    finally:
        guard(tensors)
