"""The rendezvous of the ranks of a run: one store, one key per rank, one time limit."""

import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from evenly._torch.process_groups import Store, TCPStore
from evenly.errors import LaunchError, PeerError
from evenly.launch.launchers.place import Place
from evenly.launch.limits import BoundedStore, NoAnswerError, call_within
from evenly.launch.serving import serve_store
from evenly.launch.settings import environment

RESOLVE_S = 6.0  # a host name that is unknown for so long is wrong; name services may be slow at the start of a job

_num_rendezvous: Counter[tuple[str, int]] = Counter()  # at each address, in this process


def meet(place: Place, *, timeout_s: float) -> Store:
    """Returns the store all ranks share, once every rank has announced itself in it.

    The store of torchrun's agent outlives a world and a restart, so both are counted in the names of the keys. A random
    token in them separates two runs that use one store.
    """
    master = _master(place)
    prefix = f"evenly/{environment('TORCHELASTIC_RESTART_COUNT') or 0}/{_num_rendezvous[master]}"
    missing: list[int] = []
    reason = ""
    own_token, began = secrets.token_hex(16), time.monotonic()
    for remaining_s in _tries(timeout_s):
        try:
            limit_s = max(remaining_s, 1.0)
            store = BoundedStore(_connect(place, timeout_s=limit_s), timeout_s=limit_s).prefixed(prefix)
            token = environment("EVENLY_TOKEN") or _common_token(place, own_token, store=store, timeout_s=remaining_s)
            if not token:
                missing = [0]
                continue
            run_store = store.prefixed(token)
            for missing in _missing_ranks(place, store=run_store, timeout_s=remaining_s):
                if not missing:
                    _num_rendezvous[master] += 1
                    return run_store.raw
        except (NoAnswerError, PeerError):
            reason = "something listened there but gave no answer"
        except (socket.gaierror, UnicodeError) as error:  # the host name is unknown or invalid
            reason = str(getattr(error, "strerror", None) or error)
            if time.monotonic() - began > min(RESOLVE_S, 0.9 * timeout_s):
                raise _unresolved(place, reason) from None
        except OSError as error:  # nothing listens there yet
            reason = str(error.strerror or error)
        except dist.DistError as error:  # the store ended with a rank 0 that gave up or restarts
            reason = str(error).splitlines()[0]
    raise _absent(place, missing=missing, timeout_s=timeout_s) if missing else _unreachable(place, reason, timeout_s)


def _tries(timeout_s: float) -> Iterator[float]:
    """Yields the remaining seconds with growing pauses, and a last time when none are left."""
    deadline, pause_s = time.monotonic() + timeout_s, 0.01
    while (remaining_s := deadline - time.monotonic()) > 0:
        yield remaining_s
        time.sleep(max(0.0, min(pause_s, deadline - time.monotonic())))
        pause_s = min(2 * pause_s, 0.25)
    yield 0.0


def _common_token(place: Place, own_token: str, *, store: BoundedStore, timeout_s: float) -> str:
    """Returns rank 0's token once it is in the store; an empty text if rank 0 does not arrive."""
    if place.rank == 0:
        store.set("token", own_token)
        return own_token
    for _ in _tries(timeout_s):
        if store.check(["token"]):
            return store.get("token").decode()
    return ""


def _missing_ranks(place: Place, *, store: BoundedStore, timeout_s: float) -> Iterator[list[int]]:
    """Announces this rank; yields the ranks not yet announced, repeatedly until the time is over."""
    store.set(f"arrived/{place.rank}", "1")
    missing = list(range(place.world_size))
    for _ in _tries(timeout_s):
        missing = [rank for rank in missing if not store.check([f"arrived/{rank}"])]
        yield missing


def _connect(place: Place, *, timeout_s: float) -> TCPStore:
    """Returns the store at the master's address, which rank 0 serves unless torchrun's agent does."""
    addr, port = _master(place)
    serves = place.rank == 0 and not _agent_serves(place)
    socket.getaddrinfo(addr, port)  # raises if the host is unknown; torch would try until its limit
    if not serves:  # a plain connection first: torch's attempts exceed their limit and fill the log
        socket.create_connection((addr, port), timeout=timeout_s).close()
    is_local = place.local_size == place.world_size
    world_size = place.world_size
    try:
        if serves:
            return serve_store(addr, port, is_local=is_local, world_size=world_size, timeout_s=timeout_s)
        return call_within(timeout_s, lambda: _join_store(addr, port, world_size=world_size, timeout_s=timeout_s))
    except dist.DistNetworkError as error:
        if not serves:
            raise
        raise LaunchError(
            f"rank 0 was to listen on port {port} for the other ranks; {str(error).splitlines()[0]}. "
            "Choose another port with MASTER_PORT, the same on all ranks."
        ) from None


def _join_store(addr: str, port: int, *, world_size: int, timeout_s: float) -> TCPStore:
    limit = timedelta(seconds=timeout_s)
    return TCPStore(addr, port, world_size, False, timeout=limit, wait_for_workers=False, multi_tenant=True)


def _agent_serves(place: Place) -> bool:
    """Whether torchrun's agent, not rank 0, has the store at the address of `place`."""
    environment_master = environment("MASTER_ADDR"), environment("MASTER_PORT")
    place_master = place.master_addr, str(place.master_port)
    return environment("TORCHELASTIC_USE_AGENT_STORE") == "True" and environment_master == place_master


def _master(place: Place) -> tuple[str, int]:
    if place.master_addr is None or place.master_port is None:
        raise LaunchError(
            f"a world of {place.world_size} ranks was to be opened; the place of rank {place.rank} has no master "
            "address. Pass master_addr= and master_port= to find_place."
        )
    return place.master_addr, place.master_port


def _absent(place: Place, *, missing: list[int], timeout_s: float) -> LaunchError:
    *most, last = map(str, missing)
    missing_text = f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
    return LaunchError(
        f"{missing_text} of {place.world_size} did not arrive within {timeout_s:g} s, says rank {place.rank} on "
        f"{socket.gethostname()}; the ranks meet at {place.master_addr}:{place.master_port}. "
        "Look at the output of the missing ranks, or allow more time with timeout_s."
    )


def _unresolved(place: Place, reason: str) -> LaunchError:
    return LaunchError(
        f"rank {place.rank} of {place.world_size} on {socket.gethostname()} was to meet the others at "
        f"{place.master_addr}:{place.master_port}, but {socket.gethostname()} does not know the host "
        f"{place.master_addr!r} ({reason}). Set MASTER_ADDR to a name or IP address of the host of rank 0 that all "
        "hosts can reach, the same on all ranks."
    )


def _unreachable(place: Place, reason: str, timeout_s: float) -> LaunchError:
    return LaunchError(
        f"rank {place.rank} of {place.world_size} on {socket.gethostname()} was to meet the others at "
        f"{place.master_addr}:{place.master_port}; nothing answered there within {timeout_s:g} s ({reason}). "
        "Check that rank 0 is running, that MASTER_ADDR names its host and that MASTER_PORT is open."
    )
