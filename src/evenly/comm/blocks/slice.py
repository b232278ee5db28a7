"""A flat vector that is averaged across nodes."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass
class Slice:
    """A flat vector with one owner in every node; `group` has these ranks in the order of the nodes."""

    values: torch.Tensor  # before: of this node; after: the agreed ones, or the change to them
    group: dist.ProcessGroup
    key: str = ""  # of the anchor; without one the values are averaged as they are
    change: bool = False
