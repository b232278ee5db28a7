"""Whether the machine has what a cluster promises to its ranks."""

from pathlib import Path

from evenly.errors import LabError
from evenly.lab.cluster import LabCluster, LabNode, core_numbers

_ONLINE = Path("/sys/devices/system/cpu/online")


def online_cores() -> frozenset[int]:
    """Returns the cores of this machine."""
    return core_numbers(_ONLINE.read_text().strip())


def check_fit(cluster: LabCluster, *, online: frozenset[int]) -> None:
    """Raises `LabError` if the ranks are promised more CPU than there is: quotas could not hold."""
    _compare(_promised(*cluster.nodes), num_cores=len(online), subject="all ranks together", resource="this machine")
    for node in cluster.nodes:
        if node.cores is None:
            continue
        cores = core_numbers(node.cores)
        if not cores <= online:
            raise LabError(
                f"{node.name} is to run on cores {node.cores}, but this machine has only {sorted(online)}. "
                "Name cores it has in `cores`."
            )
        _compare(
            _promised(node),
            num_cores=len(cores),
            subject=f"the ranks of {node.name}",
            resource=f"core set {node.cores}",
        )


def _promised(*nodes: LabNode) -> float:
    return sum(node.cpu_of(local) or 0.0 for node in nodes for local in range(node.ranks))


def _compare(promised: float, *, num_cores: int, subject: str, resource: str) -> None:
    if promised > num_cores + 1e-9:
        raise LabError(
            f"{subject} are promised {promised:g} cores' worth of CPU time, but {resource} has {num_cores} cores. "
            "Lower `cpu`, in the same proportion everywhere to keep the ratios."
        )
