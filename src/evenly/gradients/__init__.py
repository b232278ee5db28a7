"""Inside the node: gradients averaged at every backward, weighted by samples."""

from evenly.gradients.base import Gradients, Verdict
from evenly.gradients.node import NodeGradients
from evenly.gradients.replica import ReplicaGradients
from evenly.gradients.sample_counts import counted_samples, leading_dim

__all__ = ["Gradients", "NodeGradients", "ReplicaGradients", "Verdict", "counted_samples", "leading_dim"]
