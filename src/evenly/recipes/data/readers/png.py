"""PNG files with 8-bit RGB and no interlacing -> arrays, without an image library."""

import struct
import zlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


def read_png(raw: bytes) -> NDArray[np.uint8]:
    """Returns the pixels [height, width, 3]; raises `ValueError`, `struct.error` or `zlib.error` for anything else."""
    if raw[:8] != b"\x89PNG\r\n\x1a\n":
        raise ValueError("a sheet is not a PNG file")
    chunks = list(_chunks(raw))
    width, height, *kind = struct.unpack(">IIBBBBB", chunks[0][1] if chunks else b"")
    if kind != [8, 2, 0, 0, 0]:
        raise ValueError(f"a sheet is a PNG file of kind {kind}, not of 8-bit RGB without interlacing")
    data = zlib.decompress(b"".join(body for name, body in chunks if name == b"IDAT"))
    if len(data) != height * (1 + 3 * width):
        raise ValueError(f"a sheet of {width} x {height} pixels holds {len(data)} bytes")
    lines = np.frombuffer(data, np.uint8).reshape(height, 1 + 3 * width)
    pixels = np.zeros((height + 1, width, 3), np.uint8)  # row 0 stands above the first one
    for row, line in enumerate(lines):
        pixels[row + 1] = _unfilter(int(line[0]), line[1:].reshape(width, 3), pixels[row])
    return pixels[1:]


def _chunks(raw: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 8
    while at < len(raw):
        (size,) = struct.unpack(">I", raw[at : at + 4])
        name, body = raw[at + 4 : at + 8], raw[at + 8 : at + 8 + size]
        if raw[at + 8 + size : at + 12 + size] != struct.pack(">I", zlib.crc32(name + body)):
            raise ValueError("a sheet is cut short or damaged")
        yield name, body
        at += 12 + size


def _unfilter(kind: int, line: NDArray[np.uint8], above: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns the pixels [width, 3] of a line that holds differences to the neighbours left and above."""
    if kind == 0:
        return line
    if kind == 1:
        return np.cumsum(line, axis=0, dtype=np.uint8)
    if kind == 2:
        return line + above
    if kind not in (3, 4):
        raise ValueError(f"a line of a sheet has the filter {kind}, but PNG knows 0 to 4")
    predict = _average if kind == 3 else _paeth
    pixels: list[list[int]] = []
    left, corner = [0, 0, 0], [0, 0, 0]
    for differences, up in zip(line.tolist(), above.tolist(), strict=True):
        left = [(d + predict(a, b, c)) % 256 for d, a, b, c in zip(differences, left, up, corner, strict=True)]
        corner = up
        pixels.append(left)
    return np.array(pixels, np.uint8)


def _average(left: int, up: int, corner: int) -> int:
    return (left + up) // 2


def _paeth(left: int, up: int, corner: int) -> int:
    """Returns the one of the three that is nearest to left + up - corner."""
    guess = left + up - corner
    return min((left, up, corner), key=lambda value: abs(guess - value))
