"""RandAugment and AutoAugment: which operation a sample gets, how strong, and in which direction.

Each operation runs once for all samples that drew it. Values are taken from tables of Python floats: sines and powers
of tensors may differ in their last bits with the place in a batch.

References: Cubuk et al., *RandAugment*, CVPRW 2020; Cubuk et al., *AutoAugment*, CVPR 2019, table of CIFAR-10's policy.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from evenly.recipes.data.transforms import colours
from evenly.recipes.data.transforms.geometry import transform
from evenly.recipes.data.transforms.random_numbers import SampleRandom

SHEAR, TURN, TRANSLATE, ENHANCE = 0.3, 30.0, 150 / 331, 0.9  # at full strength; degrees, and parts of the image's side
LEVELS = 10  # strengths of AutoAugment, 0 to 9; those of RandAugment are 0 to 30
OPERATIONS = (
    "identity",
    "shear-x",
    "shear-y",
    "translate-x",
    "translate-y",
    "rotate",
    "brightness",
    "colour",
    "contrast",
    "sharpness",
    "posterize",
    "solarize",
    "autocontrast",
    "equalize",
    "invert",  # AutoAugment only
)
RANDAUGMENT_OPERATIONS = 14  # the first ones
RANDAUGMENT_TIMES, RANDAUGMENT_STRENGTH = 2, 9 / 30

_BY_VALUE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": colours.brightness,
    "colour": colours.colour,
    "contrast": colours.contrast,
    "sharpness": colours.sharpness,
    "posterize": colours.posterize,
    "solarize": colours.solarize,
    "autocontrast": colours.autocontrast,
    "equalize": colours.equalize,
    "invert": colours.invert,
}

# Two operations of a sub-policy: name, probability, level.
CIFAR_POLICY: tuple[tuple[tuple[str, float, int], tuple[str, float, int]], ...] = (
    (("invert", 0.1, 0), ("contrast", 0.2, 6)),
    (("rotate", 0.7, 2), ("translate-x", 0.3, 9)),
    (("sharpness", 0.8, 1), ("sharpness", 0.9, 3)),
    (("shear-y", 0.5, 8), ("translate-y", 0.7, 9)),
    (("autocontrast", 0.5, 0), ("equalize", 0.9, 0)),
    (("shear-y", 0.2, 7), ("posterize", 0.3, 7)),
    (("colour", 0.4, 3), ("brightness", 0.6, 7)),
    (("sharpness", 0.3, 9), ("brightness", 0.7, 9)),
    (("equalize", 0.6, 0), ("equalize", 0.5, 0)),
    (("contrast", 0.6, 7), ("sharpness", 0.6, 5)),
    (("colour", 0.7, 7), ("translate-x", 0.5, 8)),
    (("equalize", 0.3, 0), ("autocontrast", 0.4, 0)),
    (("translate-y", 0.4, 3), ("sharpness", 0.2, 6)),
    (("brightness", 0.9, 6), ("colour", 0.2, 8)),
    (("solarize", 0.5, 2), ("invert", 0.0, 0)),
    (("equalize", 0.2, 0), ("autocontrast", 0.6, 0)),
    (("equalize", 0.2, 0), ("equalize", 0.6, 0)),
    (("colour", 0.9, 9), ("equalize", 0.6, 0)),
    (("autocontrast", 0.8, 0), ("solarize", 0.2, 8)),
    (("brightness", 0.1, 3), ("colour", 0.7, 0)),
    (("solarize", 0.4, 5), ("autocontrast", 0.9, 0)),
    (("translate-y", 0.9, 9), ("translate-y", 0.7, 9)),
    (("autocontrast", 0.9, 0), ("solarize", 0.8, 3)),
    (("equalize", 0.8, 0), ("invert", 0.1, 0)),
    (("translate-y", 0.7, 9), ("autocontrast", 0.9, 0)),
)


def randaugment(images: Tensor, random: SampleRandom, *, first_number: int) -> Tensor:
    """Returns images after two operations each, drawn from fourteen, at strength 9 of 30; uses four random numbers."""
    strengths = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    for turn in range(RANDAUGMENT_TIMES):
        number = first_number + 2 * turn
        chosen = random.below(RANDAUGMENT_OPERATIONS, number)
        is_negative = random.below(2, number + 1) == 1
        images = apply_operations(images, chosen, strengths, is_negative, strength_table=[RANDAUGMENT_STRENGTH])
    return images


def autoaugment(images: Tensor, random: SampleRandom, *, first_number: int) -> Tensor:
    """Returns images after the two operations of a sub-policy for CIFAR, each by its chance; uses five numbers."""
    rows = random.below(len(CIFAR_POLICY), first_number)
    for turn in range(2):
        entries = [policy[turn] for policy in CIFAR_POLICY]
        operation, chance, level = (
            torch.tensor(column, device=images.device)[rows]
            for column in (
                [OPERATIONS.index(name) for name, _, _ in entries],
                [probability for _, probability, _ in entries],
                [level for _, _, level in entries],
            )
        )
        number = first_number + 1 + 2 * turn
        chosen = torch.where(random.uniform(number) < chance, operation, 0)
        is_negative = random.below(2, number + 1) == 1
        table = [level / (LEVELS - 1) for level in range(LEVELS)]
        images = apply_operations(images, chosen, level, is_negative, strength_table=table)
    return images


def apply_operations(
    images: Tensor, chosen: Tensor, levels: Tensor, is_negative: Tensor, *, strength_table: Sequence[float]
) -> Tensor:
    """Returns images [n, c, h, w] after one operation each.

    Args:
        images: [n, c, h, w].
        chosen: Indices [n] of operations.
        levels: Indices [n] of their strengths.
        is_negative: Whether [n] a direction or a change of strength is reversed.
        strength_table: Strengths, 0 to 1, of the levels.
    """
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=len(OPERATIONS)).tolist()  # the one value that a device is waited for
    changed = images.clone()
    for operation, samples in zip(OPERATIONS, torch.split(order, counts), strict=True):
        if operation != "identity" and len(samples):
            entries = levels[samples] + len(strength_table) * is_negative[samples]
            drawn = _apply(operation, images.index_select(0, samples), entries, strength_table)
            changed.index_copy_(0, samples, drawn)
    return changed


def _apply(operation: str, images: Tensor, entries: Tensor, strength_table: Sequence[float]) -> Tensor:
    """Returns images after an operation; `entries` count the positive strengths first, then the negative ones."""
    strengths = [*strength_table, *(-strength for strength in strength_table)]
    if operation in _BY_VALUE:
        values = torch.tensor([_value(operation, strength) for strength in strengths], device=images.device)
        return _BY_VALUE[operation](images, values[entries])
    matrices = [_matrix(operation, strength, *images.shape[2:]) for strength in strengths]
    return transform(images, torch.tensor(matrices, device=images.device).view(-1, 2, 3)[entries])


def _value(operation: str, strength: float) -> float:
    if operation == "posterize":
        return 8.0 - round(4 * abs(strength))
    if operation == "solarize":
        return 256.0 * (1 - abs(strength))
    return 1 + ENHANCE * strength


def _matrix(operation: str, strength: float, height: int, width: int) -> list[float]:
    """Returns where, for each pixel of the result, the image is looked at: rows of x and of y."""
    if operation == "shear-x":
        return [1.0, SHEAR * strength, 0.0, 0.0, 1.0, 0.0]
    if operation == "shear-y":
        return [1.0, 0.0, 0.0, SHEAR * strength, 1.0, 0.0]
    if operation == "translate-x":
        return [1.0, 0.0, float(round(TRANSLATE * width * strength)), 0.0, 1.0, 0.0]
    if operation == "translate-y":
        return [1.0, 0.0, 0.0, 0.0, 1.0, float(round(TRANSLATE * height * strength))]
    angle = math.radians(TURN * strength)
    return [math.cos(angle), -math.sin(angle), 0.0, math.sin(angle), math.cos(angle), 0.0]
