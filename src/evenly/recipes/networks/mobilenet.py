"""MobileNetV2: blocks that are wide inside and narrow between.

Reference: Sandler, Howard, Zhu, Zhmoginov, Chen, *MobileNetV2: inverted residuals and linear bottlenecks*, 2018.
"""

from torch import nn

from evenly.recipes.networks._parts import LARGE_SIZE, PlainSum, PooledClassifier, conv_norm, scaled_filters

STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def mobilenetv2(*, classes: int = 10, channels: int = 3, size: int = 32, width: float = 1.0) -> nn.Module:
    """Returns MobileNetV2 with `width` times the channels; 2,296,922 parameters, 3,504,872 for ImageNet.

    For small images, as in the common implementation for CIFAR: the first two strides are 1, every block of stride 1
    has a shortcut, if need be with a convolution, and the first block expands too.
    """
    small = size < LARGE_SIZE
    inputs, last = scaled_filters(32, width), scaled_filters(1280, max(width, 1.0))
    layers: list[nn.Module] = [_relu6(channels, inputs, stride=1 if small else 2)]
    for stage, (expansion, filters, count, first_stride) in enumerate(STAGES):
        outputs = scaled_filters(filters, width)
        for index in range(count):
            stride = 1 if index or (small and stage == 1) else first_stride
            layers.append(_block(inputs, outputs, expansion, stride, small=small))
            inputs = outputs
    layers.append(_relu6(inputs, last, 1))
    return PooledClassifier(nn.Sequential(*layers), last, classes)


def _block(inputs: int, outputs: int, expansion: int, stride: int, *, small: bool) -> nn.Module:
    inner = expansion * inputs
    branch = nn.Sequential(
        *([_relu6(inputs, inner, 1)] if small or expansion > 1 else []),
        _relu6(inner, inner, stride=stride, groups=inner),
        conv_norm(inner, outputs, 1),
    )
    if stride > 1 or (inputs != outputs and not small):
        return branch
    return PlainSum(branch, None if inputs == outputs else conv_norm(inputs, outputs, 1))


def _relu6(inputs: int, outputs: int, kernel: int = 3, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return conv_norm(inputs, outputs, kernel, stride=stride, groups=groups, activation=nn.ReLU6(inplace=True))
