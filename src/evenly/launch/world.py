"""All ranks meet, and a gloo process group opens; whoever does not come is named."""

import logging
import time
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch.distributed as dist

from evenly._torch.process_groups import HashStore, PrefixStore, Store, default_store, num_registered_groups
from evenly.errors import LaunchError, SpecError
from evenly.launch.launchers.place import Place
from evenly.launch.limits import NoAnswerError, call_within
from evenly.launch.rendezvous import meet
from evenly.spec.exchange import MOST_S

_log = logging.getLogger(__name__)


class World:
    """An open default process group with its store; a context manager that closes what it opened."""

    def __init__(self, place: Place, *, store: Store, opened: bool) -> None:
        self.place = place
        self.store = store
        self.opened = opened
        self._closed = False

    def restrict(self, ranks: Sequence[int], *, timeout_s: float) -> None:
        """Replaces the default process group by one of `ranks`, which all call it; others leave it as it is.

        Collectives of the script then run among these ranks. A group that the script opened, or that others of its
        groups were made from, stays: a warning says that it still has all ranks.
        """
        if not self.opened or num_registered_groups() > 1:
            _log.warning(
                "the process group that the script opened still has %d ranks, of which only %s train: collectives of "
                "the script over it would wait for the others. Use session.sum, session.gather and session.feed",
                self.place.world_size,
                ", ".join(map(str, ranks)),
            )
            return
        dist.destroy_process_group()
        store = PrefixStore(f"ranks {','.join(map(str, ranks))}", self.store)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=ranks.index(self.place.rank),
            world_size=len(ranks),
            timeout=timedelta(seconds=timeout_s),
        )

    def close(self) -> None:
        """Ends the process group if this world opened it; a second call does nothing."""
        if self.opened and not self._closed and dist.is_initialized():
            dist.destroy_process_group()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_world(place: Place, *, timeout_s: float = 300.0) -> World:
    """Returns the world of `place`, with the default process group open on gloo.

    A group the script opened before is used as it is and left open by `World.close`. Otherwise every rank announces
    itself and waits for the others; after `timeout_s` seconds `LaunchError` names the ranks that did not arrive. The
    same limit then holds for each collective of the group.
    """
    if not 0 < timeout_s < MOST_S:
        raise SpecError(f"timeout_s={timeout_s} was given. Give seconds above 0, and less than {MOST_S:g}.")
    if dist.is_initialized():
        return _reuse(place)
    began = time.monotonic()
    store = HashStore() if place.world_size == 1 else meet(place, timeout_s=timeout_s)
    _initialize(place, store=store, timeout_s=timeout_s)
    _log.info("rank %d of %d: world open after %.2f s", place.rank, place.world_size, time.monotonic() - began)
    return World(place, store=store, opened=True)


def _initialize(place: Place, *, store: Store, timeout_s: float) -> None:
    limit = timedelta(seconds=timeout_s)
    try:
        call_within(
            timeout_s + 1.0,
            lambda: dist.init_process_group(
                "gloo", store=store, rank=place.rank, world_size=place.world_size, timeout=limit
            ),
        )
    except (RuntimeError, NoAnswerError) as error:
        reason = (str(error).splitlines() or [f"no answer within {timeout_s:g} s"])[0]
        raise LaunchError(
            f"rank {place.rank} of {place.world_size} was to open a gloo group; all ranks had arrived, yet they could "
            f"not connect to each other: {reason}. Check that the hosts reach each other by name, "
            "or set GLOO_SOCKET_IFNAME to the network interface to use."
        ) from error


def _reuse(place: Place) -> World:
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) != (place.rank, place.world_size):
        raise LaunchError(
            f"a world was to be opened for rank {place.rank} of {place.world_size} ({place.launcher}); this process "
            f"has a group open already, as rank {rank} of {size}. Pass find_place the rank, world_size and local_rank "
            "of that group, or let evenly open the group."
        )
    return World(place, store=default_store(), opened=False)
