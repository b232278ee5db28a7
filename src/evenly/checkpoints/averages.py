"""The average of a saved model over its nodes, computed as `Synchronized.agreed` computes it.

With x_n the parameters of node n, w_n its weight, b_r the buffers of rank r of a node, s_r its share in the node, and b
the buffers of the last exchange, the averages are

    sum_n w_n x_n   and   b + sum_n w_n (sum_r s_r (b_r - b)),

in the dtypes of an exchange, term by term. A sum of two terms has the bits of `agreed()`; collectives may add more than
two in another order.
"""

from collections.abc import Collection, Sequence

import torch

from evenly.checkpoints.states import LocalState, NodeState, Tensors
from evenly.errors import CheckpointError
from evenly.exchange import add_change, extreme, finite_part, fractions, is_torn, real, same, travelling_dtype
from evenly.spec import BufferPolicy

Weights = Sequence[float]


def averaged_parameters(nodes: list[NodeState], ranks: list[LocalState], weights: Weights) -> Tensors:
    """Returns the parameters that an exchange would give; pending exchanges must be merged into `nodes` already."""
    averaged = _averaged_names(ranks)
    if averaged is not None and not averaged:  # nodes never differ
        return dict(nodes[0]["parameters"])
    has_changed = _may_differ(ranks)
    merged = {}
    for name, value in nodes[0]["parameters"].items():
        values = [node["parameters"].get(name, value) for node in nodes]
        is_equal = not _is_number(value) or all(same(other, value) for other in values)
        if is_equal and not (has_changed and averaged is not None and name in averaged):
            merged[name] = value
        else:
            merged[name] = weighted_mean(values, weights)
    return merged


def averaged_buffers(ranks: list[LocalState], weights: Weights, layout: list[list[int]]) -> Tensors:
    """Returns the buffers that an exchange would give; those that are kept or taken from one rank are rank 0's."""
    policies, shares = policies_of_buffers(ranks[0]), shares_of_ranks(ranks, layout)
    for rank in ranks:
        _merge_pending_buffers(rank, policies)
    merged = {}
    for name, first in ranks[0]["buffers"].items():
        values, policy = [rank["buffers"].get(name, first) for rank in ranks], policies[name]
        if policy in ("max", "min"):
            first = extreme(values, smallest=policy == "min")
        elif policy == "average":
            first = _averaged_buffer(name, values, _agreed(ranks, name), weights, shares, layout)
        merged[name] = first
    return merged


def node_weights(ranks: list[LocalState], layout: list[list[int]]) -> tuple[float, ...]:
    """Returns the weight of each node: its part of the samples since the last exchange."""
    samples = _samples(ranks)
    return fractions([sum(samples[rank] for rank in members) for members in layout])


def shares_of_ranks(ranks: list[LocalState], layout: list[list[int]]) -> list[float]:
    """Returns the share of each rank in its node; of the ranks that hold one network together the first has it all."""
    samples, shares = _samples(ranks), [0.0] * len(ranks)
    for members in layout:
        counting = [rank for rank in members if _counts_samples(ranks[rank])]
        for rank, share in zip(counting, fractions([samples[rank] for rank in counting]), strict=True):
            shares[rank] = share
    return shares


def policies_of_buffers(local: LocalState) -> dict[str, BufferPolicy]:
    """Returns the policy for each buffer; those that exchanges leave alone are kept."""
    exchanges = local["exchanges"]
    saved = None if exchanges is None else exchanges.get("policies")
    if saved is None:
        return {name: "average" if _is_number(value) else "max" for name, value in local["buffers"].items()}
    return {name: saved.get(name, "keep") for name in local["buffers"]}


def merge_pending_parameters(state: NodeState) -> None:
    """Merges pending exchanges into a node's parameters."""
    for piece in (piece for pending_exchange in state["pending"] for piece in pending_exchange):
        target = state["parameters"].get(piece["home"])
        if not piece["slot"] and target is not None:
            start, stop = piece["rows"] or (0, target.shape[0] if target.ndim else 1)
            (target[start:stop] if target.ndim else target).add_(piece["value"])


def weighted_mean(values: Sequence[torch.Tensor], weights: Weights) -> torch.Tensor:
    """Returns the sum of weight x value, summed in the dtype in which an exchange sends the values."""
    return _received(_weighted_sum([_sent(value) for value in values], weights), like=values[0])


