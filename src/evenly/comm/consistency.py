"""Checks that all ranks have the same model and settings."""

import hashlib
from collections import defaultdict

import torch

from evenly.comm.collectives import CollectiveWaiter, gather_json
from evenly.comm.groups import Group
from evenly.errors import MismatchError


def require_same(lines: list[str], group: Group, waiter: CollectiveWaiter) -> None:
    """Raises `MismatchError` on every rank, naming the first line that differs and the ranks, unless all agree."""
    digests = gather_json(digest(lines), group, waiter)
    if len(set(digests)) == 1:
        return
    lines_by_rank = gather_json(lines, group, waiter)
    for number in range(max(map(len, lines_by_rank))):
        ranks_by_line: dict[str, list[int]] = defaultdict(list)
        for rank, rank_lines in enumerate(lines_by_rank):
            ranks_by_line[rank_lines[number] if number < len(rank_lines) else "nothing more"].append(rank)
        if len(ranks_by_line) > 1:
            parts = "; ".join(f"ranks {ranks} have {line}" for line, ranks in ranks_by_line.items())
            raise MismatchError(
                f"the ranks were not given the same model and settings: {parts}. "
                "Build the same model, optimizer and settings on every rank."
            )


def digest(lines: list[str]) -> str:
    """Returns a hash of the lines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """Returns the learning rate of the first parameter group; 0 for one on an accelerator, which is not read."""
    rate = optimizer.param_groups[0].get("lr", 0.0)
    is_on_host = isinstance(rate, int | float) or (isinstance(rate, torch.Tensor) and rate.device.type == "cpu")
    return float(rate) if is_on_host else 0.0
