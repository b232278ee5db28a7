"""How ranks average with each other: who holds what, who speaks for what, and one exchange of it across nodes."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import final

import torch
import torch.distributed as dist

from evenly.comm import CollectiveWaiter, FailureMonitor, Groups, ShardGroup, broadcast, local_shard_of
from evenly.comm.blocks.reducer import BlockReducer, Open, Ranks
from evenly.comm.blocks.replicas import ReplicaRanks, find_replicas, full_shapes, named_tensors, whole_replicas
from evenly.exchange.anchors import Anchors, TransferStats
from evenly.exchange.membership import Quorum
from evenly.exchange.payload import Packed, Payload
from evenly.exchange.tensors.buffer_policies import policies_of
from evenly.exchange.tensors.fingerprint import Fingerprint, fingerprint, placed_fingerprint
from evenly.exchange.tensors.flat import TYPES, Flat, travelling_dtype
from evenly.exchange.tensors.optimizer_state import StateEntry, StatePlacement, by_slot, state_entries
from evenly.gradients.base import Gradients
from evenly.gradients.node import NodeGradients
from evenly.gradients.replica import ReplicaGradients
from evenly.spec import Exchange


@final
class ReplicaExchange:
    """Who averages what with whom.

    A replica is one network: a rank that holds it whole, or ranks that hold it together. A node has one or several.
    """

    def __init__(
        self,
        groups: Groups,
        monitor: FailureMonitor,
        *,
        is_cut: bool,
        shard_group: ShardGroup | None,
        joint: bool,
        open_group: Open,
        settings: Exchange,
        state_placement: StatePlacement | None,
    ) -> None:
        self.splits_rows = not is_cut  # whether a fragment may have some rows of a tensor: of a part they are others
        self._groups = groups
        self._monitor = monitor
        self._is_cut = is_cut
        self._shard_group = shard_group
        self._joint = joint
        self._open = open_group
        self._settings = settings
        self._state_placement = state_placement
        self._reducers: list[BlockReducer] = []
        self._live: ReplicaGradients | None = None
        self._learned = 0
        if shard_group is not None:
            shard_group.monitor.follow(monitor)  # who waits in a layer hears what the other nodes say

    @property
    def is_first(self) -> bool:
        """Whether this rank's replica gives all others what is taken from one: rank 0 is in it."""
        return 0 in self._replica.everybody

    @property
    def answers(self) -> bool:
        """Whether this rank answers for the samples of its replica: it is the first of it."""
        return self._groups.rank_group.rank == self._replica.ranks[0]

    @property
    def holders(self) -> tuple[Ranks, ...]:
        """The ranks of each replica of the node, by their places in it."""
        place = self._groups.ranks.index
        return tuple(tuple(place(rank) for rank in replica.ranks) for replica in self._own)

    def level(self, module: torch.nn.Module, waiter: CollectiveWaiter) -> None:
        """Gives every rank the state of rank 0's replica; all ranks call it together, once, before all else."""
        self._learn(module, waiter)
        if not self._is_cut:
            _broadcast(module, self._groups.world, waiter)
            return
        items = [(name, tensor.detach().clone()) for name, tensor in named_tensors(module).items()]
        self._inside.reduce(items, waiter, weight=float(self._replica is self._own[0]), kind="copy")
        self._across.reduce(items, waiter, weight=float(0 in self._groups.ranks), kind="copy")
        self._across.spread(items, waiter)
        for (_, value), tensor in zip(items, named_tensors(module).values(), strict=True):
            tensor.copy_(value)

    def relearn(self, module: torch.nn.Module, waiter: CollectiveWaiter) -> None:
        """Goes on after parts of a cut network have changed hands; all ranks call it together."""
        for reducer in self._reducers:
            reducer.close()
        self._reducers = []
        self._learn(module, waiter)
        if self._live is not None:
            self._live.follow(self._gradients)

    def gradients(self, module: torch.nn.Module, *, find_unused_parameters: bool) -> Gradients:
        """Returns what averages the gradients of `module` over the replicas of the node: of whole ones torch's DDP."""
        if not self._is_cut:
            return NodeGradients(
                module, self._groups.gradients, monitor=self._monitor, find_unused_parameters=find_unused_parameters
            )
        self._live = ReplicaGradients(
            module,
            self._gradients,
            self._groups.gradients,
            ranks=tuple(range(self._groups.rank_group.size)) if self._joint else self._groups.ranks,
            replicas=self._gradient_replicas,
            monitor=self._monitor,
            timeout_s=self._settings.timeout_s,
        )
        return self._live

    def state(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[StateEntry]:
        """Returns the optimizer's state that can be averaged: what lies as its parameter does."""
        return state_entries(module, optimizer, self._state_placement)

    def sizes(self, named: Sequence[tuple[str, torch.Tensor]]) -> list[int]:
        """Returns the elements of each tensor on one device; named are the parameters or buffers that they lie like."""
        return [prod(self._shapes[name]) if self._is_cut else tensor.numel() for name, tensor in named]

    def fingerprint(self, entries: Sequence[StateEntry]) -> Fingerprint:
        """Returns the fingerprint of what this rank holds of the parameters; those of a replica's ranks are summed."""
        if not self._is_cut:
            return fingerprint({entry.label: entry.tensor for entry in entries})
        placed = {entry.label: (entry.tensor, local_shard_of(entry.tensor)) for entry in entries}
        return placed_fingerprint(placed, speaks=self.answers)

    def load(
        self, entries: Mapping[str, Sequence[StateEntry]], state: Sequence[StateEntry] = (), *, change: bool = False
    ) -> Payload:
        """Returns a snapshot of parameters, by the key under which their point is remembered, and of state."""
        keyed = [*entries.items(), *(("", slot) for slot in by_slot(state))]
        packed, bundles = [], []
        for key, chosen in keyed:
            made = self._pack(chosen, is_all=False)
            packed += made
            bundles += self._across.bundles([each.item for each in made], key=key, change=change)
        return Payload(packed, bundles, change=change)

    def carry(
        self,
        payload: Payload,
        moves: Mapping[str, torch.Tensor],
        quorum: Quorum,
        waiter: CollectiveWaiter,
        *,
        points: Anchors,
        exact: bool,
    ) -> TransferStats:
        """Lets nodes agree on a cargo: on values, or, if it is to be a change, on what is to be added to them.

        `moves`, what batches have added to buffers since the last exchange, become their averages over all batches.
        Nothing of the network is touched: another thread may use it.
        """
        moved, carried = self._pack(_named(moves)), TransferStats()
        items = [each.item for each in moved]
        self._inside.reduce(items, waiter, weight=quorum.shares[self._own.index(self._replica)])
        if not self._ends_inside:  # else it is one node, of ranks that have all, or of one replica
            bundles = [*payload.bundles, *self._across.bundles(items)]
            carried = points.agree([bundle.part for bundle in bundles], quorum, waiter, exact=exact)
            for bundle in bundles:
                bundle.unpack()
            self._across.spread([*(each.item for each in payload.packed), *items], waiter)
        for each in moved:
            each.unpack()
        return carried

    def agree_on_largest(self, counters: Mapping[str, torch.Tensor], waiter: CollectiveWaiter) -> None:
        """Replaces integer buffers by their maximum over all replicas."""
        packed = self._pack(_named(counters), dtype=torch.int64)
        items = [each.item for each in packed]
        self._everywhere.reduce(items, waiter, kind="max")
        self._everywhere.spread(items, waiter)
        for each in packed:
            each.unpack()

    def close(self, *, failed: bool) -> None:
        """Shuts down what it has opened; if a rank has `failed`, works may be under way."""
        if self._shard_group is not None:
            self._shard_group.monitor.leave(self._monitor)
        for reducer in self._reducers:
            reducer.close(failed=failed)

    def _learn(self, module: torch.nn.Module, waiter: CollectiveWaiter) -> None:
        """Finds out how all replicas are cut, and who meets whom."""
        groups, self._learned = self._groups, self._learned + 1
        nodes = find_replicas(module, groups, waiter) if self._is_cut else whole_replicas(groups.nodes)
        everybody = [replica for node in nodes for replica in node]
        self._own = nodes[groups.index]
        self._replica = next(replica for replica in self._own if groups.rank_group.rank in replica.everybody)
        self._ends_inside = len(nodes) == 1 and (not self._is_cut or len(self._own) == 1)
        self._gradient_replicas = tuple(everybody) if self._joint else self._own
        self._shapes = full_shapes(module) if self._is_cut else {}
        policies = policies_of(module, self._settings) if self._is_cut else {}
        counters = [name for name in self._shapes if policies.get(name, "keep") not in ("average", "keep")]
        opened = {} if self._is_cut else _by_ranks(groups)
        labels = {} if self._is_cut else {peers.owners: f"{number}" for number, peers in enumerate(groups.peers)}
        if self._is_cut:  # in groups of their own: exchanges may run beside the training
            trained = [name for name, _ in module.named_parameters()]
            self._gradients = self._meet(
                "gradients", _each(self._gradient_replicas), trained, spreads=len(self._gradient_replicas) > 1
            )
        self._inside = self._meet("inside", _each(self._own), self._shapes, groups=opened, spreads=False)
        self._across = self._meet("across", nodes, self._shapes, groups=self._inside.groups, labels=labels)
        self._everywhere = self._meet("everywhere", _each(everybody), counters, groups=self._across.groups)

    def _meet(
        self,
        name: str,
        sides: Sequence[Sequence[ReplicaRanks]],
        tensors: Iterable[str],
        *,
        groups: Mapping[Ranks, dist.ProcessGroup] | None = None,
        labels: Mapping[Ranks, str] | None = None,
        spreads: bool = True,
    ) -> BlockReducer:
        reducer = BlockReducer(
            f"{name}{self._learned}",
            sides,
            {tensor: self._shapes[tensor] for tensor in tensors},
            rank=self._groups.rank_group.rank,
            open_group=self._open,
            spreads=spreads,
            groups=groups,
            labels=labels,
        )
        self._reducers.append(reducer)
        return reducer

    def _pack(
        self, entries: Sequence[StateEntry], *, dtype: torch.dtype | None = None, is_all: bool = True
    ) -> list[Packed]:
        """Returns copies of entries as they travel: of a cut network each, of a whole one a flat vector for each type.

        Unless `is_all`, a vector gets only what this rank speaks for.
        """
        types = [dtype or travelling_dtype(entry.tensor) for entry in entries]
        if self._is_cut:
            return [Packed([entry], kind, name=entry.home) for entry, kind in zip(entries, types, strict=True)]
        packed = []
        for kind in TYPES if dtype is None else (dtype,):
            chosen = [entry for entry, own in zip(entries, types, strict=True) if own == kind]
            if any(entry.tensor.numel() for entry in chosen):
                packed.append(Packed(chosen, kind, ranges=None if is_all else self._across.spoken_for))
        return packed


def _broadcast(module: torch.nn.Module, group: dist.ProcessGroup, waiter: CollectiveWaiter) -> None:
    """Gives every rank of a group the state that its first rank has."""
    tensors = [*module.parameters(), *module.buffers()]
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        flat = Flat([tensor for tensor in tensors if tensor.dtype == dtype], dtype.to_real())
        scratch = flat.scratch()
        flat.pack(0, flat.total, scratch)
        waiter.wait([broadcast(scratch.view(torch.uint8), group, source=0)])
        flat.unpack(scratch)


def _by_ranks(groups: Groups) -> dict[Ranks, dist.ProcessGroup]:
    """Returns the groups in which whole networks are averaged, by their ranks."""
    everybody = tuple(rank for ranks in groups.nodes for rank in ranks)
    return {everybody: groups.world, groups.ranks: groups.node, **{peers.owners: peers.group for peers in groups.peers}}


def _each(replicas: Sequence[ReplicaRanks]) -> list[list[ReplicaRanks]]:
    """Returns each replica as a side of its own."""
    return [[replica] for replica in replicas]


def _named(tensors: Mapping[str, torch.Tensor]) -> list[StateEntry]:
    return [StateEntry(name, name, tensor) for name, tensor in tensors.items()]
