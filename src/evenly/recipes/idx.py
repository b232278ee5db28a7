"""The idx files of MNIST and its relatives."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch

from evenly._errors import DataError

_TYPES = {8: torch.uint8}


def read_idx(path: Path) -> torch.Tensor:
    """Returns the array in an idx file, packed by gzip or not; raises `DataError` where the file is not whole."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, str(error)) from None
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _TYPES:
        raise _unreadable(path, "it does not begin like an idx file of bytes")
    dims = raw[3]
    header = 4 + 4 * dims
    if len(raw) < header:
        raise _unreadable(path, "its header is cut short")
    shape = struct.unpack(f">{dims}I", raw[4:header])
    if len(raw) - header != math.prod(shape):
        raise _unreadable(path, f"it should hold {math.prod(shape)} bytes for {shape} but holds {len(raw) - header}")
    if not math.prod(shape):
        raise _unreadable(path, f"it holds nothing: {shape}")
    return torch.frombuffer(bytearray(raw[header:]), dtype=_TYPES[raw[2]]).reshape(shape)


def _unreadable(path: Path, reason: str) -> DataError:
    return DataError(f"{path} cannot be read as an idx file: {reason}. Fetch the file again.")
