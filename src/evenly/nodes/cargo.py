"""What one exchange carries, from the snapshot to the merge."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

from evenly.comm import Waiter
from evenly.nodes.membership import Quorum
from evenly.nodes.points import Carried, Part, Points

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # a tensor of the network, and what was agreed on for it


class Cargo(ABC):
    """A snapshot of parameters and of optimizer state, taken when it is made.

    A `change` is for a network that trains on meanwhile: x <- x + (agreed - snapshot).
    """

    def __init__(self, *, change: bool) -> None:
        self.change = change

    @property
    @abstractmethod
    def parts(self) -> list[Part]:
        """What this rank speaks for of the parameters."""

    @abstractmethod
    def carry(
        self, points: Points, moves: Mapping[str, torch.Tensor], quorum: Quorum, waiter: Waiter, *, exact: bool
    ) -> Carried:
        """Lets nodes agree on all of it: on values, or, if it is to be a change, on what is to be added to them.

        `moves`, what batches have added to buffers since the last exchange, become their averages over all batches.
        Nothing of the network is touched: another thread may use it.
        """

    @abstractmethod
    def agreed(self) -> tuple[Pairs, list[Pairs]]:
        """Returns what was agreed on for the parameters, and for each slot of the optimizer's state."""

    def pieces(self) -> list[torch.Tensor]:
        """Returns what was agreed on, in the order in which `put` takes it."""
        parameters, slots = self.agreed()
        return [piece for pairs in (parameters, *slots) for _, piece in pairs]

    def put(self, pieces: Sequence[torch.Tensor]) -> None:
        """Takes over what was agreed on from a checkpoint."""
        for place, piece in zip(self.pieces(), pieces, strict=True):
            place.copy_(piece)

    def unload(self) -> None:
        """Puts what was agreed on into the network and the optimizer, in place."""
        parameters, slots = self.agreed()
        if not self.change:
            _together(torch._foreach_copy_, [pair for pairs in (parameters, *slots) for pair in pairs])
            return
        _together(torch._foreach_add_, parameters)
        for pairs in slots:
            _add_state(pairs)


def _together(act: Callable[..., object], pairs: Pairs) -> None:
    """Lets `act` change all tensors at once, which a GPU does in few launches."""
    if pairs:
        act([tensor for tensor, _ in pairs], [piece for _, piece in pairs])


def _add_state(pairs: Pairs) -> None:
    """Adds in place; a slot that is nowhere below 0, as squares are, stays so."""
    least = [tensor.amin() for tensor, _ in pairs if tensor.numel()]
    if not least:
        return
    floor = torch.where(torch.stack([value.double() for value in least]).amin() >= 0, 0.0, -torch.inf)
    for tensor, piece in pairs:
        tensor.add_(piece)
        torch.maximum(tensor, floor.to(tensor.dtype), out=tensor)
