"""Ranks as threads of one process, each on its own real gloo groups over one store."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from evenly.comm import RankGroup
from evenly.spec import Cluster, Device, Node


class RankError(AssertionError):
    """Some ranks raised; `errors` holds one exception or None for each rank."""

    def __init__(self, errors: list[BaseException | None]) -> None:
        super().__init__("; ".join(f"rank {r}: {type(e).__name__}: {e}" for r, e in enumerate(errors) if e))
        self.errors = errors


def run_ranks(count: int, act: Callable[..., Any], *args: Any, limit_s: float = 110.0) -> list[Any]:
    """Returns act(party, *args) of every rank, or raises RankError with each rank's error."""
    store = dist.HashStore()
    results: list[Any] = [None] * count
    errors: list[BaseException | None] = [None] * count

    def run(rank: int) -> None:
        try:
            results[rank] = act(RankGroup(rank, count, store), *args)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for rank, thread in enumerate(threads):
        thread.join(limit_s)
        if thread.is_alive():
            errors[rank] = errors[rank] or TimeoutError(f"still running after {limit_s} s")
    if any(errors):
        raise RankError(errors) from next(error for error in errors if error)
    return results


def cluster_of(nodes: Sequence[Sequence[int]]) -> Cluster:
    """Returns a cluster of CPU ranks with these nodes."""
    return Cluster(
        nodes=tuple(
            Node(name=f"n{index}", ranks=tuple(ranks), devices=(Device(kind="cpu"),) * len(ranks))
            for index, ranks in enumerate(nodes)
        )
    )


def ragged(*sizes: int) -> list[list[int]]:
    """Returns rank lists of nodes of these sizes: ragged(3, 1) is [[0, 1, 2], [3]]."""
    ranks = iter(range(sum(sizes)))
    return [[next(ranks) for _ in range(size)] for size in sizes]
