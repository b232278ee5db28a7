"""Small files in the form of Fashion-MNIST."""

import gzip
import struct
from pathlib import Path

import torch


def idx(tensor: torch.Tensor, *, kind: int = 8, dims: int | None = None) -> bytes:
    """Returns an array of bytes as the text of an idx file."""
    dims = tensor.ndim if dims is None else dims
    return struct.pack(f">BBBB{tensor.ndim}I", 0, 0, kind, dims, *tensor.shape) + bytes(tensor.flatten().tolist())


def write_images(folder: Path, *, train: int = 64, test: int = 20, packed: bool = True) -> Path:
    """Writes the four files with images that a network can tell apart; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", train), ("t10k", test)):
        labels = torch.arange(count) % 10
        images = torch.randint(40, (count, 28, 28), generator=generator)
        for image, label in zip(images, labels, strict=True):
            image[2 * int(label) : 2 * int(label) + 6] += 200
        for name, tensor in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            raw = idx(tensor)
            (folder / f"{name}{'.gz' * packed}").write_bytes(gzip.compress(raw) if packed else raw)
    return folder
