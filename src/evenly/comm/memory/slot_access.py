"""How a rank reaches the slots of its group: in memory of the host, of its device, or from its device through the host.

A round writes into a slot and reads the slots of all with operations of torch. On a device these only have been queued
when the call returns: what must be complete before another rank goes on is told by events, for which the streams of the
others wait, not their threads.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch

from evenly.comm.memory.cuda_runtime import DeviceMemory
from evenly.comm.memory.mapping import MappedMemory, Shape
from evenly.comm.memory.rounds import Round, Slots

ARRIVED, REDUCED, READ = range(3)  # what ranks tell each other in a round: written, summed, may be written again
PHASES = (ARRIVED, REDUCED, READ)
LIMIT_S = 5.0  # for the work of a device, when a group is closed
_NOTHING = nullcontext()
ROUNDS_AHEAD = 32  # that a rank starts before its device has done half of them


class SlotAccess(ABC):
    """The slots of a group as one rank reaches them; by default, operations are complete when they return."""

    place = "host"  # where the slots are, which must be the same for all ranks
    sums_in_slices = True  # whether each rank may sum a slice of long tensors for all

    @abstractmethod
    def slots(self, slot: int) -> Slots:
        """Returns the bytes of each rank in a slot, as rounds write and read them."""

    @abstractmethod
    def close(self, *, is_idle: bool, have_others_closed: Callable[[], bool]) -> bool:
        """Ends the use of the slots, and returns whether it has ended.

        Without `is_idle` a device may still work on them, and wait for ever: then it has not.
        """

    def current_stream(self) -> torch.cuda.Stream | None:
        """Returns the stream to which work goes now."""
        return None

    def on(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        """Returns a context in which work goes to this stream."""
        return _NOTHING

    def before_write(self, slot: int, *, is_first: bool) -> None:  # noqa: B027  # a host has nothing to do
        """Sees to it that all have read what was in the slot before this rank writes it; the `first` time none has."""

    def before_post(self, phase: int, slot: int, item: Round) -> None:  # noqa: B027  # a host has nothing to do
        """Sees to it that what this rank did is complete where another one continues, before this one says so."""

    def after_take(self, phase: int, slot: int, item: Round) -> None:  # noqa: B027  # a host has nothing to do
        """Sees to it that what this rank does next begins after what all others have said to be complete."""

    def is_behind(self) -> bool:
        """Whether the device has so much to do that this rank should wait before it gives it more."""
        return False


@final
class HostAccess(SlotAccess):
    """Slots in memory of the host, for tensors of the host."""

    def __init__(self, slots: torch.Tensor, *, sums_in_slices: bool = True) -> None:
        self.sums_in_slices = sums_in_slices
        self._slots: list[Slots] = [list(slot.unbind()) for slot in slots.unbind()]

    def slots(self, slot: int) -> Slots:
        """Returns the bytes of each rank in a slot."""
        return self._slots[slot]

    def close(self, *, is_idle: bool, have_others_closed: Callable[[], bool]) -> bool:
        """Lets go of the memory."""
        self._slots = []
        return True


class _CudaAccess(SlotAccess):
    """Slots for tensors of a CUDA device, whose operations are queued on streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current_stream(self) -> torch.cuda.Stream:
        """Returns the stream of the device that is current."""
        return torch.cuda.current_stream(self._device)

    def on(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        """Returns a context with this stream."""
        return torch.cuda.stream(stream)


class DeviceSlots:
    """What one rank gives the others: its slots in memory of its device, and an event for each slot and phase."""

    def __init__(self, memory: DeviceMemory, events: list[list[torch.cuda.Event]]) -> None:
        self.memory = memory
        self.events = events  # by slot and phase

    @classmethod
    def make(cls, shape: Shape, device: torch.device) -> "DeviceSlots":
        """Returns the slots of this rank; `OSError` or `RuntimeError` if the device cannot share them."""
        free_retired()
        stream = torch.cuda.current_stream(device)
        events = [[torch.cuda.Event(interprocess=True) for _ in PHASES] for _ in range(shape.num_slots)]
        for event in (event for row in events for event in row):
            event.record(stream)  # from here on it belongs to the device
        return cls(DeviceMemory.allocate(shape.num_slots * shape.slot_bytes, device), events)

    @property
    def handles(self) -> tuple[str, list[list[str]]]:
        """By what other processes open the memory and the events."""
        events = [[event.ipc_handle().hex() for event in row] for row in self.events]
        return self.memory.handle.hex(), events

    @classmethod
    def open(cls, handles: tuple[str, list[list[str]]], shape: Shape, device: torch.device) -> "DeviceSlots":
        """Returns the slots of another rank; `OSError` or `RuntimeError` if the device does not reach them."""
        memory_handle, rows = handles
        open_event = torch.cuda.Event.from_ipc_handle
        events = [[open_event(device, bytes.fromhex(text)) for text in row] for row in rows]  # type: ignore[no-untyped-call]  # torch has no annotation here
        return cls(DeviceMemory.open(bytes.fromhex(memory_handle), shape.num_slots * shape.slot_bytes, device), events)


@final
class DeviceAccess(_CudaAccess):
    """Slots in the memory of one CUDA device, which every rank maps: for ranks that share the device."""

    place = "device"

    def __init__(self, members: Sequence[DeviceSlots], rank: int, device: torch.device, *, num_slots: int) -> None:
        super().__init__(device)
        self._members = list(members)
        self._rank = rank
        self._num_read = 0  # rounds
        self._marks: list[torch.cuda.Event] = []  # after every half of `ROUNDS_AHEAD` rounds, the last two
        rows = [member.memory.bytes.view(num_slots, -1).unbind() for member in members]
        self._slots: list[Slots] = [list(slots) for slots in zip(*rows, strict=True)]

    def slots(self, slot: int) -> Slots:
        """Returns the bytes of each rank in a slot."""
        return self._slots[slot]

    def before_write(self, slot: int, *, is_first: bool) -> None:
        """Lets the stream wait until all have read the slot."""
        if not is_first:
            self._wait(READ, slot)

    def before_post(self, phase: int, slot: int, item: Round) -> None:
        """Records the event of this rank, which the streams of the others wait for."""
        stream = self.current_stream()
        self._members[self._rank].events[slot][phase].record(stream)
        if phase == READ:
            self._num_read += 1
            if self._num_read % (ROUNDS_AHEAD // 2) == 0:
                mark = torch.cuda.Event()
                mark.record(stream)
                self._marks = [*self._marks[-1:], mark]

    def after_take(self, phase: int, slot: int, item: Round) -> None:
        """Lets the stream wait for the events of all, which they have recorded."""
        self._wait(phase, slot)

    def _wait(self, phase: int, slot: int) -> None:
        stream = self.current_stream()
        for member in self._members:  # this rank's own, too: it may have used another stream
            stream.wait_event(member.events[slot][phase])

    def is_behind(self) -> bool:
        """Whether the device has not done what was queued some rounds ago.

        Its queue would fill otherwise, and a thread that waits there would not notice that another rank has died.
        """
        is_due = len(self._marks) > 1 and self._num_read % (ROUNDS_AHEAD // 2) == 0
        return is_due and not self._marks[0].query()

    def close(self, *, is_idle: bool, have_others_closed: Callable[[], bool]) -> bool:
        """Unmaps the memory of the others; this rank's own is freed once they have unmapped it."""
        self._slots, self._marks = [], []
        members, self._members = self._members, []
        is_done = is_idle and _are_done([row[READ] for member in members for row in member.events])
        if not is_done:
            _kept.extend(members)  # the end of the process gives it back
            return False
        for rank, member in enumerate(members):
            if rank != self._rank:
                member.memory.close()
        with _lock:
            _retired.append((members[self._rank], have_others_closed))
        free_retired()
        return True


_lock = threading.Lock()
_retired: list[tuple[DeviceSlots, Callable[[], bool]]] = []  # that other processes may have mapped
_kept: list[DeviceSlots] = []  # that a device may wait for ever to use


def free_retired() -> None:
    """Frees device memory of groups that all members have closed."""
    with _lock:
        unused = [entry for entry in _retired if not _kept and entry[1]()]
        for entry in unused:
            _retired.remove(entry)
            entry[0].memory.close()


def _are_done(events: Sequence[torch.cuda.Event]) -> bool:
    """Returns whether devices have come to these events within a few seconds: one may wait for a rank that has died."""
    until = time.monotonic() + LIMIT_S
    for event in events:
        while not event.query():
            if time.monotonic() > until:
                return False
            time.sleep(0.001)
    return True


@final
class StagedAccess(_CudaAccess):
    """Slots in memory of the host that a CUDA device copies from and to; rounds work on copies on the device.

    For ranks on different devices, such as a GPU and a CPU.
    """

    sums_in_slices = False  # the slices would be copied twice more

    def __init__(self, memory: MappedMemory, rank: int, device: torch.device) -> None:
        """Begins the use of memory of the host; `OSError` or `RuntimeError` if the device cannot copy from it."""
        super().__init__(device)
        self._slots: Slots = list(torch.empty(memory.slots.shape[1:], dtype=torch.uint8, device=device).unbind())
        memory.register(device)
        self._memory = memory
        self._host: list[Slots] = [list(slot.unbind()) for slot in memory.slots.unbind()]
        self._rank = rank
        self._copied = torch.cuda.Event(blocking=True)
        self._used = torch.cuda.Event(blocking=True)  # the copies, by the last round
        self._used.record(self.current_stream())

    def slots(self, slot: int) -> Slots:
        """Returns the copies of each rank's bytes; one for all slots, since rounds work on them one after another."""
        return self._slots

    def before_write(self, slot: int, *, is_first: bool) -> None:
        """Lets the stream wait until the round before has used the copies, on whatever stream."""
        self.current_stream().wait_event(self._used)

    def before_post(self, phase: int, slot: int, item: Round) -> None:
        """Returns once the host has what this rank has written, or the device what it reads."""
        if phase == READ:
            self._used.record(self.current_stream())
            self._copied.synchronize()
            return
        start, stop = item.span(self._rank, None)
        if start < stop:
            self._host[slot][self._rank][start:stop].copy_(self._slots[self._rank][start:stop], non_blocking=True)
            self._copied.record(self.current_stream())
            self._copied.synchronize()

    def after_take(self, phase: int, slot: int, item: Round) -> None:
        """Starts copying what the others have written for this rank."""
        stream = self.current_stream()
        stream.wait_event(self._used)
        for source, copy in enumerate(self._slots):  # this rank's own, too: a later round may have been written since
            start, stop = item.span(source, self._rank)
            if start < stop:
                copy[start:stop].copy_(self._host[slot][source][start:stop], non_blocking=True)
        self._copied.record(stream)

    def close(self, *, is_idle: bool, have_others_closed: Callable[[], bool]) -> bool:
        """Lets go of the memory."""
        if self._host:
            self._used.synchronize()
            self._memory.unregister()
        self._host, self._slots = [], []
        return True
