"""torchrun, whose store listens only at the master address: `python -m evenly.launch.agent ...`.

The agent of the first node serves the store of its workers. Without this it would listen at all addresses. An agent
that is ended by a signal says so in one line.
"""

import logging
import socket
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

from evenly.launch.serving import bound_store


def main() -> None:
    """Runs torchrun with the arguments of this process."""
    # No argument or setting of torchrun reaches the store, so the name it is made by is replaced (torch 2.11 to 2.13,
    # in this process only).
    static_tcp_rendezvous.TCPStore = bound_store(static_tcp_rendezvous.TCPStore)  # type: ignore[attr-defined,assignment]
    for name in ("agent.server.api", "multiprocessing.api"):  # which signals are sent to whom; errors stay
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.ERROR)
    try:
        run.main()
    except SignalException as error:
        node = next((word.partition("=")[2] for word in sys.argv if word.startswith("--node-rank=")), "0")
        sys.stderr.write(f"node {node} on {socket.gethostname()} was ended by {error.sigval.name}\n")
        sys.exit(128 + error.sigval.value)


if __name__ == "__main__":
    main()
