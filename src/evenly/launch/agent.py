"""torchrun, whose store listens only at the master address: `python -m evenly.launch.agent ...`.

The agent of the first node serves the store of its workers. Without this it would listen at all addresses. An agent
that is ended by a signal says so in one line; SIGUSR1, by which a session saves and ends, is passed on to the workers.
"""

import logging
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType

import psutil
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

from evenly._torch.agent_signals import count_repeated_signals_once
from evenly.launch.serving import bound_store
from evenly.launch.signals import SAME_SIGNAL_S


def main() -> None:
    """Runs torchrun with the arguments of this process."""
    # No argument or setting of torchrun reaches the store, so the name it is made by is replaced (torch 2.11 to 2.13,
    # in this process only).
    static_tcp_rendezvous.TCPStore = bound_store(static_tcp_rendezvous.TCPStore)  # type: ignore[attr-defined,assignment]
    for name in ("agent.server.api", "multiprocessing.api"):  # which signals are sent to whom; errors stay
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.ERROR)
    count_repeated_signals_once(within_s=SAME_SIGNAL_S)
    signal.signal(signal.SIGUSR1, _pass_on)
    try:
        run.main()
    except SignalException as error:
        node = next((word.partition("=")[2] for word in sys.argv if word.startswith("--node-rank=")), "0")
        sys.stderr.write(f"node {node} on {socket.gethostname()} was ended by {error.sigval.name}\n")
        sys.exit(128 + error.sigval.value)


def _pass_on(number: int, _: FrameType | None) -> None:
    """Sends a signal to the workers."""
    for worker in psutil.Process().children():
        with suppress(psutil.Error):
            worker.send_signal(number)


if __name__ == "__main__":
    main()
