"""The emulated clusters of `plan.py`: CPU quotas, links and memory of their devices. Imports no torch."""

from dataclasses import dataclass

BATCH_SIZE = 64  # samples of a global batch
UNEVEN = "100/30"  # the cluster on which unequal batches are compared with equal ones
EQUAL_BATCHES = "equal batches"
BATCHES_BY_SPEED = "batches by speed"


@dataclass(frozen=True)
class ClusterCase:
    """An emulated cluster.

    `cpu` holds the quotas of a core, node by node; `rate_mbit` is the rate of each node's link, if it is shaped;
    `memory_samples` is the number of samples that rank 0 has memory for, if that is limited.
    """

    cpu: tuple[tuple[float, ...], ...]
    rate_mbit: float | None = None
    memory_samples: int | None = None

    @property
    def quotas(self) -> list[float]:
        """The quota of each rank, in cores."""
        return [quota for node in self.cpu for quota in node]

    @property
    def node_of_rank(self) -> list[int]:
        """The index of each rank's node."""
        return [index for index, node in enumerate(self.cpu) for _ in node]


CASES = {
    "equal": ClusterCase(cpu=((0.7, 0.7),)),
    "70/25/5": ClusterCase(cpu=((0.7, 0.25, 0.05),)),
    "one useless": ClusterCase(cpu=((0.8, 0.6, 0.04),)),
    "two nodes": ClusterCase(cpu=((0.5, 0.5), (0.4,)), rate_mbit=100.0),
    "little memory": ClusterCase(cpu=((0.8, 0.5),), memory_samples=12),
    UNEVEN: ClusterCase(cpu=((1.0, 0.3),)),
}
