"""Whether the ranks of a group share memory, which they find out together, and the group over it."""

import json
import logging
import os
import secrets
import time
from collections.abc import Sequence
from typing import Any

from evenly.comm.memory import semaphores
from evenly.comm.memory.group import MemoryGroup
from evenly.comm.memory.mapping import MappedMemory, Shape, SharedFile, open_shared
from evenly.comm.memory.members import Processes
from evenly.comm.rank_group import RankGroup
from evenly.errors import PeerError
from evenly.launch.cores import cpu_quota, usable_cores
from evenly.launch.host import machine_id
from evenly.launch.settings import environment
from evenly.spec import Device

logger = logging.getLogger(__name__)

VARIABLE = "EVENLY_SHARED_MEMORY"  # 0: ranks of one machine use the network interface, too

NUM_SLOTS = 8  # a rank may be so many rounds ahead
SLOT_BYTES = 1 << 22  # of each rank, at most
MOST_RANKS = 32  # each posts to all others in every round
MOST_BYTES = 1 << 27  # of all slots; pages that are never written take no memory
SPIN_S = 50e-6  # about as long as to be woken takes
_TOKEN_BYTES = 32


def open_memory(
    rank_group: RankGroup,
    name: str,
    ranks: Sequence[int],
    devices: Sequence[Device] | None,
    *,
    timeout_s: float,
    on_cpu: bool = True,
) -> MemoryGroup | None:
    """Returns the group of `ranks` over shared memory; None, on all of them, if not all of them can share it.

    Ranks on GPUs cannot. Where not all `devices` are known, they are None and `on_cpu` tells of this rank.
    """
    if not 1 < len(ranks) <= MOST_RANKS or any(device.kind != "cpu" for device in devices or ()):
        return None  # which all ranks know
    opening = _Opening(rank_group, f"memory/{name}", ranks, timeout_s=timeout_s)
    can_share = _can_share() and on_cpu
    rows = opening.exchange("host", [machine_id(), os.getpid(), can_share, usable_cores(), cpu_quota()])
    machines, pids, can_all_share, cores, quotas = zip(*rows, strict=True)
    if len(set(machines)) > 1 or not all(can_all_share):
        return None
    num_cores = len(set[int]().union(*cores))  # ranks may be bound to one each
    has_own_core = len(ranks) <= num_cores and min(quotas) >= 1 and len(set(pids)) == len(ranks)
    shape = Shape(len(ranks), NUM_SLOTS, _slot_bytes(len(ranks)))
    memory = opening.share(shape, spin_s=SPIN_S if has_own_core else 0.0)
    if memory is None:
        return None
    return MemoryGroup(memory, opening.number, Processes(pids), ranks=list(ranks))


def _slot_bytes(num_ranks: int) -> int:
    """Returns the bytes of a slot: whole pages."""
    return min(SLOT_BYTES, max(1 << 16, MOST_BYTES // (NUM_SLOTS * num_ranks) // 4096 * 4096))


def _can_share() -> bool:
    """Whether the system has such memory, and the user wants it to be used."""
    is_wanted = environment(VARIABLE) != "0"
    return is_wanted and machine_id() != "" and semaphores.are_available() and hasattr(os, "memfd_create")


class _Opening:
    """The messages by which ranks agree on shared memory, over the store."""

    def __init__(self, rank_group: RankGroup, prefix: str, ranks: Sequence[int], *, timeout_s: float) -> None:
        self.number = list(ranks).index(rank_group.rank)
        self._store = rank_group.store
        self._prefix = prefix
        self._ranks = list(ranks)
        self._timeout_s = timeout_s

    def exchange(self, what: str, value: object) -> list[Any]:
        """Returns the values of all ranks."""
        keys = [f"{self._prefix}/{what}/{rank}" for rank in self._ranks]
        self._store.set(keys[self.number], json.dumps(value))
        until, pause_s = time.monotonic() + self._timeout_s, 0.0005
        while not self._store.check(keys):
            if time.monotonic() > until:
                absent = [rank for rank, key in zip(self._ranks, keys, strict=True) if not self._store.check([key])]
                raise PeerError(
                    f"rank {self._ranks[self.number]} was to connect with the ranks {self._ranks}; {absent} did not "
                    f"come within {self._timeout_s:g} s. Look at their output; if they only need longer, give a "
                    "larger timeout_s."
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        return [json.loads(text) for text in self._store.get_all(keys)]

    def share(self, shape: Shape, *, spin_s: float) -> MappedMemory | None:
        """Returns the memory that the first rank makes; None, on all ranks, if one cannot map it."""
        if self.number > 0:
            (path, token, refusal), *_ = self.exchange("memory", None)
            memory, reason = (None, refusal) if refusal else _attach(path, bytes.fromhex(token), shape, spin_s=spin_s)
            return memory if self._all_agree(reason) else None
        token = secrets.token_bytes(_TOKEN_BYTES)
        try:
            file = SharedFile(shape.size_bytes)
        except OSError as error:
            self.exchange("memory", ["", "", str(error)])
            self._all_agree(str(error))
            return None
        try:
            memory, refusal = _map(file.descriptor, shape, spin_s=spin_s)
            if memory is not None:
                refusal = _prepare(memory, token)
            self.exchange("memory", [file.path, token.hex(), refusal])
            return memory if self._all_agree(refusal) else None
        finally:
            file.close()  # all have mapped it, or will not

    def _all_agree(self, refusal: str) -> bool:
        """Returns whether no rank has refused the memory; the first rank says which has."""
        refusals = self.exchange("mapped", refusal)
        found = next(((rank, text) for rank, text in zip(self._ranks, refusals, strict=True) if text), None)
        if found is not None and self.number == 0:
            logger.warning(
                "ranks %s are on one machine but share no memory, because of rank %d: %s. They use the network "
                "interface, which is slower; %s=0 chooses that without this message.",
                self._ranks,
                *found,
                VARIABLE,
            )
        return found is None


def _prepare(memory: MappedMemory, token: bytes) -> str:
    """Makes the semaphores and writes by what the others know the memory; returns why that failed, "" if it did not."""
    try:
        memory.semaphores.create(memory.shape.num_semaphores)
    except OSError as error:
        return str(error)
    memory.token[: len(token)] = token
    return ""


def _map(descriptor: int, shape: Shape, *, spin_s: float) -> tuple[MappedMemory | None, str]:
    """Returns the memory of a file, or why it cannot be mapped."""
    try:
        return MappedMemory(descriptor, shape, spin_s=spin_s), ""
    except (OSError, ValueError, MemoryError) as error:
        return None, str(error) or type(error).__name__


def _attach(path: str, token: bytes, shape: Shape, *, spin_s: float) -> tuple[MappedMemory | None, str]:
    """Returns the memory of another rank, or why it cannot be had."""
    try:
        descriptor = open_shared(path, shape.size_bytes)
    except OSError as error:
        return None, str(error)
    try:
        memory, refusal = _map(descriptor, shape, spin_s=spin_s)
    finally:
        os.close(descriptor)
    if memory is None:
        return None, refusal
    if bytes(memory.token[: len(token)]) != token:
        return None, f"{path} is not the memory of this group"
    return memory, ""
