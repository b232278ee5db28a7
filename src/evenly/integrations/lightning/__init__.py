"""Node-based communications for Lightning: `Trainer(strategy=EvenlyStrategy(every=50))`, and the form for Fabric."""

from evenly.integrations.requirements import require_tool

require_tool("lightning")

from evenly.integrations.lightning.environment import EvenlyEnvironment  # noqa: E402  (needs Lightning)
from evenly.integrations.lightning.fabric import EvenlyFabricStrategy  # noqa: E402
from evenly.integrations.lightning.strategy import EvenlyStrategy  # noqa: E402

__all__ = ["EvenlyEnvironment", "EvenlyFabricStrategy", "EvenlyStrategy"]
