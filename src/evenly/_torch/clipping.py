"""Replaces the functions for the norm and the scaling in torch's clipping of gradients by norm."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import clip_grad

from evenly._torch.patching import replace_attribute, restore_attribute

TOTAL_NORM, CLIP = "get_total_norm", "clip_grads_with_norm_"

GetTotalNorm = Callable[..., torch.Tensor]
ClipGrads = Callable[..., None]


def widen_clipping(
    *, total_norm: Callable[[GetTotalNorm], GetTotalNorm], clip: Callable[[ClipGrads], ClipGrads]
) -> Callable[[], None]:
    """Makes torch's clipping by norm use wrapped functions; returns a function that undoes it.

    `torch.nn.utils.clip_grad_norm_` looks up two private functions in its module whenever it is called, so a
    `clip_grad_norm_` that was imported before uses the new ones too. The public functions of the same names are also
    replaced. If a version of torch has other names (2.11 and 2.13 have these), nothing is replaced.

    Args:
        total_norm: maps torch's `get_total_norm` to its replacement.
        clip: maps torch's `clip_grads_with_norm_` to its replacement.
    """
    if not all(hasattr(clip_grad, f"_{name}") for name in (TOTAL_NORM, CLIP)):
        return lambda: None
    replacements = []
    for name, wrap in ((TOTAL_NORM, total_norm), (CLIP, clip)):
        wrapped = wrap(getattr(clip_grad, f"_{name}"))
        without_grad = torch.no_grad()(wrapped)
        replacements.append(replace_attribute(clip_grad, f"_{name}", wrapped))
        replacements += [
            replace_attribute(module, name, without_grad) for module in (clip_grad, nn.utils) if hasattr(module, name)
        ]

    def undo() -> None:
        for replacement in replacements:
            restore_attribute(replacement)

    return undo
