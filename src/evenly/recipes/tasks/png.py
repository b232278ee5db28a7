"""Writes pictures without a library for them."""

import struct
import zlib
from pathlib import Path

import torch


def write_png(file: Path, image: torch.Tensor) -> None:
    """Writes bytes [channels, height, width] of one grey or three colour channels as a PNG file."""
    channels, height, width = image.shape
    rows = image.to(torch.uint8).permute(1, 2, 0).reshape(height, width * channels).contiguous()
    raw = b"".join(b"\0" + bytes(row.tolist()) for row in rows)  # each row begins with its filter: none
    header = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2}[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b""))
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks))


def tiled(images: torch.Tensor, *, columns: int, gap: int = 2) -> torch.Tensor:
    """Returns images [n, channels, height, width] as one, in rows of `columns`, with dark gaps between."""
    padded = torch.nn.functional.pad(images, (0, gap, 0, gap))
    rows = [torch.cat(list(padded[at : at + columns]), dim=2) for at in range(0, len(padded), columns)]
    return torch.cat(rows, dim=1)[:, :-gap, :-gap]


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
