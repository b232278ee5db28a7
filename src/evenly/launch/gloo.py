"""Environment variables that affect gloo's connections."""

import os

APART = ("TORCH_GLOO_LAZY_INIT", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER")  # with these set, groups cannot share devices
INTERFACE = "GLOO_SOCKET_IFNAME"


def shared_device_key() -> tuple[int, str] | None:
    """Returns what groups must have in common to share a gloo device: process and interfaces. None if they cannot.

    They cannot if devices connect lazily, since such a device is shut down with the first group that is closed, nor if
    connections are numbered by rank, since those of two groups would have the same numbers.
    """
    if any(os.environ.get(name) for name in APART):
        return None
    return os.getpid(), os.environ.get(INTERFACE, "")
