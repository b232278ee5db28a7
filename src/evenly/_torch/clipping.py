"""torch's clipping of gradients by norm, with other functions for the norm and for the scaling."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad

from evenly._torch.patching import replace_attribute, restore_attribute

TOTAL_NORM, CLIP = "get_total_norm", "clip_grads_with_norm_"

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def widen_clipping(*, total_norm: Wrap, clip: Wrap) -> Callable[[], None]:
    """Has torch's clipping by norm use other functions, made from torch's own; returns what undoes it.

    `torch.nn.utils.clip_grad_norm_` looks two private functions up in its module whenever it is called, so that also a
    `clip_grad_norm_` that was imported before uses the new ones. The public functions of the same names are replaced
    too. Where a torch has other names (2.11 and 2.13 have these) nothing is.

    Args:
        total_norm: is given torch's `get_total_norm` and returns what takes its place.
        clip: the same for `clip_grads_with_norm_`.
    """
    if not all(hasattr(clip_grad, f"_{name}") for name in (TOTAL_NORM, CLIP)):
        return lambda: None
    made = []
    for name, wrap in ((TOTAL_NORM, total_norm), (CLIP, clip)):
        own = wrap(getattr(clip_grad, f"_{name}"))
        without_grad = torch.no_grad()(own)
        made.append(replace_attribute(clip_grad, f"_{name}", own))
        made += [replace_attribute(home, name, without_grad) for home in (clip_grad, nn.utils) if hasattr(home, name)]

    def undo() -> None:
        for replacement in made:
            restore_attribute(replacement)

    return undo
