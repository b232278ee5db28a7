"""torchrun, whose store listens only at the master address: `python -m evenly.launch.agent ...`.

The agent of the first node serves the store of its workers. Without this it would listen at all addresses, and end
while the agent of another node still asks it whether all are done. An agent that is ended by a signal says so in one
line; SIGUSR1, by which a session saves and ends, is passed on to the workers.
"""

import logging
import signal
import socket
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import NamedTuple

import psutil
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

from evenly._torch.agent_signals import count_repeated_signals_once
from evenly._torch.process_groups import TCPStore
from evenly.launch.serving import bound_store
from evenly.launch.signals import SAME_SIGNAL_S

_LEAVE_S = 10.0  # for how long the store is served to agents that are not done with it
_POLL_S = 0.02


class _Opened(NamedTuple):
    """The store that the agents share."""

    store: TCPStore
    num_agents: int
    serves: bool


def main() -> None:
    """Runs torchrun with the arguments of this process."""
    make, opened = bound_store(TCPStore), list[_Opened]()

    def open_and_keep(
        addr: str, port: int, world_size: int, is_master: bool, *rest: object, **options: object
    ) -> TCPStore:
        store = make(addr, port, world_size, is_master, *rest, **options)
        opened.append(_Opened(store, num_agents=world_size, serves=is_master))
        return store

    # No argument or setting of torchrun reaches the store, so the name it is made by is replaced (torch 2.11 to 2.13,
    # in this process only).
    static_tcp_rendezvous.TCPStore = open_and_keep  # type: ignore[attr-defined,assignment]
    for name in ("agent.server.api", "multiprocessing.api"):  # which signals are sent to whom; errors stay
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.ERROR)
    count_repeated_signals_once(within_s=SAME_SIGNAL_S)
    signal.signal(signal.SIGUSR1, _pass_on)
    try:
        run.main()
        for each in opened:
            _leave(each)
    except SignalException as error:
        node = next((word.partition("=")[2] for word in sys.argv if word.startswith("--node-rank=")), "0")
        sys.stderr.write(f"node {node} on {socket.gethostname()} was ended by {error.sigval.name}\n")
        sys.exit(128 + error.sigval.value)


def _leave(opened: _Opened) -> None:
    """Says that this agent is done; the one that serves the store returns once all have said so.

    torchrun's agents wait for each other with a key that the last one sets before it waits for that key itself. If the
    server is gone by then, the last one prints a traceback after a run in which nothing failed.
    """
    deadline = time.monotonic() + _LEAVE_S
    with suppress(RuntimeError):  # the server gave up waiting
        num_left = opened.store.add("evenly/left", 1)
        while opened.serves and num_left < opened.num_agents and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            num_left = opened.store.add("evenly/left", 0)


def _pass_on(number: int, _: FrameType | None) -> None:
    """Sends a signal to the workers."""
    for worker in psutil.Process().children():
        with suppress(psutil.Error):
            worker.send_signal(number)


if __name__ == "__main__":
    main()
