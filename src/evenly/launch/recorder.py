"""The flight recorder of torch: whether it is on must be settled before the first collective."""

import os
from collections.abc import MutableMapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # of the recorder, of which torch takes the first


def spare_recorder(found: str, environ: MutableMapping[str, str]) -> None:
    """Turns the flight recorder of torch before 2.13 off, unless its size was chosen.

    It notes the first collective of every group in a table without a lock. An exchange beside the training is made by
    another thread than the averages of a node, so the process could crash there, or never return.

    >>> environ = {}; spare_recorder("2.11.0+cu130", environ); environ
    {'TORCH_FR_BUFFER_SIZE': '0'}
    """
    parts = found.split(".")[:2]
    is_old = all(part.isdigit() for part in parts) and tuple(map(int, parts)) < (2, 13)
    if is_old and not any(size in environ for size in SIZES):
        environ[SIZES[0]] = "0"


def prepare_recorder() -> None:
    """Settles it for the torch that is installed, without loading it."""
    with suppress(PackageNotFoundError):  # one that was built here has no version yet
        spare_recorder(version("torch"), os.environ)
