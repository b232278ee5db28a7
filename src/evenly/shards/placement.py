"""Where a local parameter lies in the full one."""

from collections.abc import Iterable

import torch

from evenly.comm import Placement, is_retired, place, placement_of, retire

__all__ = ["Placement", "is_retired", "place", "placement_of", "placements", "retire"]


def placements(tensors: Iterable[torch.Tensor]) -> list[Placement]:
    """Returns the placements of those tensors that have one."""
    return [found for tensor in tensors if (found := placement_of(tensor)) is not None]
