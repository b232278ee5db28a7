"""Whether the ranks of a group share memory, which they find out together, and the group over it."""

import json
import logging
import os
import secrets
import time
from collections.abc import Sequence

import torch.distributed as dist

from evenly.comm.memory import semaphores
from evenly.comm.memory.group import MemoryGroup
from evenly.comm.memory.members import Processes
from evenly.comm.memory.segment import Segment, Shape, SharedFile, open_shared
from evenly.comm.rank_group import RankGroup
from evenly.errors import PeerError
from evenly.launch.cores import usable_cores
from evenly.launch.host import machine_id
from evenly.launch.settings import environment

logger = logging.getLogger(__name__)

VARIABLE = "EVENLY_SHARED_MEMORY"  # 0: ranks of one machine use the network interface, too

NUM_SLOTS = 4
SLOT_BYTES = 1 << 20
SPIN_S = 50e-6  # about as long as to be woken takes
_TOKEN_BYTES = 32


def open_memory(
    rank_group: RankGroup, name: str, ranks: Sequence[int], *, timeout_s: float, plain: dist.ProcessGroup | None = None
) -> MemoryGroup | None:
    """Returns the group of `ranks` over shared memory; None, on all of them, if not all of them can share it."""
    if len(ranks) == 1:
        return None
    opening = _Opening(rank_group, f"memory/{name}", ranks, timeout_s=timeout_s)
    rows = opening.exchange("host", [machine_id(), os.getpid(), _refusal(), usable_cores()])
    if len({machine for machine, *_ in rows}) > 1 or any(refusal for _, _, refusal, _ in rows):
        return None
    pids = [pid for _, pid, *_ in rows]
    has_own_core = len(ranks) <= min(cores for *_, cores in rows) and len(set(pids)) == len(ranks)
    segment = opening.share(Shape(len(ranks), NUM_SLOTS, SLOT_BYTES), spin_s=SPIN_S if has_own_core else 0.0)
    if segment is None:
        return None
    return MemoryGroup(segment, opening.number, Processes(pids), plain=plain)


def _refusal() -> str:
    """Returns why this rank uses no shared memory; "" if it does."""
    if environment(VARIABLE) == "0":
        return f"{VARIABLE}=0"
    if machine_id() == "":
        return "the machine has no id"
    return "" if semaphores.are_available() and hasattr(os, "memfd_create") else "the system has no such memory"


class _Opening:
    """The messages by which ranks agree on a segment, over the store."""

    def __init__(self, rank_group: RankGroup, prefix: str, ranks: Sequence[int], *, timeout_s: float) -> None:
        self.number = list(ranks).index(rank_group.rank)
        self._store = rank_group.store
        self._prefix = prefix
        self._ranks = list(ranks)
        self._timeout_s = timeout_s

    def exchange(self, what: str, value: object) -> list:  # type: ignore[type-arg]
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

    def share(self, shape: Shape, *, spin_s: float) -> Segment | None:
        """Returns the segment that the first rank makes; None, on all ranks, if one cannot map it."""
        token, file, segment, refusal = secrets.token_bytes(_TOKEN_BYTES), None, None, ""
        if self.number == 0:
            try:
                file = SharedFile(shape.size_bytes)
                segment = Segment(file.descriptor, shape, spin_s=spin_s)
                segment.token[:_TOKEN_BYTES] = token
                segment.semaphores.create(shape.num_semaphores)
            except OSError as error:
                refusal = str(error)
        offers = self.exchange("segment", ["" if file is None else file.path, token.hex(), refusal])
        path, token_text, refusal = offers[0]
        if self.number > 0 and not refusal:
            try:
                segment = _attach(path, bytes.fromhex(token_text), shape, spin_s=spin_s)
            except OSError as error:
                refusal = str(error)
        refusals = self.exchange("mapped", refusal)
        if file is not None:
            file.close()  # all have mapped it, or will not
        found = next(((rank, text) for rank, text in zip(self._ranks, refusals, strict=True) if text), None)
        if found is None:
            return segment
        if self.number == 0:
            logger.warning(
                "ranks %s are on one machine but do not share memory, because of rank %d: %s. They use the network "
                "interface, which is slower; %s=0 says so without this message.",
                self._ranks, *found, VARIABLE,
            )  # fmt: skip
        return None


def _attach(path: str, token: bytes, shape: Shape, *, spin_s: float) -> Segment:
    """Returns the segment of another rank, after making sure that it is the right one."""
    descriptor = open_shared(path, shape.size_bytes)
    try:
        segment = Segment(descriptor, shape, spin_s=spin_s)
    finally:
        os.close(descriptor)
    if bytes(segment.token[: len(token)]) != token:
        raise OSError(f"{path} is not the memory of this group")
    return segment
