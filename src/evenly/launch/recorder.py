"""The flight recorder of torch, which is not safe for two threads before torch 2.13."""

import os
from functools import cache

import torch

from evenly._torch.process_groups import make_recorder

SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # of the recorder; torch takes the first that is set


@cache
def disable_unsafe_recorder() -> None:
    """Creates the recorder of gloo's collectives, turned off, if it is not safe and its size was not set.

    It records the first collective of every group in a table without a lock (pytorch/pytorch#179449). An overlapped
    exchange runs in another thread than the averages of a node, so a process could crash or hang there. NCCL's
    recorder, and a recorder that exists already, stay as they are.
    """
    if is_safe(torch.__version__) or any(size in os.environ for size in SIZES):
        return
    os.environ[SIZES[0]] = "0"
    try:
        make_recorder()
    finally:
        os.environ.pop(SIZES[0], None)


def is_safe(version: str) -> bool:
    """Returns whether the recorder of this torch has its lock.

    >>> is_safe("2.11.0+cu130"), is_safe("2.13.0a0+git1234")
    (False, True)
    """
    parts = version.split(".")[:2]
    return not all(part.isdigit() for part in parts) or tuple(map(int, parts)) >= (2, 13)
