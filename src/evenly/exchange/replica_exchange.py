"""How replicas average with each other: which ranks hold and own which slices, and one exchange across nodes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Protocol, TypeVar, final

import torch

from evenly.comm import CollectiveWaiter, FailureMonitor, Group, Groups, ShardGroup, broadcast, local_shard_of
from evenly.comm.blocks.reducer import BlockReducer, Open, Ranks
from evenly.comm.blocks.replicas import ReplicaRanks, Shape, find_replicas, full_shapes, named_tensors, whole_replicas
from evenly.exchange.anchors import Anchors, TransferStats
from evenly.exchange.payload import Packed, Payload, PayloadEntry
from evenly.exchange.tensors.averaged_tensors import AveragedTensor, StatePlacement, by_slot, state_entries
from evenly.exchange.tensors.buffer_policies import policies_of
from evenly.exchange.tensors.fingerprint import Fingerprint, fingerprint, placed_fingerprint
from evenly.exchange.tensors.flat import TYPES, Flat, travelling_dtype
from evenly.exchange.votes import Quorum
from evenly.spec import Exchange

T = TypeVar("T")


class Across(Protocol):
    """Runs collectives between nodes; see `Membership.across`."""

    def __call__(self, act: Callable[[CollectiveWaiter], T], waiter: CollectiveWaiter) -> T:
        """Returns the result of `act`."""


@final
class ReplicaExchange:
    """Averages tensors between replicas, inside a node and across nodes.

    A replica is one copy of the network: on one rank, or cut over several ranks. A node has one or several.
    """

    def __init__(
        self,
        groups: Groups,
        monitor: FailureMonitor,
        *,
        is_cut: bool,
        has_own_batches: bool = False,
        shard_group: ShardGroup | None,
        global_gradients: bool,
        open_group: Open,
        settings: Exchange,
        state_placement: StatePlacement | None,
    ) -> None:
        """`has_own_batches`: ranks that hold a network together have a batch each, and so buffers of their own."""
        self.splits_rows = not is_cut  # whether a fragment may have some rows of a tensor; rows of shards differ
        self._groups = groups
        self._monitor = monitor
        self._is_cut = is_cut
        self._has_own_batches = has_own_batches
        self._shard_group = shard_group
        self._global_gradients = global_gradients
        self._open = open_group
        self._settings = settings
        self._state_placement = state_placement
        self.gradient_reducer: BlockReducer | None = None  # of the gradients of a cut network
        self.gradient_replicas: Sequence[ReplicaRanks] = ()  # those that average gradients with this one
        self._reducers: list[BlockReducer] = []
        self._shapes: dict[str, Shape] = {}  # of the tensors that the ranks of a replica hold together
        self._generation = 0
        if shard_group is not None:
            shard_group.monitor.follow(monitor)  # ranks that wait in a layer also see failures of other nodes

    @property
    def is_first(self) -> bool:
        """Whether this rank's replica, which contains rank 0, is the source of buffers taken from one replica."""
        return 0 in ([self._groups.rank] if self._has_own_batches else self._replica.all_ranks)

    @property
    def counts_samples(self) -> bool:
        """Whether this rank counts samples: its own batches, or as the first rank those of its replica."""
        return self._has_own_batches or self._leads_replica

    @property
    def _leads_replica(self) -> bool:
        return self._groups.rank == self._replica.ranks[0]

    @property
    def holders(self) -> tuple[Ranks, ...]:
        """The local ranks of each replica of the node."""
        local_rank_of = self._groups.ranks.index
        return tuple(tuple(local_rank_of(rank) for rank in replica.ranks) for replica in self._node_replicas)

    def broadcast_state(self, module: torch.nn.Module, waiter: CollectiveWaiter) -> None:
        """Gives every rank the state of rank 0's replica; all ranks call it together, once, before anything else."""
        self._build_reducers(module, waiter)
        if not self._is_cut:
            _broadcast([*module.parameters(), *module.buffers()], self._groups.world, waiter)
            return
        named = {name: tensor for name, tensor in named_tensors(module).items() if name in self._shapes}
        items = [(name, tensor.detach().clone()) for name, tensor in named.items()]
        self._inside.reduce(items, waiter, weight=float(self._replica is self._node_replicas[0]), kind="copy")
        self._across.reduce(items, waiter, weight=float(0 in self._groups.ranks), kind="copy")
        self._across.broadcast(items, waiter)
        for (_, value), tensor in zip(items, named.values(), strict=True):
            tensor.copy_(value)
        if self._has_own_batches:
            _broadcast(list(module.buffers()), self._groups.world, waiter)

    def after_resharding(self, module: torch.nn.Module, waiter: CollectiveWaiter) -> None:
        """Rebuilds the groups after parts of a cut network moved between ranks; all ranks call it together."""
        for reducer in self._reducers:
            reducer.close()
        self._reducers = []
        self._build_reducers(module, waiter)

    def follow_nodes(self) -> None:
        """Takes over the groups between other nodes, for a network that is whole on every rank."""
        self._reducers = []
        self._build_reducers(torch.nn.Module(), None)

    def state(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[AveragedTensor]:
        """Returns the optimizer's state that can be averaged: tensors laid out like their parameter."""
        return state_entries(module, optimizer, self._state_placement)

    def sizes(self, named: Sequence[tuple[str, torch.Tensor]]) -> list[int]:
        """Returns the elements of each full tensor; the names are those of parameters or buffers laid out alike."""
        return [prod(self._shapes[name]) if name in self._shapes else tensor.numel() for name, tensor in named]

    def fingerprint(self, entries: Sequence[AveragedTensor]) -> Fingerprint:
        """Returns the fingerprint of this rank's part of the parameters; those of a replica's ranks are summed."""
        if not self._is_cut:
            return fingerprint({entry.label: entry.tensor for entry in entries})
        placed = {entry.label: (entry.tensor, local_shard_of(entry.tensor)) for entry in entries}
        return placed_fingerprint(placed, counts_all=self._leads_replica)

    def snapshot(
        self,
        entries: Mapping[str, Sequence[AveragedTensor]],
        state: Sequence[AveragedTensor] = (),
        *,
        change: bool = False,
    ) -> Payload:
        """Returns a snapshot of parameters, by the key of their anchor, and of state."""
        keyed = [*entries.items(), *(("", slot) for slot in by_slot(state))]
        is_on_host = self._settings.offload
        is_all = self._groups.is_elastic  # which slices this rank owns may change before they are sent
        packed = [(key, self._pack(chosen, is_all=is_all, is_on_host=is_on_host)) for key, chosen in keyed]
        tensors = [entry.tensor for _, chosen in keyed for entry in chosen]
        copied = _copies_done(tensors[0]) if is_on_host and tensors else None
        if copied is not None and self._is_cut:
            copied.synchronize()  # parts of several tensors are joined
        return Payload(
            [each for _, new in packed for each in new],
            [s for key, new in packed for s in self._across.pack([each.item for each in new], key=key, change=change)],
            change=change,
            copied=copied,
            keys=[key for key, new in packed for _ in new],
        )

    def cut(self, payload: Payload) -> None:
        """Gives a payload the slices that this rank owns now."""
        payload.slices = [
            packed_slice
            for packed, key in zip(payload.packed, payload.keys, strict=True)
            for packed_slice in self._across.pack([packed.item], key=key)
        ]

    def gather_slices(
        self,
        entries: Mapping[str, Sequence[AveragedTensor]],
        values: Mapping[str, torch.Tensor],
        waiter: CollectiveWaiter,
    ) -> list[PayloadEntry]:
        """Returns the entries with the `values` that the ranks of this node keep for their slices, by key.

        All ranks of the node call it together.
        """
        packed: list[Packed] = []
        for key, chosen in entries.items():
            new = self._pack(chosen)
            for packed_slice in self._across.pack([each.item for each in new], key=key):
                packed_slice.part.values.copy_(values[packed_slice.part.key])
                packed_slice.unpack()
            packed += new
        self._across.broadcast([each.item for each in packed], waiter)
        return [entry for each in packed for entry in each.entries()]

    def average(
        self,
        payload: Payload,
        buffer_changes: Mapping[str, torch.Tensor],
        quorum: Quorum,
        waiter: CollectiveWaiter,
        *,
        anchors: Anchors,
        exact: bool,
        across: Across,
    ) -> TransferStats:
        """Averages a payload across nodes: its values become the agreed ones, or the change to add to the network.

        `buffer_changes`, the changes of buffers since the last exchange, become their weighted averages. The network
        itself is not touched: another thread may use it. `across` runs the collectives between nodes.
        """
        payload.wait_for_copies()
        packed, stats = self._pack_buffers(buffer_changes), TransferStats()
        items = [each.item for each in packed]
        self._buffers_inside.reduce(items, waiter, weight=self._buffer_share(quorum))
        if not self._is_single:
            slices = [*payload.slices, *self._buffers_across.pack(items)]
            parts = [packed_slice.part for packed_slice in slices]
            stats = across(lambda between: anchors.agree(parts, quorum, between, exact=exact), waiter)
            for packed_slice in slices:
                packed_slice.unpack()
            payload_items = [each.item for each in payload.packed]
            if self._buffers_across is self._across:
                self._across.broadcast([*payload_items, *items], waiter)
            else:
                self._across.broadcast(payload_items, waiter)
                self._buffers_across.broadcast(items, waiter)
        for each in packed:
            each.unpack()
        return stats

    def agree_on_largest(self, keys: Mapping[str, torch.Tensor], waiter: CollectiveWaiter, *, across: Across) -> None:
        """Replaces the integer keys of buffers (policies max, min, first) by their maximum over all replicas."""
        packed = self._pack_buffers(keys, dtype=torch.int64)
        items = [each.item for each in packed]
        if items:
            across(lambda between: self._buffers_everywhere.reduce(items, between, kind="max"), waiter)
        self._buffers_everywhere.broadcast(items, waiter)
        for each in packed:
            each.unpack()

    def close(self, *, failed: bool) -> None:
        """Shuts down the groups it opened; if a rank has `failed`, collectives may be pending."""
        if self._shard_group is not None:
            self._shard_group.monitor.leave(self._monitor)
        for reducer in self._reducers:
            reducer.close(failed=failed)

    def _build_reducers(self, module: torch.nn.Module, waiter: CollectiveWaiter | None) -> None:
        """Collects how all replicas are cut, and builds the reducers between them; only cut ones need a `waiter`."""
        groups, self._generation = self._groups, self._generation + 1
        self._shapes = self._replica_shapes(module)
        nodes = whole_replicas(groups.nodes)
        if self._is_cut and waiter is not None:
            nodes = find_replicas(module, groups, waiter, required=self._shapes)
        all_replicas = [replica for node in nodes for replica in node]
        self._node_replicas = nodes[groups.index]
        self._replica = next(replica for replica in self._node_replicas if groups.rank in replica.all_ranks)
        self._is_single = len(nodes) == 1 and (not self._is_cut or len(self._node_replicas) == 1)
        self.gradient_replicas = tuple(all_replicas) if self._global_gradients else self._node_replicas
        policies = policies_of(module, self._settings) if self._is_cut else {}
        keyed = [name for name in self._shapes if policies.get(name, "keep") not in ("average", "keep")]
        existing = {} if self._is_cut else _by_ranks(groups)
        labels = {} if self._is_cut else {peers.owners: f"{number}" for number, peers in enumerate(groups.peers)}
        if self._is_cut:  # own groups: exchanges may run during training
            trained = [name for name, _ in module.named_parameters()]
            self.gradient_reducer = self._open_reducer(
                "gradients", _each(self.gradient_replicas), trained, broadcasts=len(self.gradient_replicas) > 1
            )
        node_participants = _each(self._node_replicas)
        self._inside = self._open_reducer("inside", node_participants, self._shapes, groups=existing, broadcasts=False)
        self._across = self._open_reducer("across", nodes, self._shapes, groups=self._inside.groups, labels=labels)
        everywhere = self._open_reducer("everywhere", _each(all_replicas), keyed, groups=self._across.groups)
        self._buffers_inside, self._buffers_across, self._buffers_everywhere = self._inside, self._across, everywhere
        if self._has_own_batches:
            self._open_buffer_reducers()

    def _replica_shapes(self, module: torch.nn.Module) -> dict[str, Shape]:
        """Returns the full shapes of the tensors that the ranks of a replica hold together."""
        if not self._is_cut:
            return {}
        shapes = full_shapes(module)
        parameters = {name for name, _ in module.named_parameters()}
        return {n: shape for n, shape in shapes.items() if n in parameters} if self._has_own_batches else shapes

    def _open_buffer_reducers(self) -> None:
        """Has buffers, which every rank holds whole, averaged as those of networks that no rank shares."""
        nodes, existing = whole_replicas(self._groups.nodes), _by_ranks(self._groups)
        all_ranks = [rank for ranks in nodes for rank in ranks]
        self._buffers_inside = self._open_reducer(
            "buffers_inside", _each(nodes[self._groups.index]), (), groups=existing, broadcasts=False
        )
        self._buffers_across = self._open_reducer("buffers_across", nodes, (), groups=existing)
        self._buffers_everywhere = self._open_reducer("buffers_everywhere", _each(all_ranks), (), groups=existing)

    def _buffer_share(self, quorum: Quorum) -> float:
        """Returns the weight of this rank's buffers in those of its node."""
        if self._has_own_batches:
            return quorum.rank_shares[self._groups.local_rank]
        return quorum.shares[self._node_replicas.index(self._replica)]

    def _pack_buffers(self, buffers: Mapping[str, torch.Tensor], *, dtype: torch.dtype | None = None) -> list[Packed]:
        """Returns copies of buffers as they are sent."""
        entries = [AveragedTensor(name, name, tensor) for name, tensor in buffers.items()]
        return self._pack(entries, dtype=dtype, is_flat=self._has_own_batches)

    def _open_reducer(
        self,
        name: str,
        participants: Sequence[Sequence[ReplicaRanks]],
        tensors: Iterable[str],
        *,
        groups: Mapping[Ranks, Group] | None = None,
        labels: Mapping[Ranks, str] | None = None,
        broadcasts: bool = True,
    ) -> BlockReducer:
        reducer = BlockReducer(
            f"{name}{self._generation}",
            participants,
            {tensor: self._shapes[tensor] for tensor in tensors},
            rank=self._groups.rank,
            open_group=self._open,
            broadcasts=broadcasts,
            groups=groups,
            labels=labels,
        )
        self._reducers.append(reducer)
        return reducer

    def _pack(
        self,
        entries: Sequence[AveragedTensor],
        *,
        dtype: torch.dtype | None = None,
        is_all: bool = True,
        is_flat: bool = False,
        is_on_host: bool = False,
    ) -> list[Packed]:
        """Returns copies of entries as they are sent: one by one for a cut network, else a flat vector for each dtype.

        What every rank of a cut network holds whole may be sent `is_flat`, too. Unless `is_all`, a vector gets only the
        ranges that this rank owns.
        """
        types = [dtype or travelling_dtype(entry.tensor) for entry in entries]
        if self._is_cut and not is_flat:
            return [
                Packed([entry], kind, name=entry.home, is_on_host=is_on_host)
                for entry, kind in zip(entries, types, strict=True)
            ]
        ranges = None if is_all else self._across.owned_ranges
        packed = []
        for kind in TYPES if dtype is None else (dtype,):
            chosen = [entry for entry, sent_dtype in zip(entries, types, strict=True) if sent_dtype == kind]
            if any(entry.tensor.numel() for entry in chosen):
                packed.append(Packed(chosen, kind, ranges=ranges, is_on_host=is_on_host))
        return packed


def _copies_done(tensor: torch.Tensor) -> torch.cuda.Event | None:
    """Returns an event after the copies that were begun on the stream of a tensor's GPU."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event(blocking=True)  # the thread that waits for it leaves its core to others
    event.record(torch.cuda.current_stream(tensor.device))
    return event


def _broadcast(tensors: Sequence[torch.Tensor], group: Group, waiter: CollectiveWaiter) -> None:
    """Gives every rank of a group the values that its first rank has."""
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        flat = Flat([tensor for tensor in tensors if tensor.dtype == dtype], dtype.to_real())
        scratch = flat.scratch()
        flat.pack(0, flat.total, scratch)
        waiter.wait([broadcast(scratch.view(torch.uint8), group, source=0)])
        flat.unpack(scratch)


def _by_ranks(groups: Groups) -> dict[Ranks, Group]:
    """Returns the groups in which whole networks are averaged, by their ranks."""
    everybody = tuple(rank for ranks in groups.nodes for rank in ranks)
    return {everybody: groups.world, groups.ranks: groups.node, **{peers.owners: peers.group for peers in groups.peers}}


def _each(replicas: Sequence[ReplicaRanks]) -> list[list[ReplicaRanks]]:
    """Returns each replica as a participant of its own."""
    return [[replica] for replica in replicas]
