"""Train one network on uneven machines.

Names are loaded when first used, so that `evenly --help` and the values of `evenly.spec` need no torch. Beside the
names here these modules are public: `evenly.errors`, `evenly.spec` (values: `Role`, `Exchange`, `Device`, `Node`, ...),
`evenly.planner` (`simulate`), `evenly.shards`, `evenly.exchange` and `evenly.checkpoints`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenly import checkpoints as checkpoints
    from evenly import errors as errors
    from evenly import exchange as exchange
    from evenly import planner as planner
    from evenly import shards as shards
    from evenly import spec as spec
    from evenly.batches import feed
    from evenly.checkpoints import load_weights
    from evenly.errors import EvenlyError
    from evenly.graph import trace
    from evenly.planner import plan
    from evenly.reports import report
    from evenly.session import Session, discover, measure, shard, synchronize
    from evenly.shards import verify
    from evenly.spec import Adaptive, Cluster, EveryEpoch, EverySteps, Graph, Plan, Profile, Run

__version__ = "0.1.0"

_EXPORTS = {
    "evenly.errors": ["EvenlyError"],
    "evenly.batches": ["feed"],
    "evenly.checkpoints": ["load_weights"],
    "evenly.graph": ["trace"],
    "evenly.reports": ["report"],
    "evenly.planner": ["plan"],
    "evenly.session": ["Session", "discover", "measure", "shard", "synchronize"],
    "evenly.shards": ["verify"],
    "evenly.spec": ["Adaptive", "Cluster", "EveryEpoch", "EverySteps", "Graph", "Plan", "Profile", "Run"],
}
_MODULES = ("checkpoints", "errors", "exchange", "planner", "shards", "spec")
_PACKAGE_OF = {name: package for package, names in _EXPORTS.items() for name in names}

__all__ = [
    "Adaptive",
    "Cluster",
    "EvenlyError",
    "EveryEpoch",
    "EverySteps",
    "Graph",
    "Plan",
    "Profile",
    "Run",
    "Session",
    "discover",
    "feed",
    "load_weights",
    "measure",
    "plan",
    "report",
    "shard",
    "synchronize",
    "trace",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"evenly.{name}")
    if name not in _PACKAGE_OF:
        raise AttributeError(f"module 'evenly' has no attribute {name!r}")
    value = getattr(import_module(_PACKAGE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
