"""Node-based communications: the module that keeps a network in step with other ranks and nodes."""

from evenly.nodes.composition import compose_synchronized, require_scaler
from evenly.nodes.join import join_nodes
from evenly.nodes.synchronized import Synchronized

__all__ = ["Synchronized", "compose_synchronized", "join_nodes", "require_scaler"]
