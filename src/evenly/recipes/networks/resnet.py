"""ResNets with four stages; small images skip the pooling of the first layers.

Reference: He, Zhang, Ren, Sun, *Deep residual learning for image recognition*, 2016.
"""

from collections.abc import Callable, Sequence

from torch import nn

from evenly.recipes.networks._parts import (
    LARGE_SIZE,
    PooledClassifier,
    ResidualSum,
    conv_norm,
    conv_norm_relu,
    imagenet_stem,
)

Block = Callable[[int, int, int], nn.Module]  # of inputs, width and stride


def resnet18(*, classes: int = 10, channels: int = 3, size: int = 32, width: int = 64) -> nn.Module:
    """Returns ResNet-18; 11,173,962 parameters, 11,689,512 for ImageNet."""
    return _resnet(_basic, 1, (2, 2, 2, 2), classes=classes, channels=channels, size=size, width=width)


def resnet34(*, classes: int = 10, channels: int = 3, size: int = 32, width: int = 64) -> nn.Module:
    """Returns ResNet-34; 21,282,122 parameters, 21,797,672 for ImageNet."""
    return _resnet(_basic, 1, (3, 4, 6, 3), classes=classes, channels=channels, size=size, width=width)


def resnet50(*, classes: int = 10, channels: int = 3, size: int = 32, width: int = 64) -> nn.Module:
    """Returns ResNet-50; 23,520,842 parameters, 25,557,032 for ImageNet."""
    return _resnet(_bottleneck, 4, (3, 4, 6, 3), classes=classes, channels=channels, size=size, width=width)


def resnet101(*, classes: int = 10, channels: int = 3, size: int = 32, width: int = 64) -> nn.Module:
    """Returns ResNet-101; 42,512,970 parameters, 44,549,160 for ImageNet."""
    return _resnet(_bottleneck, 4, (3, 4, 23, 3), classes=classes, channels=channels, size=size, width=width)


def _resnet(
    block: Block, expansion: int, blocks: Sequence[int], *, classes: int, channels: int, size: int, width: int
) -> nn.Module:
    stem = imagenet_stem(channels, width) if size >= LARGE_SIZE else conv_norm_relu(channels, width)
    layers: list[nn.Module] = [stem]
    inputs = width
    for stage, count in enumerate(blocks):
        for index in range(count):
            layers.append(block(inputs, width * 2**stage, 2 if stage and not index else 1))
            inputs = width * 2**stage * expansion
    return PooledClassifier(nn.Sequential(*layers), inputs, classes)


def _basic(inputs: int, width: int, stride: int) -> nn.Module:
    branch = nn.Sequential(conv_norm_relu(inputs, width, stride=stride), conv_norm(width, width))
    return ResidualSum(branch, _shortcut(inputs, width, stride))


def _bottleneck(inputs: int, width: int, stride: int) -> nn.Module:
    branch = nn.Sequential(
        conv_norm_relu(inputs, width, 1), conv_norm_relu(width, width, stride=stride), conv_norm(width, 4 * width, 1)
    )
    return ResidualSum(branch, _shortcut(inputs, 4 * width, stride))


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return conv_norm(inputs, outputs, 1, stride=stride)
