"""Free ports of this machine."""

import random
import socket

from evenly.errors import LaunchError


def free_port() -> int:
    """Returns an unused port of this machine.

    It is below the range of ephemeral ports, so that no other connection takes it before it is used.
    """
    for port in random.SystemRandom().sample(range(15_000, 30_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise LaunchError("a free port was looked for, and 100 between 15000 and 30000 are taken. Close some programs.")
