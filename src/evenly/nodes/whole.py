"""Networks that every rank holds whole: equal inside a node, averaged across nodes slice by slice."""

from collections.abc import Mapping, Sequence
from typing import final

import torch

from evenly.comm import Alarm, Groups, Waiter, all_reduce, broadcast, off_wire, on_wire, slices
from evenly.nodes.cargo import Agreed, Cargo
from evenly.nodes.fingerprint import Fingerprint, fingerprint
from evenly.nodes.flat import TYPES, Flat, flats, travelling_dtype
from evenly.nodes.gradients import NodeGradients
from evenly.nodes.meeting import scale
from evenly.nodes.membership import Quorum
from evenly.nodes.points import Carried, Part, Points
from evenly.nodes.sharing import Sharing
from evenly.nodes.state import Entry, by_slot, state_entries


@final
class WholeSharing(Sharing):
    """Every rank has all of the network."""

    splits_rows = True

    def __init__(self, groups: Groups, alarm: Alarm) -> None:
        self._groups, self._alarm = groups, alarm

    @property
    def is_first(self) -> bool:
        """Whether it is rank 0."""
        return self._groups.party.rank == 0

    @property
    def answers(self) -> bool:
        """Every rank has batches of its own."""
        return True

    def level(self, module: torch.nn.Module, waiter: Waiter) -> None:
        """Broadcasts the state of rank 0."""
        tensors = [*module.parameters(), *module.buffers()]
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            flat = Flat([tensor for tensor in tensors if tensor.dtype == dtype], dtype.to_real())
            scratch = flat.scratch()
            flat.pack(0, flat.total, scratch)
            waiter.wait([broadcast(scratch.view(torch.uint8), self._groups.world, source=0)])
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

    def load(
        self, entries: Mapping[str, Sequence[Entry]], state: Sequence[Entry] = (), *, change: bool = False
    ) -> Cargo:
        """Returns a snapshot of the slices that this rank owns."""
        return _Cargo(self._groups, entries, state, change=change)

    @property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """Every rank by itself."""
        return tuple((place,) for place in range(len(self._groups.ranks)))

    def fingerprint(self, entries: Sequence[Entry]) -> Fingerprint:
        """Returns that of all parameters."""
        return fingerprint({entry.label: entry.tensor for entry in entries})

    def agree_on_largest(self, counters: Mapping[str, torch.Tensor], quorum: Quorum, waiter: Waiter) -> None:
        """Takes the maximum inside the node, then across nodes."""
        tensors = list(counters.values())
        if not sum(tensor.numel() for tensor in tensors):
            return
        flat = Flat(tensors, torch.int64)
        scratch = flat.scratch()
        flat.pack(0, flat.total, scratch)
        largest = on_wire(scratch, self._groups.node)
        waiter.wait([all_reduce(largest, self._groups.node, largest=True)])
        largest = off_wire(largest, scratch.device)
        copies = [on_wire(largest.clone(), peers.group) for peers in quorum.peers]
        waiter.wait([all_reduce(copy, p.group, largest=True) for copy, p in zip(copies, quorum.peers, strict=True)])
        flat.unpack(off_wire(copies[0], scratch.device))

    def close(self, *, failed: bool) -> None:
        """The groups are closed by whoever opened them."""


class _Load:
    """Tensors as one vector, of which this rank brings the slices it owns and gets all."""

    def __init__(
        self, flat: Flat, groups: Groups, *, key: str = "", change: bool = False, entries: Sequence[Entry] = ()
    ) -> None:
        self.flat, self.scratch, self.entries = flat, flat.scratch(), entries
        self.parts = []
        for number, peers in enumerate(groups.peers):
            start, stop = peers.segment.range_of(flat.total)
            if start < stop:
                values = self.scratch[start:stop]
                flat.pack(start, stop, values)
                name = key and f"{key}/{str(flat.dtype).removeprefix('torch.')}/{number}"
                self.parts.append(Part(values, peers.group, name, change))

    def agreed(self) -> list[Agreed]:
        """Returns the entries with what was agreed on for each."""
        tensors = self.flat.tensors
        pieces = torch.split(self.scratch, [tensor.numel() for tensor in tensors])
        each = zip(self.entries, tensors, pieces, strict=True)
        return [Agreed(entry, tensor, piece.view(tensor.shape)) for entry, tensor, piece in each]


@final
class _Cargo(Cargo):
    def __init__(
        self, groups: Groups, entries: Mapping[str, Sequence[Entry]], state: Sequence[Entry], *, change: bool
    ) -> None:
        super().__init__(change=change)
        self._groups = groups
        self._parameters = [
            load for key, chosen in entries.items() for load in _loads(chosen, groups, key=key, change=change)
        ]
        self._slots = [load for entries in by_slot(state) for load in _loads(entries, groups, change=change)]

    @property
    def parts(self) -> list[Part]:
        return [part for load in self._parameters for part in load.parts]

    def carry(
        self, points: Points, moves: Mapping[str, torch.Tensor], quorum: Quorum, waiter: Waiter, *, exact: bool
    ) -> Carried:
        """Averages moves inside the node, then all of it across nodes; then the node shares the slices."""
        moved = flats(list(moves.values()))
        self._average_in_node(moved, quorum, waiter)
        if len(quorum.weights) == 1:
            return Carried()
        buffers = [_Load(flat, self._groups) for flat in moved]
        loads = [*self._parameters, *self._slots, *buffers]
        carried = points.agree([part for load in loads for part in load.parts], quorum, waiter, exact=exact)
        self._share([load.scratch for load in loads], waiter)
        for load in buffers:
            load.flat.unpack(load.scratch)
        return carried

    def agreed(self) -> list[Agreed]:
        return [piece for load in (*self._parameters, *self._slots) for piece in load.agreed()]

    def _average_in_node(self, moved: Sequence[Flat], quorum: Quorum, waiter: Waiter) -> None:
        """Replaces moves by their average over the node's ranks, weighted by their samples."""
        for flat in moved:
            scratch = flat.scratch()
            flat.pack(0, flat.total, scratch)
            scale(scratch, quorum.shares[self._groups.local_rank])
            if len(self._groups.ranks) > 1:
                travelling = on_wire(scratch, self._groups.node)
                waiter.wait([all_reduce(travelling, self._groups.node)])
                scratch = off_wire(travelling, scratch.device)
            flat.unpack(scratch)

    def _share(self, vectors: Sequence[torch.Tensor], waiter: Waiter) -> None:
        """Gives every rank of the node the slices of the others."""
        node = self._groups.node
        if len(self._groups.ranks) == 1:
            return
        travelling = [on_wire(vector, node) for vector in vectors]
        waiter.wait(
            [
                broadcast(vector[start:stop], node, source=owner)
                for vector in travelling
                for owner, (start, stop) in enumerate(slices(self._groups.ranks, vector.numel()))
                if start < stop
            ]
        )
        for vector, arrived in zip(vectors, travelling, strict=True):
            if arrived is not vector:
                vector.copy_(arrived, non_blocking=True)


def _loads(entries: Sequence[Entry], groups: Groups, *, key: str = "", change: bool) -> list[_Load]:
    """Returns the entries as vectors, one for each type they travel in."""
    found = []
    for dtype in TYPES:
        chosen = [entry for entry in entries if travelling_dtype(entry.tensor) == dtype]
        flat = Flat([entry.tensor for entry in chosen], dtype)
        if flat.total:
            found.append(_Load(flat, groups, key=key, change=change, entries=chosen))
    return found
