"""Moving pixels: windows, mirror images, and what shears, moves or turns an image."""

import torch
from torch import Tensor
from torch.nn.functional import pad

FILL = 128  # of what comes from outside of an image, as in AutoAugment


def crop_and_flip(
    images: Tensor, top: Tensor, left: Tensor, *, margin: int, is_flipped: Tensor | None = None
) -> Tensor:
    """Returns windows of images that have a margin of black around them, some mirrored left to right.

    Each row of the result is one piece of memory, of the images or of a mirrored copy: to copy rows is many times
    faster than to pick pixels.

    Args:
        images: [n, c, h, w].
        top: Rows [n] above the window, 0 to 2 * margin; margin: the image as it is.
        left: Columns [n] left of it, the same.
        margin: Pixels of black around an image.
        is_flipped: Whether [n] the window is mirrored; None: none is.
    """
    n, c, h, w = images.shape
    wide = pad(images, (margin,) * 4)  # [n, c, h + 2 * margin, w + 2 * margin]
    tall, broad = wide.shape[2:]
    image_start = torch.arange(n, device=images.device)
    if is_flipped is not None:
        wide = torch.cat([wide, wide.flip(3)])
        image_start = image_start + n * is_flipped
        left = torch.where(is_flipped, 2 * margin - left, left)
    window_start = image_start * (c * tall * broad) + top * broad + left  # [n]
    channels, rows = (torch.arange(count, device=images.device) for count in (c, h))
    row_start = window_start.view(-1, 1, 1) + channels.view(-1, 1) * (tall * broad) + rows * broad  # [n, c, h]
    pieces = wide.flatten().as_strided((wide.numel() - w + 1, w), (1, 1))  # of w pixels, from every pixel on
    return pieces.index_select(0, row_start.flatten()).view(n, c, h, w)


def transform(images: Tensor, matrix: Tensor) -> Tensor:
    """Returns images [n, c, h, w] whose pixel (x, y), from the centre, is the nearest one to `matrix` (x, y, 1).

    Args:
        images: [n, c, h, w].
        matrix: [n, 2, 3], in pixels.
    """
    height, width = images.shape[2:]
    y = torch.arange(height, device=images.device).view(1, -1, 1) - (height - 1) / 2  # [1, h, 1]
    x = torch.arange(width, device=images.device).view(1, 1, -1) - (width - 1) / 2  # [1, 1, w]
    entries = matrix[:, :, :, None, None]  # [n, 2, 3, 1, 1]
    source_x, source_y = (
        x * entries[:, row, 0] + y * entries[:, row, 1] + entries[:, row, 2] for row in (0, 1)
    )  # [n, h, w]
    column = (source_x + width / 2).floor().long()
    line = (source_y + height / 2).floor().long()
    is_inside = (column >= 0) & (column < width) & (line >= 0) & (line < height)
    places = line.clamp(0, height - 1) * width + column.clamp(0, width - 1)
    picked = images.flatten(2).gather(2, places.flatten(1)[:, None].expand(-1, images.shape[1], -1))
    return torch.where(is_inside[:, None], picked.view(images.shape), FILL)
