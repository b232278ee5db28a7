"""VGG-16 with batch norm and a small head.

Reference: Simonyan, Zisserman, *Very deep convolutional networks for large-scale image recognition*, 2015.
"""

from torch import nn

from evenly.errors import SpecError
from evenly.recipes.networks._parts import PooledClassifier

STAGES = ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8))  # filters of each convolution, in units of the width
SIDE = 2 ** len(STAGES)  # every stage halves it


def vgg16(*, classes: int = 10, channels: int = 3, size: int = 32, width: int = 64) -> nn.Module:
    """Returns VGG-16 of 13 convolutions and one linear layer; 14,728,266 parameters.

    The head is that of implementations for CIFAR: the two layers of 4096 outputs are left out.
    """
    if size < SIDE:
        raise SpecError(
            f"vgg16 was asked for with images of {size} x {size}, but its {len(STAGES)} poolings need at least "
            f"{SIDE} x {SIDE}. Give a larger size."
        )
    layers: list[nn.Module] = []
    inputs = channels
    for stage in STAGES:
        for factor in stage:
            outputs = factor * width
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    return PooledClassifier(nn.Sequential(*layers), inputs, classes)
