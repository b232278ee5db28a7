"""Which tensors of a cut network are guarded, and when: always, but inside this library and an optimizer's step."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from evenly.shards.parts.local_shards import LocalShard, local_shard_of
from evenly.shards.parts.part_tensors import BUFFER, PARAMETER, as_part, as_plain

Apart = list[tuple[torch.Tensor, LocalShard]]


class TrialFlag(threading.local):
    """Whether this thread tries out a copy of an optimizer: what sums over ranks then does nothing."""

    is_on = False

    @contextmanager
    def on(self) -> Iterator[None]:
        """Tries inside."""
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False


trial = TrialFlag()


def apart(tensors: Iterable[torch.Tensor]) -> Apart:
    """Returns the parameters and buffers that are cut over several ranks, with their placements."""
    found = ((tensor, local_shard_of(tensor)) for tensor in tensors)
    cut = [(tensor, own) for tensor, own in found if own is not None and own.is_cut]
    return [
        (tensor, own) for tensor, own in cut if own.shard_group.size > 1 or not own.segments[0]
    ]  # or one without a share


def guard(tensors: Apart) -> None:
    """Has these parameters and buffers, and so their gradients, refuse what their parts cannot give."""
    for tensor, placement in tensors:
        as_part(tensor, placement, PARAMETER if isinstance(tensor, torch.nn.Parameter) else BUFFER)


def unguard(tensors: Iterable[torch.Tensor]) -> None:
    """Has parameters, buffers and their gradients be plain tensors."""
    for tensor in tensors:
        as_plain(tensor)
        if tensor.grad is not None:
            as_plain(tensor.grad)


@contextmanager
def unguarded(tensors: Apart) -> Iterator[None]:
    """Has tensors be plain inside: what this library does with them needs no look."""
    for tensor, _ in tensors:
        as_plain(tensor)
    try:
        yield
    finally:
        guard(tensors)
