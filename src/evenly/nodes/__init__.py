"""Node-based communications: gradients inside the node, parameters across nodes."""

from evenly.nodes.codecs import Codec, add_codec
from evenly.nodes.join import join_nodes
from evenly.nodes.membership import Ballot, Membership, Quorum, StaticMembership
from evenly.nodes.synchronized import Synchronized, leading_dim
from evenly.nodes.trips import Exchanged

__all__ = [
    "Ballot",
    "Codec",
    "Exchanged",
    "Membership",
    "Quorum",
    "StaticMembership",
    "Synchronized",
    "add_codec",
    "join_nodes",
    "leading_dim",
]
