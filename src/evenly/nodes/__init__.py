"""Node-based communications: gradients inside the node, parameters across nodes."""

from evenly.nodes.buffers import add_change, is_torn, same
from evenly.nodes.cargo import SQUARES
from evenly.nodes.codecs import Codec, add_codec
from evenly.nodes.counting import leading_dim
from evenly.nodes.join import join_nodes
from evenly.nodes.membership import Ballot, Membership, Quorum, StaticMembership, fractions
from evenly.nodes.ordered import extreme
from evenly.nodes.synchronized import Synchronized
from evenly.nodes.trips import Exchanged

__all__ = [
    "SQUARES",
    "Ballot",
    "Codec",
    "Exchanged",
    "Membership",
    "Quorum",
    "StaticMembership",
    "Synchronized",
    "add_change",
    "add_codec",
    "extreme",
    "fractions",
    "is_torn",
    "join_nodes",
    "leading_dim",
    "same",
]
