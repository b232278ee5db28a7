"""What the connections of gloo depend on besides their arguments."""

import os

APART = ("TORCH_GLOO_LAZY_INIT", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER")  # with these no two groups may share them
INTERFACE = "GLOO_SOCKET_IFNAME"


def wires_of_process() -> tuple[int, str] | None:
    """Returns what the ends of gloo's wires belong to, a process and its interfaces; None if groups cannot share them.

    Ends that connect late are shut down with the first group that is closed, and where connections are numbered by
    rank those of two groups have the same number.
    """
    if any(os.environ.get(name) for name in APART):
        return None
    return os.getpid(), os.environ.get(INTERFACE, "")
