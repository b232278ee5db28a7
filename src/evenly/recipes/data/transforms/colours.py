"""Changing values: brightness, contrast, sharpness and the like, on bytes, in integers where sums are taken.

Every result is a function of its image alone, to the last bit: sums are integers, and nothing depends on the batch.
"""

import torch
from torch import Tensor

GREY_WEIGHTS = (19595, 38470, 7471)  # of red, green and blue, in 65536ths (ITU-R 601)


def grey(images: Tensor) -> Tensor:
    """Returns the brightness [n, 1, h, w] of images [n, c, h, w], as integers of 0 to 255."""
    if images.shape[1] != 3:
        return images[:, :1].int()
    red, green, blue = (images[:, channel].int() * weight for channel, weight in enumerate(GREY_WEIGHTS))
    return ((red + green + blue + 0x8000) >> 16)[:, None]


def blend(plain: Tensor, images: Tensor, factors: Tensor) -> Tensor:
    """Returns plain + factor * (image - plain) as bytes; a factor of 1 keeps the image, 0 gives the plain one."""
    start = plain.float()
    mixed = start + factors.view(-1, 1, 1, 1) * (images.float() - start)
    return mixed.clamp(0, 255).to(torch.uint8)


def brightness(images: Tensor, factors: Tensor) -> Tensor:
    """Returns images between black and more than they are."""
    return blend(torch.zeros_like(images), images, factors)


def colour(images: Tensor, factors: Tensor) -> Tensor:
    """Returns images between grey and more colourful than they are."""
    return blend(grey(images), images, factors)


def contrast(images: Tensor, factors: Tensor) -> Tensor:
    """Returns images between their mean brightness and more contrast than they have."""
    values = grey(images)
    count = values.shape[2] * values.shape[3]
    mean = (values.sum((2, 3), keepdim=True) * 2 + count).div(2 * count, rounding_mode="floor")  # rounded
    return blend(mean, images, factors)


def sharpness(images: Tensor, factors: Tensor) -> Tensor:
    """Returns images between smooth and sharper than they are; the outermost pixels stay."""
    if min(images.shape[2:]) < 3:
        return images
    values = images.int()
    height, width = images.shape[2:]
    near = [values[:, :, i : height - 2 + i, j : width - 2 + j] for i in range(3) for j in range(3)]
    total = torch.stack(near).sum(0) + 4 * values[:, :, 1:-1, 1:-1]  # weights 1 around 5
    smooth = values.clone()
    smooth[:, :, 1:-1, 1:-1] = (2 * total + 13).div(26, rounding_mode="floor")  # / 13, rounded
    return blend(smooth, images, factors)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Returns images of which so many leading bits of each value are kept."""
    masks = 256 - 2 ** (8 - bits.long())
    return images & masks.to(torch.uint8).view(-1, 1, 1, 1)


def solarize(images: Tensor, thresholds: Tensor) -> Tensor:
    """Returns images whose values from the threshold on are inverted."""
    return torch.where(images.float() >= thresholds.view(-1, 1, 1, 1), 255 - images, images)


def invert(images: Tensor, _: Tensor) -> Tensor:
    """Returns the negatives."""
    return 255 - images


def autocontrast(images: Tensor, _: Tensor) -> Tensor:
    """Returns images whose darkest value in a channel is 0 and whose brightest is 255."""
    values = images.int()
    low, high = values.amin((2, 3), keepdim=True), values.amax((2, 3), keepdim=True)
    stretched = ((values - low) * 255).div((high - low).clamp(min=1), rounding_mode="floor")
    return torch.where(high > low, stretched, values).to(torch.uint8)


def equalize(images: Tensor, _: Tensor) -> Tensor:
    """Returns images in which all values of a channel are about equally frequent."""
    pixels = images.flatten(2).long()  # [n, c, h * w]
    ones = torch.ones((), dtype=torch.int64, device=images.device).expand_as(pixels)
    histogram = torch.zeros(*pixels.shape[:2], 256, dtype=torch.int64, device=images.device).scatter_add_(
        2, pixels, ones
    )
    brightest = pixels.amax(2, keepdim=True)
    step = (pixels.shape[2] - histogram.gather(2, brightest)).div(255, rounding_mode="floor")  # [n, c, 1]
    below = histogram.cumsum(2) - histogram
    table = (below + step.div(2, rounding_mode="floor")).div(step.clamp(min=1), rounding_mode="floor").clamp(max=255)
    return torch.where(step > 0, table.gather(2, pixels), pixels).view(images.shape).to(torch.uint8)
