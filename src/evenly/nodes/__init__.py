"""Node-based communications: gradients inside the node, parameters across nodes."""

from evenly.nodes.join import join_nodes
from evenly.nodes.membership import Ballot, Membership, Quorum, StaticMembership
from evenly.nodes.synchronized import Exchanged, Synchronized, leading_dim

__all__ = [
    "Ballot",
    "Exchanged",
    "Membership",
    "Quorum",
    "StaticMembership",
    "Synchronized",
    "join_nodes",
    "leading_dim",
]
