"""Environment variables that affect gloo's connections."""

import os

APART = ("TORCH_GLOO_LAZY_INIT", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER")  # with these set, groups cannot share devices
INTERFACE = "GLOO_SOCKET_IFNAME"


def shared_device_key() -> tuple[int, str] | None:
    """Returns the key of gloo devices, process and interfaces; None if groups cannot share a device.

    Devices that connect lazily are shut down with the first group that is closed, and if connections are numbered by
    rank, those of two groups have the same number.
    """
    if any(os.environ.get(name) for name in APART):
        return None
    return os.getpid(), os.environ.get(INTERFACE, "")
