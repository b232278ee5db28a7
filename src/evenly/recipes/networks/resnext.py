"""ResNeXt-29: residual blocks whose 3 x 3 convolution is divided into groups.

Reference: Xie, Girshick, Dollár, Tu, He, *Aggregated residual transformations for deep neural networks*, 2017.
"""

from torch import nn

from evenly.recipes.networks._parts import PooledClassifier, ResidualSum, conv_norm, conv_norm_relu


def resnext29(
    *,
    classes: int = 10,
    channels: int = 3,
    groups: int = 32,
    group_width: int = 4,
    width: int = 64,
    stem_kernel: int = 1,
) -> nn.Module:
    """Returns ResNeXt-29, 32x4d: 4,774,218 parameters; groups=8, group_width=64 (8x64d) has 34.4 million.

    The stages give 4, 8 and 16 times `width` channels, as in the paper. The first convolution is 1 x 1, as in the
    common implementation for CIFAR; the paper has 3 x 3 (1,536 parameters more).
    """
    layers: list[nn.Module] = [conv_norm_relu(channels, width, stem_kernel)]
    inputs = width
    for stage in range(3):
        inner, outputs = groups * group_width * 2**stage, 4 * width * 2**stage
        for index in range(3):
            layers.append(_block(inputs, inner, outputs, groups=groups, stride=2 if stage and not index else 1))
            inputs = outputs
    return PooledClassifier(nn.Sequential(*layers), inputs, classes)


def _block(inputs: int, inner: int, outputs: int, *, groups: int, stride: int) -> nn.Module:
    branch = nn.Sequential(
        conv_norm_relu(inputs, inner, 1),
        conv_norm_relu(inner, inner, stride=stride, groups=groups),
        conv_norm(inner, outputs, 1),
    )
    same_shape = stride == 1 and inputs == outputs
    return ResidualSum(branch, nn.Identity() if same_shape else conv_norm(inputs, outputs, 1, stride=stride))
