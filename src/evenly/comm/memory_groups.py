"""Whether the ranks of a group share memory, which they find out together, and the group over it."""

import json
import logging
import os
import secrets
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from evenly.comm.memory import semaphores
from evenly.comm.memory.group import MemoryGroup
from evenly.comm.memory.mapping import MappedMemory, Shape, SharedFile, open_shared
from evenly.comm.memory.members import Processes
from evenly.comm.memory.slot_access import DeviceAccess, DeviceSlots, HostAccess, SlotAccess, StagedAccess
from evenly.comm.rank_group import RankGroup
from evenly.errors import PeerError
from evenly.launch.cores import cpu_quota, usable_cores
from evenly.launch.host import machine_id
from evenly.launch.settings import environment
from evenly.spec import Device

logger = logging.getLogger(__name__)

VARIABLE = "EVENLY_SHARED_MEMORY"  # 0: ranks of one machine use the network interface, too; gpu: those of GPUs share it

NUM_SLOTS = 8  # a rank may be so many rounds ahead
SLOT_BYTES = 1 << 22  # of each rank, at most
PINNED_SLOT_BYTES = 1 << 20  # which take memory whether they are written or not
MOST_RANKS = 32  # each posts to all others in every round
MOST_BYTES = 1 << 27  # of all slots; pages that are never written take no memory
SPIN_S = 50e-6  # about as long as to be woken takes
_TOKEN_BYTES = 32
_UNKNOWN = "unknown"
_BY_NETWORK = "use the network interface, which is slower"


def open_memory(
    rank_group: RankGroup,
    name: str,
    ranks: Sequence[int],
    devices: Sequence[Device] | None,
    *,
    timeout_s: float,
    device: torch.device | None = None,
) -> MemoryGroup | None:
    """Returns the group of `ranks` over shared memory; None, on all of them, if not all of them can share it.

    Ranks with a GPU each cannot: NCCL serves them. Where not all `devices` are known, they are None, and `device` that
    of this rank (by default a CPU).
    """
    if not 1 < len(ranks) <= MOST_RANKS or (devices is not None and have_own_gpus(devices)):
        return None  # which all ranks know
    opening = _Opening(rank_group, f"memory/{name}", ranks, timeout_s=timeout_s)
    if devices is not None:
        device = torch.device(devices[opening.number].kind, devices[opening.number].index)
    device = device or torch.device("cpu")
    hosts = [_Host(*row) for row in opening.exchange("host", _Host.of(device))]
    if not _can_all_share(hosts):
        return None
    memory = opening.share(_shape_for(hosts), spin_s=SPIN_S if _have_own_cores(hosts) else 0.0)
    accesses = None if memory is None else _open_accesses(opening, memory, hosts, device)
    if memory is None or accesses is None:
        return None
    processes = Processes([host.pid for host in hosts])
    return MemoryGroup(memory, opening.number, processes, ranks=list(ranks), accesses=accesses)


class _Host(NamedTuple):
    """What a rank tells about where it runs."""

    machine: str
    pid: int
    can_share: bool
    can_share_gpu: bool
    cores: list[int]
    quota: float
    gpu: str  # by which it can be told from others; "" for a CPU

    @classmethod
    def of(cls, device: torch.device) -> "_Host":
        """Returns what this rank tells."""
        gpu = _gpu_uuid(device) if device.type == "cuda" else ""
        return cls(
            machine=machine_id(),
            pid=os.getpid(),
            can_share=_can_share() and (device.type == "cpu" or gpu not in ("", _UNKNOWN)),
            can_share_gpu=environment(VARIABLE) == "gpu",
            cores=usable_cores(),
            quota=cpu_quota(),
            gpu=gpu,
        )


def _gpu_uuid(device: torch.device) -> str:
    """Returns by what a GPU can be told from others."""
    try:
        return str(torch.cuda.get_device_properties(device).uuid)
    except (AssertionError, RuntimeError):  # a driver or a torch without it
        return _UNKNOWN


def _can_all_share(hosts: Sequence[_Host]) -> bool:
    """Whether ranks are on one machine, want to share memory, and would gain: with a GPU each, they have NCCL."""
    gpus = [host.gpu for host in hosts if host.gpu]
    if gpus and not (all(host.can_share_gpu for host in hosts) and _are_processes(hosts)):
        return False
    has_each_one = len(gpus) == len(set(gpus)) == len(hosts)
    return len({host.machine for host in hosts}) == 1 and all(host.can_share for host in hosts) and not has_each_one


def _are_processes(hosts: Sequence[_Host]) -> bool:
    """Whether no two ranks are threads of one process."""
    return len({host.pid for host in hosts}) == len(hosts)


def _have_own_cores(hosts: Sequence[_Host]) -> bool:
    """Whether a rank that spins takes no time from another one."""
    num_cores = len(set[int]().union(*(host.cores for host in hosts)))  # ranks may be bound to one each
    return len(hosts) <= num_cores and min(host.quota for host in hosts) >= 1 and _are_processes(hosts)


