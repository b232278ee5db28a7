"""Process groups for nodes of unequal size: the node, the peers across nodes, all ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from functools import cache

import torch
import torch.distributed as dist

from evenly._torch.process_groups import (
    Backend,
    GlooDevice,
    PrefixStore,
    add_backend,
    gloo,
    gloo_devices,
    keep_until_exit,
    nccl,
)
from evenly.comm.callbacks import watch_group
from evenly.comm.memory.group import MemoryGroup
from evenly.comm.memory_groups import have_own_gpus, open_memory
from evenly.comm.rank_group import RankGroup
from evenly.errors import PeerError, SpecError
from evenly.launch.gloo import shared_device_key
from evenly.launch.limits import NoAnswerError, call_within
from evenly.launch.recorder import disable_unsafe_recorder
from evenly.spec import Device

Group = dist.ProcessGroup | MemoryGroup

MARGIN_S = 30.0  # our waits time out before the backend and name the missing ranks, which it cannot


@dataclass(frozen=True)
class Peers:
    """The owners of one slice, one per node, the group they reduce it in, and one for small messages on the CPU."""

    owners: tuple[int, ...]
    group: dist.ProcessGroup
    votes: dist.ProcessGroup


@dataclass(frozen=True)
class GroupsAcrossNodes:
    """The nodes that exchange with each other, as ranks counted over all of them, and the groups between them."""

    nodes: tuple[tuple[int, ...], ...]
    index: int  # of this rank's node
    rank: int  # this rank
    world: dist.ProcessGroup
    peers: tuple[Peers, ...]

    def close(self, *, failed: bool = False) -> None:
        """Shuts the groups down; where a rank has `failed`, collectives may be pending."""
        across_nodes = [group for peers in self.peers for group in (peers.group, peers.votes)]
        close_groups([self.world, *across_nodes], failed=failed)


@dataclass
class Groups:
    """The groups that one rank is a member of.

    Gradients have a group of their own: a rank that is one step behind cannot match a gradient with an exchange.

    In an elastic run `rank_group` has the ranks of this node only, and the groups `across` nodes are replaced when
    nodes come or go.
    """

    rank_group: RankGroup
    across: GroupsAcrossNodes
    gradients: Group
    node: Group
    node_votes: Group
    is_elastic: bool = False

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node that takes part in exchanges."""
        return self.across.nodes

    @property
    def index(self) -> int:
        """The index of this rank's node among these."""
        return self.across.index

    @property
    def rank(self) -> int:
        """The number of this rank, as it is counted in `nodes`."""
        return self.across.rank

    @property
    def world(self) -> dist.ProcessGroup:
        """All ranks of `nodes`."""
        return self.across.world

    @property
    def peers(self) -> tuple[Peers, ...]:
        """The groups of the slices that this rank owns."""
        return self.across.peers

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's node."""
        return self.nodes[self.index]

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank, now or later."""
        return self.rank_group.size == 1 and not self.is_elastic

    @property
    def averages_parameters(self) -> bool:
        """Whether there are other nodes, or may be later."""
        return len(self.nodes) > 1 or self.is_elastic

    def close(self, *, failed: bool = False) -> None:
        """Shuts the groups down; where a rank has `failed`, collectives may be pending."""
        self.across.close(failed=failed)
        close_groups([self.gradients, self.node, self.node_votes], failed=failed)

    @property
    def local_rank(self) -> int:
        """The index of this rank in its node."""
        return self.ranks.index(self.rank)


def open_groups(
    rank_group: RankGroup,
    nodes: Sequence[Sequence[int]],
    devices: Sequence[Device],
    *,
    timeout_s: float = 600.0,
    global_gradients: bool = False,
    concurrent: bool = False,
) -> Groups:
    """Returns the groups of this rank; every rank of the group calls it with the same arguments.

    Args:
        rank_group: the ranks and their store.
        nodes: the ranks of each node; unequal numbers are normal.
        devices: the device of each rank, which decides the backend.
        timeout_s: time limit of every collective.
        global_gradients: whether gradients are averaged over all ranks instead of inside the node.
        concurrent: whether another thread uses the groups of node and peers while gradients are averaged. NCCL needs
            one order of all collectives of a device, which two threads do not have: these groups then use gloo.
    """
    index = next(i for i, ranks in enumerate(nodes) if rank_group.rank in ranks)

    def across(
        name: str, ranks: Sequence[int], backend: str | None = None, concurrent: bool = concurrent
    ) -> dist.ProcessGroup:
        chosen = backend or backend_for([devices[rank] for rank in ranks])
        return open_group(rank_group, name, ranks, backend=chosen, timeout_s=timeout_s, concurrent=concurrent)

    def inside(name: str, ranks: Sequence[int], *, may_use_nccl: bool, concurrent: bool, serves_ddp: bool) -> Group:
        memory = None
        if len(ranks) <= len(node_ranks):  # otherwise they are those of several nodes
            memory = open_memory(rank_group, name, ranks, [devices[rank] for rank in ranks], timeout_s=timeout_s)
        if memory is not None and not serves_ddp:
            return memory
        plain = across(name, ranks, None if may_use_nccl else "gloo", concurrent)
        if memory is None:
            return plain
        memory.plain = plain
        return memory

    def is_on_cpu(ranks: Sequence[int]) -> bool:
        return concurrent or backend_for([devices[rank] for rank in ranks]) == "gloo"

    all_ranks, node_ranks, exchange_backend = range(rank_group.size), nodes[index], "gloo" if concurrent else None
    gradient_ranks = all_ranks if global_gradients else node_ranks
    node = inside(f"node{index}", node_ranks, may_use_nccl=not concurrent, concurrent=concurrent, serves_ddp=False)
    peers = []
    for number, owners in enumerate(owners_of_slices(nodes)):
        if rank_group.rank in owners:
            data = across(f"peers{number}", owners, exchange_backend)
            votes = data if is_on_cpu(owners) else across(f"peers{number}votes", owners, "gloo")
            peers.append(Peers(owners, data, votes))
    across_nodes = GroupsAcrossNodes(
        nodes=tuple(tuple(ranks) for ranks in nodes),
        index=index,
        rank=rank_group.rank,
        world=across("world", all_ranks, "gloo"),
        peers=tuple(peers),
    )
    return Groups(
        rank_group=rank_group,
        across=across_nodes,
        gradients=inside(
            "gradients" if global_gradients else f"gradients{index}",
            gradient_ranks,
            may_use_nccl=True,
            concurrent=False,
            serves_ddp=True,
        ),
        node=node,
        node_votes=node if is_on_cpu(node_ranks) else across(f"node{index}votes", node_ranks, "gloo"),
    )


def owners_of_slices(nodes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Returns the ranks, one of each node, that own a slice of a vector together; `nodes` gives the ranks of each node.

    Rank l of a node with n ranks owns the fraction [l/n, (l+1)/n) of any vector. The owners change at
    each border of a slice.

    >>> owners_of_slices([[0, 1], [2]])
    [(0, 2), (1, 2)]
    """
    borders = sorted({Fraction(index, len(ranks)) for ranks in nodes for index in range(len(ranks))})
    return [tuple(ranks[int(border * len(ranks))] for ranks in nodes) for border in borders]


