"""Signals to torchrun's agent: one that comes twice must not cut short how it ends its workers.

A signal to a whole process tree reaches the agent by itself and once more from whoever started it. torchrun raises
`SignalException` for each (torch 2.11 to 2.13), and the second one interrupts the time it gives its workers.
"""

import time
from types import FrameType

from torch.distributed.elastic.multiprocessing import api


def count_repeated_signals_once(*, within_s: float) -> None:
    """Lets signals that follow another one within this time do nothing; for the rest of this process."""
    raise_exception = api._terminate_process_handler
    last_s = float("-inf")

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal last_s
        before_s, last_s = last_s, time.monotonic()
        if last_s - before_s > within_s:
            raise_exception(signum, frame)

    api._terminate_process_handler = handle
