"""Inside the node: gradients averaged at every backward, weighted by samples."""

from evenly.gradients.base import Gradients
from evenly.gradients.ddp import DdpGradients
from evenly.gradients.fsdp import FsdpGradients
from evenly.gradients.local import LocalGradients
from evenly.gradients.sample_counts import counted_samples, leading_dim
from evenly.gradients.sharded import ShardedGradients
from evenly.gradients.single import SingleRankGradients
from evenly.gradients.verdicts import Verdict

__all__ = [
    "DdpGradients",
    "FsdpGradients",
    "Gradients",
    "LocalGradients",
    "ShardedGradients",
    "SingleRankGradients",
    "Verdict",
    "counted_samples",
    "leading_dim",
]
