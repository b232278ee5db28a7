"""What the machines are: nodes, the devices their ranks use, and the links between nodes."""

import hashlib
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from evenly.spec._value import Document, Value

Count = Annotated[int, Field(ge=0)]


class Device(Value):
    """What one rank computes on."""

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


class Link(Value):
    """The wire from node `source` to node `target`; None stands for not measured."""

    source: Count
    target: Count
    latency_s: Annotated[float, Field(ge=0)] | None = None
    bytes_per_s: Annotated[float, Field(gt=0)] | None = None


class Cluster(Document):
    """Nodes, devices and links. Nodes may have any, unequal, number of ranks."""

    version: Literal[1] = 1
    nodes: tuple[Node, ...] = Field(min_length=1)
    links: tuple[Link, ...] = ()

    @model_validator(mode="after")
    def _ranks_are_a_partition(self) -> Self:
        ranks = sorted(rank for node in self.nodes for rank in node.ranks)
        if ranks != list(range(len(ranks))):
            raise ValueError(f"the nodes' ranks must be 0..{len(ranks) - 1}, each once; they are {ranks}")
        for link in self.links:
            if max(link.source, link.target) >= len(self.nodes) or link.source == link.target:
                raise ValueError(f"link {link.source}->{link.target} does not join two of the {len(self.nodes)} nodes")
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
        return next(index for index, node in enumerate(self.nodes) if rank in node.ranks)

    def device_of(self, rank: int) -> Device:
        """Returns the device that `rank` computes on."""
        node = self.nodes[self.node_of(rank)]
        return node.devices[node.ranks.index(rank)]

    def among(self, ranks: Sequence[int]) -> Self:
        """Returns the cluster of some of the ranks, in this order counted from 0, on the nodes that have any."""
        places = {rank: place for place, rank in enumerate(ranks)}
        kept = [index for index, node in enumerate(self.nodes) if places.keys() & set(node.ranks)]
        nodes = []
        for index in kept:
            own = [rank for rank in self.nodes[index].ranks if rank in places]
            devices = tuple(self.device_of(rank) for rank in own)
            nodes.append(Node(name=self.nodes[index].name, ranks=tuple(places[rank] for rank in own), devices=devices))
        links = [
            link.model_copy(update={"source": kept.index(link.source), "target": kept.index(link.target)})
            for link in self.links
            if link.source in kept and link.target in kept
        ]
        return type(self)(nodes=tuple(nodes), links=tuple(links))

    def rank_lists(self) -> list[list[int]]:
        """Returns the ranks of each node."""
        return [list(node.ranks) for node in self.nodes]