def _have_one_gpu(hosts: Sequence[_Host]) -> bool:
    """Whether all ranks share one GPU."""
    return bool(hosts[0].gpu) and len({host.gpu for host in hosts}) == 1


def _shape_for(hosts: Sequence[_Host]) -> Shape:
    """Returns how the memory is divided; slots are whole pages."""
    slot_bytes = min(SLOT_BYTES, max(1 << 16, MOST_BYTES // (NUM_SLOTS * len(hosts)) // 4096 * 4096))
    if any(host.gpu for host in hosts) and not _have_one_gpu(hosts):
        slot_bytes = min(slot_bytes, PINNED_SLOT_BYTES)
    return Shape(len(hosts), NUM_SLOTS, slot_bytes)


def _open_accesses(
    opening: "_Opening", memory: MappedMemory, hosts: Sequence[_Host], device: torch.device
) -> dict[str, SlotAccess] | None:
    """Returns how this rank reaches slots, by the type of a tensor's device; None, on all ranks, if one cannot."""
    has_gpus = any(host.gpu for host in hosts)
    accesses: dict[str, SlotAccess] = {"cpu": HostAccess(memory.slots, sums_in_slices=not has_gpus)}
    of_gpus: dict[str, SlotAccess] | None = {} if not has_gpus else None
    if _have_one_gpu(hosts):
        of_gpus = _device_access(opening, memory.shape, device)
    if of_gpus is None:
        of_gpus = _staged_access(opening, memory, device)
    return None if of_gpus is None else accesses | of_gpus


def have_own_gpus(devices: Sequence[Device]) -> bool:
    """Whether every rank has a GPU of its own."""
    identities = {device.identity for device in devices}
    return len(identities) == len(devices) and all(device.kind == "cuda" and device.identity for device in devices)


def _device_access(opening: "_Opening", shape: Shape, device: torch.device) -> dict[str, SlotAccess] | None:
    """Returns the slots in memory of the ranks' GPUs; None, on all ranks, if one cannot map that of another."""
    own, handles, refusal = None, None, ""
    try:
        own = DeviceSlots.make(shape, device)
        handles = own.handles
    except (OSError, RuntimeError) as error:
        refusal = str(error)
    rows = opening.exchange("device", handles)
    members: list[DeviceSlots] = []
    for number, row in enumerate(rows):
        if number == opening.number and own is not None:
            members.append(own)
        elif row is None:
            refusal = refusal or f"rank {number} of the group shares no device memory"
        elif not refusal:
            try:
                members.append(DeviceSlots.open(row, shape, device))
            except (OSError, RuntimeError) as error:
                refusal = str(error)
    if not opening.all_agree("device-mapped", refusal, "copy between their GPUs through the host, which is slower"):
        for member in members:
            if member is not own:
                member.memory.close()
        opening.exchange("device-unmapped", None)
        if own is not None:
            own.memory.close()
        return None
    return {"cuda": DeviceAccess(members, opening.number, device, num_slots=shape.num_slots)}


def _staged_access(opening: "_Opening", memory: MappedMemory, device: torch.device) -> dict[str, SlotAccess] | None:
    """Returns the slots that a GPU reaches in the host's memory; none are needed on a rank without one."""
    access: dict[str, SlotAccess] = {}
    refusal = ""
    if device.type == "cuda":
        try:
            access["cuda"] = StagedAccess(memory, opening.number, device)
        except (OSError, RuntimeError) as error:
            refusal = str(error)
    if opening.all_agree("staged", refusal, _BY_NETWORK):
        return access
    for staged in access.values():
        staged.close(is_idle=True, have_others_closed=lambda: True)
    return None


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
            return memory if self.all_agree("mapped", reason, _BY_NETWORK) else None
        token = secrets.token_bytes(_TOKEN_BYTES)
        try:
            file = SharedFile(shape.size_bytes)
        except OSError as error:
            self.exchange("memory", ["", "", str(error)])
            self.all_agree("mapped", str(error), _BY_NETWORK)
            return None
        try:
            memory, refusal = _map(file.descriptor, shape, spin_s=spin_s)
            if memory is not None:
                refusal = _prepare(memory, token)
            self.exchange("memory", [file.path, token.hex(), refusal])
            return memory if self.all_agree("mapped", refusal, _BY_NETWORK) else None
        finally:
            file.close()  # all have mapped it, or will not

    def all_agree(self, what: str, refusal: str, instead: str) -> bool:
        """Returns whether no rank has a reason to refuse; the first rank says which has, and what ranks do instead."""
        refusals = self.exchange(what, refusal)
        found = next(((rank, text) for rank, text in zip(self._ranks, refusals, strict=True) if text), None)
        if found is not None and self.number == 0:
            logger.warning(
                "ranks %s are on one machine but do not share its fastest memory, because of rank %d: %s. They %s; "
                "%s=0 chooses the network interface without this message.",
                self._ranks,
                *found,
                instead,
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
