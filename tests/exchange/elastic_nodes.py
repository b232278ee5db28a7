"""Nodes of an elastic run in one process: ranks are threads, each with a connection to a real coordinator."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from evenly.comm import RankGroup
from evenly.coordination import CoordinationClient, Coordinator, MemberRank, RoundSettings
from evenly.nodes import Synchronized
from evenly.nodes.composition import compose_synchronized
from evenly.spec import EverySteps, Exchange
from tests.ranks import cluster_of

starts = iter(range(10_000))


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch_of(node: str, rank: int, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(hash_of(node) * 1000 + rank * 100 + step)
    return torch.randn(size, 6, generator=random).double(), torch.randint(3, (size,), generator=random)


def hash_of(text: str) -> int:
    return sum(ord(letter) * 31**place for place, letter in enumerate(text)) % 10_007


@dataclass
class NodeThreads:
    """One start of a node: `act(rank, model, client)` runs on each of its ranks."""

    name: str
    sizes: Sequence[int]  # of the batches of its ranks
    address: tuple[str, int]
    act: Callable[["RankThread"], Any]
    every: int = 2
    settings: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    lr: float = 0.1
    make: Callable[[int], nn.Module] = network

    def __post_init__(self) -> None:
        self.ranks = [RankThread(self, rank) for rank in range(len(self.sizes))]
        self.store, self.start = dist.HashStore(), f"start{next(starts)}"

    def begin(self) -> "NodeThreads":
        for rank in self.ranks:
            rank.thread.start()
        return self

    def join(self, limit_s: float = 60.0) -> list[Any]:
        for rank in self.ranks:
            rank.thread.join(limit_s)
            if rank.thread.is_alive():
                raise TimeoutError(f"{self.name}/{rank.rank} still runs")
            if rank.error is not None:
                raise rank.error
        return [rank.result for rank in self.ranks]

    def kill(self) -> None:
        """Breaks all its connections, as a node that loses its power does."""
        for rank in self.ranks:
            rank.client.close()


class RankThread:
    def __init__(self, node: NodeThreads, rank: int) -> None:
        self.node, self.rank = node, rank
        self.plain = node.make(node.seed)
        self.thread = threading.Thread(target=self.run, name=f"{node.name}/{rank}", daemon=True)
        self.error: BaseException | None = None
        self.result: Any = None
        self.step = 0
        self.model: Synchronized
        self.optimizer: torch.optim.Optimizer
        self.client: CoordinationClient

    def run(self) -> None:
        node = self.node
        try:
            member = MemberRank(node.name, node.start, self.rank, len(node.sizes))
            self.client = CoordinationClient(node.address, member, job="test")
            plain = self.plain
            self.optimizer = torch.optim.SGD(plain.parameters(), lr=node.lr, momentum=0.9)
            self.model = compose_synchronized(
                plain,
                self.optimizer,
                rank_group=RankGroup(self.rank, len(node.sizes), node.store),
                cluster=cluster_of([list(range(len(node.sizes)))]),
                period=EverySteps(node.every),
                exchange=Exchange(timeout_s=30, **node.settings),
                client=self.client,
            )
            try:
                self.result = node.act(self)
            finally:
                self.model.close(may_differ=True)
        except BaseException as error:
            self.error = error

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            x, y = batch_of(self.node.name, self.rank, self.step, self.node.sizes[self.rank])
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def values(self) -> list[torch.Tensor]:
        return [value.detach().clone() for value in self.model.module.state_dict().values()]


def coordinator(expected_nodes: int, **settings: Any) -> Coordinator:
    return Coordinator(("127.0.0.1", 0), settings=RoundSettings(expected_nodes=expected_nodes, **settings)).start()
