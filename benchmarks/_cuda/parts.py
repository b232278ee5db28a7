"""The parts of `cuda.py`: which methods train which network in turns, in which world."""

from dataclasses import dataclass, field
from typing import Any

from benchmarks._cuda.trainer import NEVER

PERIOD, OVERLAP = 20, 10


@dataclass(frozen=True)
class Part:
    """Methods in turns on one network; `nodes` are the ranks of each node."""

    network: str
    nodes: list[list[int]]
    methods: dict[str, dict[str, Any]]  # the settings of `synchronize`, by method
    steps: int  # of a turn
    rounds: int
    variables: dict[str, object] = field(default_factory=dict)  # of the environment

    @property
    def num_ranks(self) -> int:
        """The processes, all on one device."""
        return sum(len(ranks) for ranks in self.nodes)


OVERLAPPED = {"every": PERIOD, "overlap": OVERLAP}
ALONE: dict[str, dict[str, Any]] = {"plain": {}, "DDP": {}, "evenly": {"every": 10}}
IN_NODE: dict[str, dict[str, Any]] = {"DDP": {}, "evenly": {}}
OVER_GLOO = {"EVENLY_SHARED_MEMORY": 0}
FORMS: dict[str, dict[str, Any]] = {
    "no exchange": {"every": NEVER},
    "fp32": OVERLAPPED,
    "bf16": {**OVERLAPPED, "codec": "bf16"},
    "int8": {**OVERLAPPED, "codec": "int8"},
    "int8, offload": {**OVERLAPPED, "codec": "int8", "offload": True},
    "int4, 4 fragments": {"every": PERIOD, "overlap": OVERLAP // 2, "codec": "int4", "fragments": 4},
}
LARGE_FORMS = {name: FORMS[name] for name in ("no exchange", "int8", "int8, offload")}
PARTS = {
    "alone": Part("gpt124m", [[0]], ALONE, steps=20, rounds=12),
    "compiled": Part("gpt124m_compiled", [[0]], ALONE, steps=20, rounds=12),
    "node": Part("gpt124m", [[0, 1]], IN_NODE, steps=4, rounds=6, variables=OVER_GLOO),
    "nodes": Part("gpt124m", [[0], [1]], FORMS, steps=2 * PERIOD, rounds=6),
    "billion": Part("gpt1b", [[0], [1]], LARGE_FORMS, steps=PERIOD, rounds=4),
}
