"""Merges the state of a run for another cluster, as the next exchange of the old one would have."""

from collections.abc import Sequence

import torch

from evenly.checkpoints.states import LocalState, NodeState, RankState, Saved, Tensors
from evenly.errors import CheckpointError
from evenly.exchange import SQUARES, Progress, add_change, extreme, fractions, is_torn, same
from evenly.spec import BufferPolicy


def merge(
    nodes: list[dict[str, NodeState]], ranks: list[RankState], layout: list[list[int]]
) -> tuple[dict[str, NodeState], RankState]:
    """Returns the merged node state and rank state of a saved run, for every rank of a new one."""
    node, rank = nodes[0], ranks[0]
    trained_models: dict[str, LocalState] = {}
    for name, local in rank["trainees"].items():
        rank_samples = [max(r["trainees"][name]["progress"]["samples"]) for r in ranks]
        weights = fractions([sum(rank_samples[r] for r in members) for members in layout])
        policies, rank_weights = _policies(local), _weights_of_ranks(weights, rank_samples, layout)
        for saved in nodes:
            _merge_pending(saved[name])
        for rank_state in ranks:
            _merge_pending_buffers(rank_state["trainees"][name], policies)
        state = node[name]
        state["parameters"] = _average([n[name]["parameters"] for n in nodes], weights)
        slots = state["optimizer"]["state"]
        for key in slots:
            slots[key] |= _average(
                [_averaged_slots(n[name]["optimizer"]["state"].get(key, {})) for n in nodes], weights
            )
        trained_models[name] = {
            "buffers": _buffers([r["trainees"][name]["buffers"] for r in ranks], policies, rank_weights),
            "agreed": None,
            "progress": _at_an_exchange(local["progress"]),
            "exchanges": None,
            "feed": local["feed"],
        }
    return node, {"trainees": trained_models, "tracked": rank["tracked"], "random": None}


def _merge_pending(state: NodeState) -> None:
    """Merges pending exchanges into a node's parameters and its optimizer's state."""
    for piece in (piece for pending_exchange in state["pending"] for piece in pending_exchange):
        target = state["parameters"].get(piece["home"])
        if piece["slot"]:
            index = int(piece["label"].split(".")[0])
            target = state["optimizer"]["state"].get(index, {}).get(piece["slot"])
        if target is not None:
            start, stop = piece["rows"] or (0, target.shape[0] if target.ndim else 1)
            rows = target[start:stop] if target.ndim else target
            rows.add_(piece["value"].to(rows.dtype))
            if piece["slot"] in SQUARES:
                (torch.view_as_real(rows) if rows.is_complex() else rows).clamp_(min=0)


def _policies(local: LocalState) -> dict[str, BufferPolicy]:
    """Returns the policy for each buffer; those that exchanges leave alone are kept."""
    exchanges = local["exchanges"]
    saved = None if exchanges is None else exchanges.get("policies")
    if saved is None:
        return {name: "average" if _is_number(value) else "max" for name, value in local["buffers"].items()}
    return {name: saved.get(name, "keep") for name in local["buffers"]}


def _merge_pending_buffers(state: LocalState, policies: dict[str, BufferPolicy]) -> None:
    """Merges pending exchanges into a rank's buffers."""
    exchanges = state["exchanges"]
    for pending_exchange in exchanges["trips"] if exchanges is not None else []:
        for name, agreed in pending_exchange["buffers"].items():
            add_change(state["buffers"][name], agreed, pending_exchange["snapshot"][name], policies[name])


def _buffers(rows: list[Tensors], policies: dict[str, BufferPolicy], weights: Sequence[float]) -> Tensors:
    """Returns the buffers that an exchange would give; those that are kept or taken from one rank are rank 0's."""
    merged = {}
    for name, result in rows[0].items():
        values, policy = [row.get(name, result) for row in rows], policies[name]
        if policy in ("max", "min"):
            result = extreme(values, smallest=policy == "min")
        elif policy == "average":
            result = _mean(values, weights)
            if any(bool(is_torn(result, value)) for value in values):
                raise CheckpointError(
                    f"the buffer {name!r} of a checkpoint was to be averaged for another cluster, but on some ranks "
                    "elements of it are infinite that are finite on others. Resume on the cluster that saved it, or "
                    f"train with buffers={{{name!r}: 'max'}}, 'min', 'first' or 'keep'."
                )
        merged[name] = result
    return merged


def _weights_of_ranks(weights: Sequence[float], samples: Sequence[float], layout: list[list[int]]) -> list[float]:
    """Returns the weight of each rank: its fraction of its node's weight."""
    rank_weights = [0.0] * len(samples)
    for weight, members in zip(weights, layout, strict=True):
        for rank, share in zip(members, fractions([samples[rank] for rank in members]), strict=True):
            rank_weights[rank] = weight * share
    return rank_weights


def _at_an_exchange(progress: Progress) -> Progress:
    fragments = len(progress["since"])
    return {**progress, "since": [0] * fragments, "samples": [0.0] * fragments}


def _average(rows: list[Tensors], weights: Sequence[float]) -> Tensors:
    return {name: _mean([row.get(name, value) for row in rows], weights) for name, value in rows[0].items()}


def _mean(values: list[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Returns the weighted mean; equal values, and dtypes without a mean, stay as they are."""
    reference = values[0]
    if not _is_number(reference) or all(same(value, reference) for value in values):
        return reference
    accumulation_dtype = torch.complex128 if reference.is_complex() else torch.float64
    terms = [weight * value.to(accumulation_dtype) for weight, value in zip(weights, values, strict=True) if weight]
    return sum(terms, torch.zeros_like(reference, dtype=accumulation_dtype)).to(reference.dtype)


def _averaged_slots(slots: Saved) -> Tensors:
    """Returns the averaged slots of one parameter: not its counters, which are scalars.

    If all slots are scalars, the parameter itself is one.
    """
    tensors = {slot: value for slot, value in slots.items() if isinstance(value, torch.Tensor) and _is_number(value)}
    is_scalar = not any(value.ndim for value in tensors.values())
    return {slot: value for slot, value in tensors.items() if value.ndim or (is_scalar and slot != "step")}


def _is_number(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()
