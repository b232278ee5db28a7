"""Process group, failure monitor and waiter of one common task, opened and closed together."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from evenly.comm.collectives import CollectiveWaiter, gather_json
from evenly.comm.failure_monitor import FailureMonitor
from evenly.comm.groups import Group, close_groups, open_group, open_group_inside
from evenly.comm.rank_group import RankGroup
from evenly.spec import Device

T = TypeVar("T")


@dataclass(frozen=True)
class GroupContext:
    """The ranks of a group during one common task."""

    monitor: FailureMonitor
    waiter: CollectiveWaiter
    group: Group

    @property
    def rank_group(self) -> RankGroup:
        """The ranks and their store."""
        return self.monitor.rank_group

    def gather(self, value: T) -> list[T]:
        """Returns every rank's `value`, in the order of ranks; see `gather_json`."""
        return gather_json(value, self.group, self.waiter)

    def meet(self) -> None:
        """Returns when every rank has called it."""
        self.gather(None)


@contextmanager
def open_context(
    rank_group: RankGroup, name: str, *, label: str, timeout_s: float, parent: FailureMonitor | None = None
) -> Iterator[GroupContext]:
    """Yields a group of all ranks of `rank_group` with a failure monitor and a waiter; every rank calls it together.

    All ranks are present when the body begins. An error in the body is reported to the others before anything closes.

    Args:
        rank_group: the ranks; `scoped` gives a store of its own to each of several contexts.
        name: of the group.
        label: what the ranks do here, for the error message of a rank whose wait times out.
        timeout_s: how long a rank waits for the others.
        parent: a monitor whose failures fail here too.
    """
    monitor = FailureMonitor(rank_group, parent=parent)
    try:
        waiter = CollectiveWaiter(monitor, label=label, timeout_s=timeout_s)
        with report_on_error(monitor):
            waiter.barrier()
        with open_temporarily(
            rank_group, name, range(rank_group.size), monitor=monitor, backend="gloo", timeout_s=timeout_s
        ) as group:
            yield GroupContext(monitor, waiter, group)
    finally:
        monitor.close()


@contextmanager
def open_temporarily(
    rank_group: RankGroup,
    name: str,
    ranks: Sequence[int],
    *,
    monitor: FailureMonitor,
    timeout_s: float,
    backend: str = "gloo",
    devices: Sequence[Device] | None = None,
) -> Iterator[Group]:
    """Yields a group of `ranks` that is closed at the end; only its members call this.

    With their `devices` it is the group that they would have as neighbours: see `open_group_inside`. An error is
    reported before the group is closed: the others see the cause before their connections break.
    """
    with report_on_error(monitor):
        group: Group
        if devices is not None:
            group = open_group_inside(rank_group, name, ranks, devices, timeout_s=timeout_s)
        else:
            group = open_group(rank_group, name, ranks, backend=backend, timeout_s=timeout_s)
        try:
            with report_on_error(monitor):
                yield group
        finally:
            close_groups([group], failed=monitor.has_failed)


@contextmanager
def report_on_error(monitor: FailureMonitor, *, closes: bool = False) -> Iterator[None]:
    """Reports an error in the body to the other ranks; `closes` also closes the monitor then."""
    try:
        yield
    except BaseException as error:
        monitor.report(error)
        if closes:
            monitor.close()
        raise
