"""Networks cut over the ranks of replicas, each in its own way: what is averaged meets in global coordinates."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import final

import torch

from evenly.comm import Alarm, Groups, Waiter, Wire, placement_of
from evenly.nodes.cargo import Agreed, Cargo
from evenly.nodes.cut_gradients import ReplicaGradients
from evenly.nodes.fingerprint import Fingerprint, placed_fingerprint
from evenly.nodes.flat import real, travelling_dtype
from evenly.nodes.meeting import Items, Meeting, Open
from evenly.nodes.membership import Quorum
from evenly.nodes.points import Carried, Part, Points
from evenly.nodes.replicas import Replica, Shape, find_replicas, full_shapes, named_tensors
from evenly.nodes.sharing import Sharing
from evenly.nodes.state import Entry, StatePlacement, by_slot, state_entries
from evenly.spec import Exchange


@final
class CutSharing(Sharing):
    """Groups of ranks hold the network together; a node has one such replica or several."""

    splits_rows = False  # a rank's rows are not those of the full tensor

    def __init__(
        self,
        groups: Groups,
        alarm: Alarm,
        *,
        wire: Wire | None,
        joint: bool,
        open_group: Open,
        settings: Exchange,
        state_placement: StatePlacement | None,
    ) -> None:
        self._groups, self._alarm, self._wire, self._joint = groups, alarm, wire, joint
        self._open, self._settings, self._state_placement = open_group, settings, state_placement
        self._meetings: list[Meeting] = []
        self._live: ReplicaGradients | None = None
        self._learned = 0
        if wire is not None:
            wire.alarm.follow(alarm)  # who waits in a layer hears what the other nodes say

    @property
    def is_first(self) -> bool:
        """Whether rank 0 is in the same replica."""
        return 0 in self._replica.everybody

    @property
    def answers(self) -> bool:
        """Whether it is the first rank of its replica."""
        return self._groups.party.rank == self._replica.ranks[0]

    def level(self, module: torch.nn.Module, waiter: Waiter) -> None:
        """Learns how all replicas are cut, and takes over the state of rank 0's replica."""
        self._learn(module, waiter)
        own = self._nodes[self._groups.index]
        items = [(name, tensor.detach().clone()) for name, tensor in named_tensors(module).items()]
        self.inside.reduce(items, waiter, weight=float(self._replica is own[0]), kind="copy")
        self.across.reduce(items, waiter, weight=float(0 in self._groups.ranks), kind="copy")
        self.across.spread(items, waiter)
        for (_, value), tensor in zip(items, named_tensors(module).values(), strict=True):
            tensor.copy_(value)

    def relearn(self, module: torch.nn.Module, waiter: Waiter) -> None:
        """Learns how replicas are cut now; their parts have new places."""
        for meeting in self._meetings:
            meeting.close()
        self._meetings = []
        self._learn(module, waiter)
        if self._live is not None:
            self._live.follow(self._gradients)

    def _learn(self, module: torch.nn.Module, waiter: Waiter) -> None:
        rank = self._groups.party.rank
        self._learned += 1
        self._nodes = find_replicas(module, self._groups, waiter)
        self._shapes = full_shapes(module)
        own = self._nodes[self._groups.index]
        self._replica = next(replica for replica in own if rank in replica.everybody)
        trained = {name: self._shapes[name] for name, _ in module.named_parameters()}
        everywhere = [replica for node in self._nodes for replica in node]
        self._sharing = tuple(everywhere) if self._joint else own
        shared = [[replica] for replica in self._sharing]
        self._gradients = self._meet("gradients", shared, trained, spreads=len(shared) > 1)
        self.inside = self._meet("inside", [[replica] for replica in own], self._shapes, spreads=False)
        self.across = self._meet("across", self._nodes, self._shapes, spreads=True)

    def gradients(self, module: torch.nn.Module, *, find_unused_parameters: bool) -> ReplicaGradients:
        """Returns what averages over the replicas of the node."""
        self._live = ReplicaGradients(
            module,
            self._gradients,
            self._groups.gradients,
            ranks=tuple(range(self._groups.party.size)) if self._joint else self._groups.ranks,
            replicas=self._sharing,
            alarm=self._alarm,
            timeout_s=self._settings.timeout_s,
        )
        return self._live

    def state(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Entry]:
        """Returns what lies as its parameter does."""
        return state_entries(module, optimizer, self._state_placement)

    def sizes(self, named: Sequence[tuple[str, torch.Tensor]]) -> list[int]:
        """Returns the elements of the full tensors."""
        return [prod(self._shapes[name]) for name, _ in named]

    def load(
        self,
        entries: Mapping[str, Sequence[Entry]],
        state: Sequence[Entry] = (),
        *,
        change: bool = False,
    ) -> Cargo:
        """Returns a snapshot of what this rank holds."""
        return _Cargo(self, entries, state, change=change)

    def carry_moves(self, moves: Mapping[str, torch.Tensor], quorum: Quorum, waiter: Waiter) -> Items:
        """Returns moves of buffers averaged over the replicas of the node."""
        scratch = [(name, _travelling(move)) for name, move in moves.items()]
        self.inside.reduce(scratch, waiter, weight=self._share(quorum))
        return scratch

    @property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each replica of the node."""
        place = self._groups.ranks.index
        return tuple(tuple(place(rank) for rank in replica.ranks) for replica in self._nodes[self._groups.index])

    def fingerprint(self, entries: Sequence[Entry]) -> Fingerprint:
        """Returns this rank's part of that of its replica."""
        speaks = self._groups.party.rank == self._replica.ranks[0]
        placed = {entry.label: (entry.tensor, placement_of(entry.tensor)) for entry in entries}
        return placed_fingerprint(placed, speaks=speaks)

    def agree_on_largest(self, counters: Mapping[str, torch.Tensor], quorum: Quorum, waiter: Waiter) -> None:
        """Takes the maximum over the replicas of the node, then across nodes."""
        scratch = [(name, counter.long()) for name, counter in counters.items()]
        self.inside.reduce(scratch, waiter, kind="max")
        self.across.reduce(scratch, waiter, kind="max")
        self.across.spread(scratch, waiter)
        self.apply(scratch, list(counters.values()))

    def close(self, *, failed: bool) -> None:
        """Shuts the groups of all meetings down."""
        if self._wire is not None:
            self._wire.alarm.leave(self._alarm)
        for meeting in self._meetings:
            meeting.close(failed=failed)

    def _meet(
        self, name: str, sides: Sequence[Sequence[Replica]], shapes: Mapping[str, Shape], *, spreads: bool
    ) -> Meeting:
        rank = self._groups.party.rank
        meeting = Meeting(f"{name}{self._learned}", sides, shapes, rank=rank, open_group=self._open, spreads=spreads)
        self._meetings.append(meeting)
        return meeting

    def _share(self, quorum: Quorum) -> float:
        """Returns the part of the node's samples that this rank's replica had; its first rank answers for them."""
        of_rank = dict(zip(self._groups.ranks, quorum.shares, strict=True))
        own = self._nodes[self._groups.index]
        total = sum(of_rank[replica.ranks[0]] for replica in own)
        return of_rank[self._replica.ranks[0]] / total

    @property
    def is_alone(self) -> bool:
        """Whether one replica is all there is."""
        return len(self._nodes) == len(self._nodes[0]) == 1

    @staticmethod
    def apply(scratch: Items, tensors: Sequence[torch.Tensor]) -> None:
        """Copies what has travelled into tensors, in place."""
        for (_, value), tensor in zip(scratch, tensors, strict=True):
            real(tensor).copy_(value)


