"""Ranks of nodes as clients in threads, and proposals of them."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from evenly.coordination import (
    CoordinationClient,
    ExchangeRound,
    MemberRank,
    Proposal,
    RoundVerdict,
)

Result = TypeVar("Result")

FRESH = Proposal(version=0, lineage="", step=0, samples=10.0, signature="same", is_healthy=True)


def after(formed: ExchangeRound, **changes: object) -> Proposal:
    """Returns the proposal of a rank that has applied a round."""
    trained = replace(FRESH, version=formed.number, lineage=formed.lineage, peers=formed.nodes)
    return replace(trained, **changes)  # type: ignore[arg-type]


class NodeClients:
    """The ranks of one node; each call is made by all of them at once."""

    def __init__(
        self,
        address: tuple[str, int] | str,
        name: str,
        *,
        size: int = 2,
        start: str = "first",
        secret: bytes | None = None,
    ) -> None:
        self.name = name
        self.clients = [
            CoordinationClient(address, MemberRank(name, start, rank, size), job="job", secret=secret)
            for rank in range(size)
        ]
        self._threads = ThreadPoolExecutor(size)

    def begin(self, call: Callable[[CoordinationClient], Result]) -> list[Future[Result]]:
        return [self._threads.submit(call, client) for client in self.clients]

    def propose(self, proposal: Proposal = FRESH, timeout_s: float = 10.0) -> list[Future[ExchangeRound]]:
        return self.begin(lambda client: client.propose(proposal, timeout_s=timeout_s))

    def vote(self, formed: ExchangeRound, *, checksum: str = "sum", is_ok: bool = True) -> list[Future[RoundVerdict]]:
        return self.begin(
            lambda client: client.vote(formed.id, is_ok=is_ok, checksum=checksum, why="wished so", timeout_s=10.0)
        )

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self._threads.shutdown()


def cut(client: CoordinationClient) -> None:
    """Closes the socket of a client as the end of its process would; it does not connect again."""
    client.close()


def meet(nodes: Sequence[NodeClients], proposal: Proposal = FRESH) -> ExchangeRound:
    """Returns the round that all nodes form with the same proposal."""
    futures = [future for node in nodes for future in node.propose(proposal)]
    rounds = [future.result(timeout=15) for future in futures]
    assert all(formed == rounds[0] for formed in rounds)
    return rounds[0]


def commit(nodes: Sequence[NodeClients], formed: ExchangeRound) -> None:
    futures = [future for node in nodes for future in node.vote(formed)]
    assert all(future.result(timeout=15).is_committed for future in futures)
