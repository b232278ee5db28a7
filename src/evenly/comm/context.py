"""Group, alarm and waiter of one common task, opened together and closed together."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from evenly.comm.alarm import Alarm
from evenly.comm.groups import close_groups, open_group
from evenly.comm.moves import Waiter, gather_json
from evenly.comm.party import Party

T = TypeVar("T")


@dataclass(frozen=True)
class GroupContext:
    """All ranks of a party while they do something together."""

    alarm: Alarm
    waiter: Waiter
    group: dist.ProcessGroup

    @property
    def party(self) -> Party:
        """The ranks and their store."""
        return self.alarm.party

    def gather(self, value: T) -> list[T]:
        """Returns every rank's `value`, in the order of ranks; see `gather_json`."""
        return gather_json(value, self.group, self.waiter)

    def meet(self) -> None:
        """Returns when every rank has come here."""
        self.gather(None)


@contextmanager
def open_context(
    party: Party, name: str, *, place: str, timeout_s: float, parent: Alarm | None = None
) -> Iterator[GroupContext]:
    """Yields a group of all ranks of `party` with an alarm and a waiter; every rank calls it together.

    All ranks have come when the body begins. An error in the body is told to the others before anything is closed.

    Args:
        party: the ranks; `chapter` gives a store of its own to each of several contexts.
        name: of the group.
        place: what the ranks do here, for the message of a rank that waits in vain.
        timeout_s: how long a rank waits for the others.
        parent: what rings this alarm rings here too.
    """
    alarm = Alarm(party, parent=parent)
    try:
        waiter = Waiter(alarm, place=place, timeout_s=timeout_s)
        with ring_on_error(alarm):
            waiter.roll_call()
        with open_for_now(party, name, range(party.size), alarm=alarm, backend="gloo", timeout_s=timeout_s) as group:
            yield GroupContext(alarm, waiter, group)
    finally:
        alarm.close()


@contextmanager
def open_for_now(
    party: Party, name: str, ranks: Sequence[int], *, alarm: Alarm, backend: str, timeout_s: float
) -> Iterator[dist.ProcessGroup]:
    """Yields a group of `ranks` that is closed at the end; only its members call this.

    An error rings the alarm before the group is closed: the others hear the cause before their connections break.
    """
    with ring_on_error(alarm):
        group = open_group(party, name, ranks, backend=backend, timeout_s=timeout_s)
        try:
            with ring_on_error(alarm):
                yield group
        finally:
            close_groups([group], failed=alarm.has_rung)


@contextmanager
def ring_on_error(alarm: Alarm, *, closes: bool = False) -> Iterator[None]:
    """Tells the other ranks of an error in the body; `closes` also ends the alarm then."""
    try:
        yield
    except BaseException as error:
        alarm.ring(error)
        if closes:
            alarm.close()
        raise
