"""The machines: nodes, and the devices of their ranks."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from evenly.spec._value import Document, Value

Count = Annotated[int, Field(ge=0)]


class Device(Value):
    """The device of one rank."""

    kind: Literal["cpu", "cuda"]
    index: Count = 0
    name: str = ""
    identity: str = Field(default="", description="unique name of the hardware, empty where devices have none")
    memory_bytes: Count = 0
    cores: Count = 0


class Node(Value):
    """Ranks joined by fast links, with the device of each."""

    name: str
    ranks: tuple[Count, ...] = Field(min_length=1)
    devices: tuple[Device, ...]

    @model_validator(mode="after")
    def _one_device_per_rank(self) -> Self:
        if len(self.devices) != len(self.ranks):
            raise ValueError(f"node {self.name!r} has {len(self.ranks)} ranks but {len(self.devices)} devices")
        return self


class Cluster(Document):
    """Nodes and devices. Nodes may have any, unequal, number of ranks."""

    version: Literal[1] = 1
    nodes: tuple[Node, ...] = Field(min_length=1)
    _places: dict[int, tuple[int, int]] = PrivateAttr()  # of each rank: the index of its node, and its index there

    @model_validator(mode="before")
    @classmethod
    def _without_links(cls, fields: object) -> object:
        """Leaves out the list of links that files of earlier versions have; it was always empty."""
        if isinstance(fields, Mapping) and fields.get("links") == []:
            return {name: value for name, value in fields.items() if name != "links"}
        return fields

    @model_validator(mode="after")
    def _ranks_are_a_partition(self) -> Self:
        ranks = sorted(rank for node in self.nodes for rank in node.ranks)
        if ranks != list(range(len(ranks))):
            raise ValueError(f"the nodes' ranks must be 0..{len(ranks) - 1}, each once; they are {ranks}")
        self._places = {
            rank: (index, slot) for index, node in enumerate(self.nodes) for slot, rank in enumerate(node.ranks)
        }
        return self

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return sum(len(node.ranks) for node in self.nodes)

    @property
    def fingerprint(self) -> str:
        """Text that is equal for clusters of equal nodes and devices."""
        parts = [(node.ranks, [(d.kind, d.name, d.cores) for d in node.devices]) for node in self.nodes]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def node_of(self, rank: int) -> int:
        """Returns the index of the node that `rank` is on."""
        return self._places[rank][0]

    def device_of(self, rank: int) -> Device:
        """Returns the device that `rank` computes on."""
        index, slot = self._places[rank]
        return self.nodes[index].devices[slot]

    def among(self, ranks: Sequence[int]) -> Self:
        """Returns the cluster of these ranks, renumbered from 0 in this order; nodes without any are left out."""
        new_ranks = {rank: index for index, rank in enumerate(ranks)}
        nodes = []
        for node in self.nodes:
            if selected := [rank for rank in node.ranks if rank in new_ranks]:
                devices = tuple(self.device_of(rank) for rank in selected)
                nodes.append(Node(name=node.name, ranks=tuple(new_ranks[rank] for rank in selected), devices=devices))
        return type(self)(nodes=tuple(nodes))

    def rank_lists(self) -> list[list[int]]:
        """Returns the ranks of each node."""
        return [list(node.ranks) for node in self.nodes]
