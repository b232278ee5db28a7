"""The rank of a process in its run."""

from dataclasses import dataclass

from evenly.errors import SpecError


@dataclass(frozen=True, kw_only=True)
class Place:
    """One process of a run: its rank, its local rank on its node, and the master address.

    `local_size` is None where the launcher does not tell it, `node_id` is "" where the launcher does not number its
    nodes, and the master's address and port are None for a single process.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int | None = None
    node_id: str = ""
    launcher: str
    master_addr: str | None = None
    master_port: int | None = None

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem is not None:
            raise SpecError(f"Place is not valid: {problem}. Correct it and try again.")

    def _problem(self) -> str | None:
        if not 0 <= self.rank < self.world_size:
            return f"rank {self.rank} is not one of the {self.world_size} ranks from 0"
        size = self.world_size if self.local_size is None else self.local_size
        if self.world_size > 1 and not 0 <= self.local_rank < size <= self.world_size:
            return f"local rank {self.local_rank} of {size} does not fit a world of {self.world_size}"
        if (self.master_addr is None) != (self.master_port is None):
            return "master_addr and master_port are given together or not at all"
        return None
