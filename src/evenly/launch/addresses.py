"""Addresses that people write: HOST:PORT, and whether the host is this machine."""

import ipaddress
import re
import socket

from evenly.errors import SpecError


def parse_address(text: str, *, source: str) -> tuple[str, int]:
    """Returns host and port; `source` names where the text was given.

    >>> parse_address("box1:29400", source="--coordinator"), parse_address("[::1]:29400", source="--coordinator")
    (('box1', 29400), ('::1', 29400))
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not (re.fullmatch(r"[^\s\[\]/@]{1,253}", host) and re.fullmatch(r"[0-9]{1,5}", port) and int(port) < 65536):
        raise SpecError(
            f"{source} {text[:80] or '(nothing)'} was given; an address has a host and a port up to 65535. Write "
            f"{source} HOST:PORT, such as 10.0.0.1:29400."
        )
    return host, int(port)


def parse_coordinator(text: str, *, source: str) -> tuple[str, int] | str:
    """Returns host and port, or the text as it is if it names an etcd: `etcd://HOST:PORT,...`."""
    return text if text.startswith("etcd://") else parse_address(text, source=source)


def address_text(address: tuple[str, int] | str) -> str:
    """Returns an address as people write it.

    >>> address_text(("::1", 29400))
    '[::1]:29400'
    """
    if isinstance(address, str):
        return address
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_towards(server: tuple[str, int]) -> str:
    """Returns the address by which this machine reaches `server`; raises `OSError` if there is no way to it."""
    family, _, _, _, address = socket.getaddrinfo(*server, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def own_addresses(host: str) -> list[str]:
    """Returns those addresses of `host` that this machine has; none if it is another machine or unknown."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(address[0]) for family, _, _, _, address in found if _can_bind(family, str(address[0]))]


def is_loopback_name(addr: str) -> bool:
    """Whether `addr` means the machine itself on every machine."""
    return addr == "localhost" or is_loopback(addr)


def is_loopback(addr: str) -> bool:
    """Whether `addr` is an IP address that is reached from its own machine only."""
    try:
        return ipaddress.ip_address(addr.partition("%")[0]).is_loopback
    except ValueError:
        return False


def answers(address: tuple[str, int], *, timeout_s: float = 0.5) -> bool:
    """Returns whether something listens at `address`."""
    try:
        socket.create_connection(address, timeout=timeout_s).close()
    except (OSError, UnicodeError):
        return False
    return True


def _can_bind(family: int, address: str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
