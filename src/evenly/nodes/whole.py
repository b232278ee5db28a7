"""Networks that every rank holds whole: equal inside a node, averaged across nodes slice by slice."""

from collections.abc import Mapping, Sequence
from typing import final

import torch

from evenly.comm import Alarm, Groups, Waiter, broadcast
from evenly.nodes import exchange
from evenly.nodes.flat import Flat
from evenly.nodes.gradients import NodeGradients
from evenly.nodes.membership import Quorum
from evenly.nodes.sharing import Sharing
from evenly.nodes.state import Entry, state_entries


@final
class WholeSharing(Sharing):
    """Every rank has all of the network."""

    def __init__(self, groups: Groups, alarm: Alarm) -> None:
        self._groups, self._alarm = groups, alarm

    def level(self, module: torch.nn.Module, waiter: Waiter) -> None:
        """Broadcasts the state of rank 0."""
        tensors = [*module.parameters(), *module.buffers()]
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            flat = Flat([tensor for tensor in tensors if tensor.dtype == dtype], dtype.to_real())
            scratch = flat.scratch()
            flat.pack(0, flat.total, scratch)
            waiter.wait([broadcast(scratch, self._groups.world, source=0)])
            flat.unpack(scratch)

    def relearn(self, module: torch.nn.Module, waiter: Waiter) -> None:
        """Nothing changes hands where every rank has all."""

    def gradients(self, module: torch.nn.Module, *, find_unused_parameters: bool) -> NodeGradients:
        """Returns torch's DDP on the node's group."""
        return NodeGradients(
            module, self._groups.gradients, alarm=self._alarm, find_unused_parameters=find_unused_parameters
        )

    def state(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Entry]:
        """Returns what has the shape of its parameter."""
        return state_entries(module, optimizer)

    def sizes(self, named: Sequence[tuple[str, torch.Tensor]]) -> list[int]:
        """Returns the elements of each tensor."""
        return [tensor.numel() for _, tensor in named]

    def average(
        self, entries: Sequence[Entry], moves: Mapping[str, torch.Tensor], quorum: Quorum, waiter: Waiter
    ) -> int:
        """Averages moves inside the node, then all of it across nodes."""
        exchange.average_in_node(list(moves.values()), quorum, self._groups, waiter)
        if len(quorum.weights) == 1:
            return 0
        return exchange.average([*(entry.tensor for entry in entries), *moves.values()], quorum, self._groups, waiter)

    def agree_on_largest(self, counters: Mapping[str, torch.Tensor], quorum: Quorum, waiter: Waiter) -> None:
        """Takes the maximum inside the node, then across nodes."""
        exchange.agree_on_largest(list(counters.values()), quorum, self._groups, waiter)

    def close(self) -> None:
        """The groups are closed by whoever opened them."""
