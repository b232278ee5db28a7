"""A flat vector that is averaged across nodes."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass
class Slice:
    """A flat vector that one rank of every node speaks for; `group` has these ranks in the order of the nodes."""

    values: torch.Tensor  # before: of this node; after: those agreed on, or the change to them
    group: dist.ProcessGroup
    key: str = ""  # of the point that is remembered; without one the values are averaged as they are
    change: bool = False
