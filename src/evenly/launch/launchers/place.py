"""The rank of a process in its run."""

from typing import Self

from pydantic import model_validator

from evenly.spec._value import Value


class Place(Value):
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

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not one of the {self.world_size} ranks from 0")
        size = self.world_size if self.local_size is None else self.local_size
        if self.world_size > 1 and not 0 <= self.local_rank < size <= self.world_size:
            raise ValueError(f"local rank {self.local_rank} of {size} does not fit a world of {self.world_size}")
        if (self.master_addr is None) != (self.master_port is None):
            raise ValueError("master_addr and master_port are given together or not at all")
        return self
