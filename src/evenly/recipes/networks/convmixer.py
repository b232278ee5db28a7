"""ConvMixer: patches, then turns of depthwise and pointwise convolutions.

Reference: Trockman, Kolter, *Patches are all you need?*, 2023.
"""

from torch import nn

from evenly.recipes.networks._parts import PlainSum, PooledClassifier, require_multiple


def convmixer(
    *,
    classes: int = 10,
    channels: int = 3,
    size: int = 32,
    width: int = 256,
    depth: int = 8,
    kernel: int = 5,
    patch: int = 2,
) -> nn.Module:
    """Returns ConvMixer-256/8 with kernel 5 and patches of 2 x 2; 594,186 parameters (kernel 9, patch 1: 706,570)."""
    require_multiple("convmixer", "size", size, "patch", patch)
    layers = [nn.Conv2d(channels, width, patch, patch), nn.GELU(), nn.BatchNorm2d(width)]
    for _ in range(depth):
        depthwise = nn.Conv2d(width, width, kernel, padding="same", groups=width)
        layers.append(PlainSum(nn.Sequential(depthwise, nn.GELU(), nn.BatchNorm2d(width))))
        layers += [nn.Conv2d(width, width, 1), nn.GELU(), nn.BatchNorm2d(width)]
    return PooledClassifier(nn.Sequential(*layers), width, classes)
