"""The networks of the published experiments, found by name."""

from evenly.recipes.networks.build import build_network, require_network
from evenly.recipes.networks.catalogue import NETWORKS, NetworkInfo

__all__ = ["NETWORKS", "NetworkInfo", "build_network", "require_network"]