def close_groups(groups: Iterable[Group], *, failed: bool = False) -> None:
    """Shuts groups down; where a rank has `failed` they are also kept for the life of the process.

    Gloo cannot cancel a collective that waits for another rank, and freeing its group waits for it: the end of the
    process would take as long as the timeout.
    """
    for group in {id(group): group for group in groups}.values():
        group.shutdown()
        plain = group.plain if isinstance(group, MemoryGroup) else group
        if failed and plain is not None:
            keep_until_exit(plain)


def plain_group(group: Group) -> dist.ProcessGroup:
    """Returns the process group of torch for what torch itself sends."""
    if not isinstance(group, MemoryGroup):
        return group
    if group.plain is None:
        raise SpecError("a group over shared memory was opened without a process group of torch, which is needed.")
    return group.plain


def backend_for(devices: Sequence[Device]) -> str:
    """Returns the backend that serves these devices together: NCCL for distinct CUDA devices, gloo otherwise."""
    return "nccl" if have_own_gpus(devices) and dist.is_nccl_available() else "gloo"


def open_group_inside(
    rank_group: RankGroup,
    name: str,
    ranks: Sequence[int],
    devices: Sequence[Device] | None,
    *,
    timeout_s: float,
    device: torch.device | None = None,
    backend: str | None = None,
) -> Group:
    """Returns a group of ranks that are near each other: over shared memory, NCCL or gloo, as their `devices` allow.

    Where the devices of the others are not known, `devices` is None, and `device` that of this rank (by default a
    CPU). Without shared memory it has this `backend`; by default the one for the devices.
    """
    memory = open_memory(rank_group, name, ranks, devices, timeout_s=timeout_s, device=device)
    if memory is not None:
        return memory
    chosen = backend or ("gloo" if devices is None else backend_for(devices))
    return open_group(rank_group, name, ranks, backend=chosen, timeout_s=timeout_s)