def _averaged_buffer(
    name: str,
    values: Sequence[torch.Tensor],
    agreed: torch.Tensor | None,
    weights: Weights,
    shares: Weights,
    layout: list[list[int]],
) -> torch.Tensor:
    """Returns the average of one buffer: its last agreed value plus the average of the changes since."""
    if not _is_number(values[0]) or all(same(value, values[0] if agreed is None else agreed) for value in values):
        return values[0]
    base = torch.zeros_like(values[0]) if agreed is None else finite_part(agreed)
    changes = [value - base for value in values]
    sent = [_sent(change) for change in changes]
    in_nodes = [_weighted_sum([sent[rank] for rank in ranks], [shares[rank] for rank in ranks]) for ranks in layout]
    total = _weighted_sum(in_nodes, weights) if len(layout) > 1 else in_nodes[0]
    average = base + _received(total, like=base)
    if any(bool(is_torn(average, value)) for value in values):
        raise CheckpointError(
            f"the buffer {name!r} of a checkpoint was to be averaged over its ranks, but on some ranks elements of it "
            "are infinite that are finite on others. Resume on the cluster that saved it, or train with "
            f"buffers={{{name!r}: 'max'}}, 'min', 'first' or 'keep'."
        )
    return average


def _sent(value: torch.Tensor) -> torch.Tensor:
    """Returns a tensor as an exchange sends it."""
    return real(value).to(travelling_dtype(value))


def _received(total: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that an exchange has sent, as the dtype of `like`."""
    result = torch.empty_like(like, memory_format=torch.contiguous_format)
    real(result).copy_(total)
    return result


def _weighted_sum(values: Sequence[torch.Tensor], weights: Weights) -> torch.Tensor:
    """Returns the sum of weight x value; where the weight is 0 the product is 0, also of NaN."""
    terms = [v * weight if weight else torch.zeros_like(v) for v, weight in zip(values, weights, strict=True)]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _merge_pending_buffers(state: LocalState, policies: dict[str, BufferPolicy]) -> None:
    """Merges pending exchanges into a rank's buffers; what they agreed on is the last agreed value."""
    exchanges = state["exchanges"]
    for pending_exchange in exchanges["trips"] if exchanges is not None else []:
        for name, agreed in pending_exchange["buffers"].items():
            add_change(state["buffers"][name], agreed, pending_exchange["snapshot"][name], policies[name])
            if state["agreed"] is not None and name in state["agreed"]:
                state["agreed"][name] = agreed


def _agreed(ranks: list[LocalState], name: str) -> torch.Tensor | None:
    """Returns the value of a buffer after the last exchange."""
    return (ranks[0]["agreed"] or {}).get(name)


def _samples(ranks: list[LocalState]) -> list[float]:
    """Returns the samples of each rank since the last exchange; without steps since, each replica counts as one."""
    if _has_steps(ranks):
        return [max(rank["progress"]["samples"]) for rank in ranks]
    return [float(_counts_samples(rank)) for rank in ranks]


def _pending(rank: LocalState) -> int:
    return 0 if rank["exchanges"] is None else len(rank["exchanges"]["trips"])


def _counts_samples(rank: LocalState) -> bool:
    """Returns whether a rank counts the samples of its replica; files of earlier versions do not say it."""
    return True if rank["exchanges"] is None else rank["exchanges"].get("counts", True)


def _averaged_names(ranks: list[LocalState]) -> Collection[str] | None:
    """Returns the parameters that exchanges average; None if a file of an earlier version does not say it."""
    exchanges = ranks[0]["exchanges"]
    names = None if exchanges is None else exchanges.get("averaged")
    return None if names is None else set(names)


def _may_differ(ranks: list[LocalState]) -> bool:
    """Returns whether the parameters of nodes may differ, so that an exchange averages them."""
    return _has_steps(ranks) or any(rank["progress"].get("differs", False) for rank in ranks)


def _has_steps(ranks: list[LocalState]) -> bool:
    """Returns whether steps were made since the last merged exchange."""
    return any(max(rank["progress"]["since"]) > 0 or _pending(rank) for rank in ranks)


def _is_number(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()