@final
class _Cargo(Cargo):
    def __init__(
        self, sharing: CutSharing, entries: Mapping[str, Sequence[Entry]], state: Sequence[Entry], *, change: bool
    ) -> None:
        super().__init__(change=change)
        self._sharing = sharing
        self._entries = [entry for chosen in entries.values() for entry in chosen]
        self._slots = by_slot(state)
        self._items: list[tuple[str, torch.Tensor]] = []
        self._bundles = []
        for key, chosen in entries.items():
            items = [(entry.home, _travelling(entry.tensor)) for entry in chosen]
            self._items += items
            self._bundles += sharing.across.bundles(items, key=key, change=change)
        self._slot_items = [[(entry.home, _travelling(entry.tensor)) for entry in slot] for slot in self._slots]
        self._slot_bundles = [b for items in self._slot_items for b in sharing.across.bundles(items, change=change)]

    @property
    def parts(self) -> list[Part]:
        return [bundle.part for bundle in self._bundles]

    def carry(
        self, points: Points, moves: Mapping[str, torch.Tensor], quorum: Quorum, waiter: Waiter, *, exact: bool
    ) -> Carried:
        """Averages moves over the replicas of the node, then all of it across nodes, in global coordinates."""
        sharing = self._sharing
        if sharing.is_alone:
            return Carried()
        scratch = sharing.carry_moves(moves, quorum, waiter)
        bundles = [*self._bundles, *self._slot_bundles, *sharing.across.bundles(scratch)]
        carried = points.agree([bundle.part for bundle in bundles], quorum, waiter, exact=exact)
        for bundle in bundles:
            bundle.unpack()
        slots = [item for items in self._slot_items for item in items]
        sharing.across.spread([*self._items, *slots, *scratch], waiter)
        sharing.apply(scratch, list(moves.values()))
        return carried

    def agreed(self) -> list[Agreed]:
        entries = [*self._entries, *(entry for slot in self._slots for entry in slot)]
        items = [*self._items, *(item for items in self._slot_items for item in items)]
        return [Agreed(entry, real(entry.tensor), value) for entry, (_, value) in zip(entries, items, strict=True)]


def _travelling(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy as it travels."""
    return real(tensor).to(travelling_dtype(tensor), copy=True)
