"""Sets of image files, decoded by Pillow on access."""

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evenly.errors import DataError
from evenly.recipes.data.sets import ImageSet

if TYPE_CHECKING:
    from types import ModuleType

    from PIL import Image

SHORT_SIDE = 8 / 7  # times the size that is cut out: 256 for 224
CHECKED_HEADERS = 50_000  # of larger sets only the sizes of files are looked at
_log = logging.getLogger(__name__)


class FileImageSet(ImageSet):
    """Image files with their labels, as RGB of `size` x `size`: resized to a short side, and the centre of that."""

    def __init__(self, paths: Sequence[Path], labels: Tensor, *, size: int) -> None:
        super().__init__(torch.empty(0, 3, size, size, dtype=torch.uint8), labels)
        self.paths = tuple(paths)
        self._size = size

    @property
    def images(self) -> Tensor:
        """All images, uint8 [n, 3, size, size]; they are decoded now, and must fit into memory."""
        return self.read(torch.arange(len(self)))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return 3, self._size, self._size

    def read(self, indices: Tensor) -> Tensor:
        """Returns the images uint8 [n, 3, size, size] of these indices; raises `DataError` for an unreadable one."""
        images = [decode_image(self.paths[index], size=self._size) for index in indices.tolist()]
        return torch.stack(images) if images else torch.empty(0, *self.shape, dtype=torch.uint8)


def decode_image(path: Path, *, size: int) -> Tensor:
    """Returns the pixels uint8 [3, size, size] of an image file; raises `DataError` that names it if unreadable."""
    pillow = require_pillow()
    try:
        with pillow.open(path) as opened:
            opened.draft("RGB", (round(SHORT_SIDE * size),) * 2)  # a JPEG is decoded no larger than needed
            image = _cut(opened.convert("RGB"), size)
            return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(size, size, 3).permute(2, 0, 1)
    except Exception as error:  # decoders raise what they meet in a damaged file
        raise _unreadable(path, error) from None


def refuse_unreadable(paths: Sequence[Path], *, thorough: bool) -> None:
    """Raises `DataError` for the first file that is no image.

    Thorough, each is decoded; otherwise only what its first bytes tell is looked at, and in large sets its size.
    """
    for path, error in _problems(paths, thorough=thorough):
        raise _unreadable(path, error)


def readable(paths: Sequence[Path]) -> list[bool]:
    """Returns of each file whether it can be decoded; those that cannot are named in the log."""
    bad = dict(_problems(paths, thorough=True))
    for path, error in bad.items():
        _log.warning("left out, since it cannot be read: %s (%s)", path, error)
    return [path not in bad for path in paths]


def _problems(paths: Sequence[Path], *, thorough: bool) -> Iterator[tuple[Path, Exception]]:
    """Yields the files that are not whole images, in order, each with the reason."""
    require_pillow()
    look = _decode if thorough else _open if len(paths) <= CHECKED_HEADERS else _measure
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="evenly-images") as pool:
        for path, error in zip(paths, pool.map(look, paths), strict=True):
            if error is not None:
                yield path, error


def _decode(path: Path) -> Exception | None:
    return _error_of(path, decode=True)


def _open(path: Path) -> Exception | None:
    return _error_of(path, decode=False)


def _error_of(path: Path, *, decode: bool) -> Exception | None:
    try:
        with require_pillow().open(path) as image:
            if decode:
                image.load()
    except Exception as error:  # decoders raise what they meet in a damaged file
        return error
    return None


def _measure(path: Path) -> Exception | None:
    try:
        return None if path.stat().st_size else ValueError("it is empty")
    except OSError as error:
        return error


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(
        f"the image {path} cannot be read: {str(error) or type(error).__name__}. Replace the file or remove it; "
        "skip_unreadable leaves such files out."
    )


def _cut(image: "Image.Image", size: int) -> "Image.Image":
    """Returns the centre of an image whose short side was made a little longer than `size`."""
    short = round(SHORT_SIDE * size)
    scale = short / min(image.size)
    width, height = (max(short, round(side * scale)) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    return image.resize((width, height), resample=2).crop((left, top, left + size, top + size))  # 2: bilinear


def require_pillow() -> "ModuleType":
    """Returns Pillow's module of images; raises `DataError` where it is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError(
            "a data set of image files was asked for, but Pillow, which decodes them, is not installed. "
            "Install it: pip install 'evenly[images]'."
        ) from None
    return Image