def open_group(
    rank_group: RankGroup, name: str, ranks: Sequence[int], *, backend: str, timeout_s: float, concurrent: bool = False
) -> dist.ProcessGroup:
    """Returns a process group of `ranks` that is not in torch's registry; only its members call this.

    A group that is used by another thread during training (`concurrent`) gets its own receiving thread.
    """
    disable_unsafe_recorder()
    store = PrefixStore(name, rank_group.store.raw)
    rank, size = list(ranks).index(rank_group.rank), len(ranks)
    timeout = timedelta(seconds=timeout_s + MARGIN_S)
    group = dist.ProcessGroup(store, rank, size)
    if backend == "nccl":
        engine: Backend = nccl(store, rank, size, timeout=timeout)
        kind, device_types = dist.ProcessGroup.BackendType.NCCL, ["cuda"]
    else:
        try:
            engine = call_within(timeout_s + 1.0, lambda: _gloo(store, rank, size, timeout, concurrent=concurrent))
        except NoAnswerError:
            rank_group.store.run(lambda: store.check(["-"]), limit_s=2.0)  # raises if the host of the store is gone
            raise PeerError(
                f"rank {rank_group.rank} was to connect with the ranks {list(ranks)}; they did not all connect within "
                f"{timeout_s:g} s. Look at their output; if they only need longer, give a larger timeout_s."
            ) from None
        kind, device_types = dist.ProcessGroup.BackendType.GLOO, ["cpu", "cuda"]
    add_backend(group, engine, kind, devices=device_types)
    if backend != "nccl":
        watch_group(group)
    return group


def _gloo(store: PrefixStore, rank: int, size: int, timeout: timedelta, *, concurrent: bool) -> Backend:
    """Returns a gloo backend."""
    owner = shared_device_key()
    if owner is None:
        return gloo(store, rank, size, timeout=timeout)
    try:
        return gloo(store, rank, size, timeout=timeout, devices=_shared_devices(owner, concurrent))
    except BaseException:
        _shared_devices.cache_clear()  # these may still be connecting to ranks that timed out
        raise


@cache
def _shared_devices(owner: tuple[int, str], concurrent: bool) -> list[GlooDevice]:
    """Returns the gloo devices (network interfaces) that all groups of a process share.

    Each has a thread that wakes a hundred times a second, also when idle. With one for every group a slow device, such
    as one with a twentieth of a core, would lose a noticeable part of its time to them.
    """
    return gloo_devices(timedelta(seconds=MARGIN_S))
