"""A flat vector that is averaged across nodes."""

from dataclasses import dataclass

import torch

from evenly.comm.groups import Group


@dataclass
class Slice:
    """A flat vector with one owner in every node; `group` has these ranks in the order of the nodes."""

    values: torch.Tensor  # before: of this node; after: the agreed ones, or the change to them
    group: Group
    key: str = ""  # of the anchor; without one the values are averaged as they are
    is_difference: bool = False  # whether `values` become the average minus what they were
