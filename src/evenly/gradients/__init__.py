"""Inside the node: gradients averaged at every backward, weighted by samples."""

from evenly.gradients.base import Gradients, Verdict
from evenly.gradients.ddp import DdpGradients
from evenly.gradients.sample_counts import counted_samples, leading_dim
from evenly.gradients.sharded import ShardedGradients

__all__ = ["DdpGradients", "Gradients", "ShardedGradients", "Verdict", "counted_samples", "leading_dim"]
