"""One exchange: weighted averages across nodes, reduced into scratch and applied only when complete."""

from collections.abc import Sequence

import torch

from evenly.comm import Groups, Waiter, all_reduce, broadcast, slices
from evenly.nodes.flat import Flat, flats
from evenly.nodes.membership import Quorum


def average(tensors: Sequence[torch.Tensor], quorum: Quorum, groups: Groups, waiter: Waiter) -> int:
    """Replaces each tensor by its weighted average over nodes; returns the bytes this rank handed to slow wires.

    The tensors must be equal on all ranks of a node. Each rank reduces the slice it owns with its peers; the node then
    shares the slices. With weights w_n the result is the sum over nodes n of w_n x_n.
    """
    results: list[tuple[Flat, torch.Tensor]] = []
    sent_bytes = 0
    for flat in flats(tensors):
        scratch = flat.scratch()
        sent_bytes += _reduce(flat, scratch, quorum, waiter)
        _share(scratch, groups, waiter)
        results.append((flat, scratch))
    for flat, scratch in results:
        flat.unpack(scratch)
    return sent_bytes


def average_in_node(tensors: Sequence[torch.Tensor], quorum: Quorum, groups: Groups, waiter: Waiter) -> None:
    """Replaces each tensor by its average over the node's ranks, weighted by their samples."""
    for flat in flats(tensors):
        scratch = flat.scratch()
        flat.pack(0, flat.total, scratch)
        scratch.mul_(quorum.shares[groups.local_rank])
        if len(groups.ranks) > 1:
            waiter.wait([all_reduce(scratch, groups.node)])
        flat.unpack(scratch)


def agree_on_largest(tensors: Sequence[torch.Tensor], quorum: Quorum, groups: Groups, waiter: Waiter) -> None:
    """Replaces each integer tensor by its element-wise maximum over all ranks."""
    if not sum(tensor.numel() for tensor in tensors):
        return
    flat = Flat(tensors, torch.int64)
    scratch = flat.scratch()
    flat.pack(0, flat.total, scratch)
    waiter.wait([all_reduce(scratch, groups.node, largest=True)])
    copies = [scratch.clone() for _ in quorum.peers]
    waiter.wait([all_reduce(copy, peers.group, largest=True) for copy, peers in zip(copies, quorum.peers, strict=True)])
    flat.unpack(copies[0])


def _reduce(flat: Flat, scratch: torch.Tensor, quorum: Quorum, waiter: Waiter) -> int:
    works, sent_bytes = [], 0
    weight, nodes = quorum.weights[quorum.node], len(quorum.weights)
    for peers in quorum.peers:
        start, stop = peers.segment.range_of(flat.total)
        if start == stop:
            continue
        part = scratch[start:stop]
        flat.pack(start, stop, part)
        part.mul_(weight) if weight else part.zero_()  # 0 * NaN would not be 0
        if nodes > 1:
            works.append(all_reduce(part, peers.group))
            sent_bytes += 2 * (nodes - 1) * part.numel() * part.element_size() // nodes
    waiter.wait(works)
    return sent_bytes


def _share(scratch: torch.Tensor, groups: Groups, waiter: Waiter) -> None:
    if len(groups.ranks) == 1:
        return
    parts = enumerate(slices(groups.ranks, scratch.numel()))
    waiter.wait(
        [broadcast(scratch[start:stop], groups.node, source=owner) for owner, (start, stop) in parts if start < stop]
    )
