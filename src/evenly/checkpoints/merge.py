"""The state of a run for another cluster: what the next exchange of the old one would have made."""

from collections.abc import Sequence

import torch

from evenly.checkpoints.states import LocalState, NodeState, RankState, Saved, Tensors
from evenly.errors import CheckpointError
from evenly.exchange import SQUARES, add_change, extreme, fractions, is_torn, same
from evenly.spec import BufferPolicy


def merge(
    nodes: list[dict[str, NodeState]], ranks: list[RankState], layout: list[list[int]]
) -> tuple[dict[str, NodeState], RankState]:
    """Returns one node's and one rank's state that stands for all of a saved run, for every rank of a new one."""
    node, rank = nodes[0], ranks[0]
    trained_models: dict[str, LocalState] = {}
    for name, local in rank["trainees"].items():
        own = [max(r["trainees"][name]["progress"]["samples"]) for r in ranks]
        weights = fractions([sum(own[r] for r in members) for members in layout])
        policies, of_ranks = _policies(local), _of_ranks(weights, own, layout)
        for saved in nodes:
            _land(saved[name])
        for of_rank in ranks:
            _land_buffers(of_rank["trainees"][name], policies)
        state = node[name]
        state["parameters"] = _average([n[name]["parameters"] for n in nodes], weights)
        slots = state["optimizer"]["state"]
        for key in slots:
            slots[key] |= _average(
                [_averaged_slots(n[name]["optimizer"]["state"].get(key, {})) for n in nodes], weights
            )
        trained_models[name] = {
            "buffers": _buffers([r["trainees"][name]["buffers"] for r in ranks], policies, of_ranks),
            "agreed": None,
            "progress": _at_an_exchange(local["progress"]),
            "exchanges": None,
            "feed": local["feed"],
        }
    return node, {"trainees": trained_models, "tracked": rank["tracked"], "random": None}


def _land(state: NodeState) -> None:
    """Merges what was under way into a node's parameters and its optimizer's state."""
    for piece in (piece for pending_exchange in state["pending"] for piece in pending_exchange):
        target = state["parameters"].get(piece["home"])
        if piece["slot"]:
            place = int(piece["label"].split(".")[0])
            target = state["optimizer"]["state"].get(place, {}).get(piece["slot"])
        if target is not None:
            start, stop = piece["rows"] or (0, target.shape[0] if target.ndim else 1)
            rows = target[start:stop] if target.ndim else target
            rows.add_(piece["value"].to(rows.dtype))
            if piece["slot"] in SQUARES:
                (torch.view_as_real(rows) if rows.is_complex() else rows).clamp_(min=0)


def _policies(local: LocalState) -> dict[str, BufferPolicy]:
    """Returns what exchanges make of each buffer; those that they leave alone are kept."""
    saved: dict[str, BufferPolicy] | None = (local["exchanges"] or {}).get("policies")
    if saved is None:
        return {name: "average" if _is_number(value) else "max" for name, value in local["buffers"].items()}
    return {name: saved.get(name, "keep") for name in local["buffers"]}


def _land_buffers(state: LocalState, policies: dict[str, BufferPolicy]) -> None:
    """Merges what was under way into a rank's buffers."""
    for pending_exchange in (state["exchanges"] or {"trips": ()})["trips"]:
        for name, agreed in pending_exchange["buffers"].items():
            add_change(state["buffers"][name], agreed, pending_exchange["snapshot"][name], policies[name])


def _buffers(rows: list[Tensors], policies: dict[str, BufferPolicy], weights: Sequence[float]) -> Tensors:
    """Returns what ranks would agree on; of what is kept or taken from one rank, that of rank 0."""
    found = {}
    for name, first in rows[0].items():
        values, policy = [row.get(name, first) for row in rows], policies[name]
        if policy in ("max", "min"):
            first = extreme(values, smallest=policy == "min")
        elif policy == "average":
            first = _mean(values, weights)
            if any(bool(is_torn(first, value)) for value in values):
                raise CheckpointError(
                    f"the buffer {name!r} of a checkpoint was to be averaged for another cluster, but on some ranks "
                    "elements of it are infinite that are finite on others. Resume on the cluster that saved it, or "
                    f"train with buffers={{{name!r}: 'max'}}, 'min', 'first' or 'keep'."
                )
        found[name] = first
    return found


def _of_ranks(weights: Sequence[float], samples: Sequence[float], layout: list[list[int]]) -> list[float]:
    """Returns the weight of each rank: its part of its node's."""
    found = [0.0] * len(samples)
    for weight, members in zip(weights, layout, strict=True):
        for rank, share in zip(members, fractions([samples[rank] for rank in members]), strict=True):
            found[rank] = weight * share
    return found


def _at_an_exchange(progress: Saved) -> Saved:
    fragments = len(progress["since"])
    return {**progress, "since": [0] * fragments, "samples": [0.0] * fragments}


def _average(rows: list[Tensors], weights: Sequence[float]) -> Tensors:
    return {name: _mean([row.get(name, value) for row in rows], weights) for name, value in rows[0].items()}


def _mean(values: list[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Returns the weighted mean; what is the same everywhere, or no number that has one, stays as it is."""
    first = values[0]
    if not _is_number(first) or all(same(value, first) for value in values):
        return first
    wide = torch.complex128 if first.is_complex() else torch.float64
    terms = [weight * value.to(wide) for weight, value in zip(weights, values, strict=True) if weight]
    return sum(terms, torch.zeros_like(first, dtype=wide)).to(first.dtype)


def _averaged_slots(slots: Saved) -> Tensors:
    """Returns the state of one parameter that is averaged: not its counters, which have no dim.

    If nothing has one, the parameter itself has none.
    """
    tensors = {slot: value for slot, value in slots.items() if isinstance(value, torch.Tensor) and _is_number(value)}
    is_scalar = not any(value.ndim for value in tensors.values())
    return {slot: value for slot, value in tensors.items() if value.ndim or (is_scalar and slot != "step")}


def _is_number(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()
