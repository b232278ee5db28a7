"""Digits that are drawn instead of read from files: seven segments, each image moved, turned, slanted and noisy."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F  # noqa: N812

SIZE = 28
SEGMENTS = {  # rows and columns of bright pixels
    "top": (slice(4, 7), slice(8, 20)),
    "middle": (slice(13, 16), slice(8, 20)),
    "bottom": (slice(22, 25), slice(8, 20)),
    "upper left": (slice(4, 15), slice(8, 11)),
    "upper right": (slice(4, 15), slice(17, 20)),
    "lower left": (slice(14, 25), slice(8, 11)),
    "lower right": (slice(14, 25), slice(17, 20)),
}
DARK_SEGMENTS = {  # of each digit
    0: ("middle",),
    1: ("top", "middle", "bottom", "upper left", "lower left"),
    2: ("upper left", "lower right"),
    3: ("upper left", "lower left"),
    4: ("top", "bottom", "lower left"),
    5: ("upper right", "lower left"),
    6: ("upper right",),
    7: ("middle", "bottom", "upper left", "lower left"),
    8: (),
    9: ("lower left",),
}
TURN, SLANT, MOVE, GROW, NOISE = 0.25, 0.3, 0.2, 0.25, 0.8  # radians, and parts of the image or of its brightness
DARKEST, BRIGHTEST = -2.0, 3.0  # of what a byte can tell; noise beyond is cut off


def draw_digits(count: int, *, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Returns images [n, 1, 28, 28] and labels [n]; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    plain = torch.stack([_plain(digit) for digit in range(10)])[labels]  # [n, 1, 28, 28]
    turn, slant, grow, *move = (2 * torch.rand(5, count, generator=generator) - 1).unbind()
    angle, scale = TURN * turn, 1 + GROW * grow
    rows = [scale * angle.cos(), -angle.sin() + SLANT * slant, MOVE * move[0]]
    rows += [angle.sin(), scale * angle.cos(), MOVE * move[1]]
    grid = F.affine_grid(torch.stack(rows, 1).view(count, 2, 3), [count, 1, SIZE, SIZE], align_corners=False)
    images = F.grid_sample(plain, grid, align_corners=False)
    noisy = images + NOISE * torch.randn(images.shape, generator=generator)
    grey = ((noisy - DARKEST) / (BRIGHTEST - DARKEST) * 255).round().clamp(0, 255)
    return grey.to(torch.uint8).numpy(), labels.numpy()


def _plain(digit: int) -> torch.Tensor:
    image = torch.zeros(1, SIZE, SIZE)
    for name, place in SEGMENTS.items():
        if name not in DARK_SEGMENTS[digit]:
            image[0][place] = 1.0
    return image
