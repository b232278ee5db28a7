"""Where the store of a run listens: at loopback for ranks of one machine, else at the master address only.

torch's `TCPStore` listens at all addresses of the machine unless it is given a socket, and has no authentication.
"""

import errno
import logging
import socket
from collections.abc import Callable
from datetime import timedelta

from evenly._torch.process_groups import TCPStore
from evenly.launch.addresses import is_loopback, is_loopback_name

logger = logging.getLogger(__name__)

BACKLOG = 4096
Address = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]  # of a socket


def serve_store(addr: str, port: int, *, world_size: int, timeout_s: float, is_local: bool) -> TCPStore:
    """Returns a store that this process serves at `addr`.

    Args:
        addr: the address or name that the other ranks use.
        port: where to listen.
        world_size: how many ranks there will be.
        timeout_s: time limit of the store's own waits.
        is_local: whether all ranks are on this machine.
    """
    bound = listen_at(addr, port, is_local=is_local)
    return TCPStore(
        addr,
        port,
        world_size,
        True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=None if bound is None else bound.detach(),  # the store closes it
    )


def listen_at(addr: str, port: int, *, is_local: bool) -> socket.socket | None:
    """Returns a socket that listens at `addr` alone; None where torch has to choose.

    That is the case if this process already has a store at the port, which it reuses, or if other machines reach this
    one by an address that it does not have itself.
    """
    try:
        addresses = socket.getaddrinfo(addr, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    addresses.sort(key=lambda entry: entry[0] != socket.AF_INET)  # IPv4 first: some machines have no IPv6
    problem = "it is not an address of this machine"
    for family, _, _, _, address in addresses:
        if is_loopback(str(address[0])) and not (is_local or is_loopback_name(addr)):
            problem = "here it is a name for this machine alone, as /etc/hosts says"
            continue
        try:
            return _listen(family, address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            problem = error.strerror or problem
    logger.warning("the store listens at all addresses of this machine, not only at %s: %s", addr, problem)
    return None


def _listen(family: int, address: Address) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError:
        bound.close()
        raise
    return bound


def bound_store(make: Callable[..., TCPStore]) -> Callable[..., TCPStore]:
    """Returns `make`, torch's `TCPStore`, such that one that serves listens at the address it is given."""

    def open_store(
        addr: str, port: int, world_size: int, is_master: bool, *rest: object, **options: object
    ) -> TCPStore:
        bound = listen_at(addr, port, is_local=False) if is_master else None
        if bound is not None:
            options["master_listen_fd"] = bound.detach()
        return make(addr, port, world_size, is_master, *rest, **options)

    return open_store
