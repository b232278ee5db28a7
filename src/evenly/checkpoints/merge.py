"""Merges the state of a run for another cluster, as the next exchange of the old one would have."""

from collections.abc import Sequence

import torch

from evenly.checkpoints.averages import (
    averaged_buffers,
    averaged_parameters,
    merge_pending_parameters,
    node_weights,
)
from evenly.checkpoints.states import LocalState, NodeState, RankState, Saved, Tensors
from evenly.exchange import SQUARES, Progress, same


def merge(
    nodes: list[dict[str, NodeState]], ranks: list[RankState], layout: list[list[int]]
) -> tuple[dict[str, NodeState], RankState]:
    """Returns the merged node state and rank state of a saved run, for every rank of a new one."""
    node, rank = nodes[0], ranks[0]
    trained_models: dict[str, LocalState] = {}
    for name, local in rank["trainees"].items():
        states, locals_ = [saved[name] for saved in nodes], [rank_state["trainees"][name] for rank_state in ranks]
        weights = node_weights(locals_, layout)
        for state in states:
            merge_pending_parameters(state)
            _merge_pending_slots(state)
        slots = node[name]["optimizer"]["state"]
        for key in slots:
            slots[key] |= _average(
                [_averaged_slots(state["optimizer"]["state"].get(key, {})) for state in states], weights
            )
        node[name]["parameters"] = averaged_parameters(states, locals_, weights)
        trained_models[name] = {
            "buffers": averaged_buffers(locals_, weights, layout),
            "agreed": None,
            "progress": _at_an_exchange(local["progress"]),
            "exchanges": None,
            "feed": local["feed"],
        }
    return node, {"trainees": trained_models, "tracked": rank["tracked"], "random": None}


def _merge_pending_slots(state: NodeState) -> None:
    """Merges pending exchanges into a node's optimizer state."""
    for piece in (piece for pending_exchange in state["pending"] for piece in pending_exchange if piece["slot"]):
        index = int(piece["label"].split(".")[0])
        target = state["optimizer"]["state"].get(index, {}).get(piece["slot"])
        if target is not None:
            start, stop = piece["rows"] or (0, target.shape[0] if target.ndim else 1)
            rows = target[start:stop] if target.ndim else target
            rows.add_(piece["value"].to(rows.dtype))
            if piece["slot"] in SQUARES:
                (torch.view_as_real(rows) if rows.is_complex() else rows).clamp_(min=0)


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
