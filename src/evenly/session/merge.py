"""The state of a run for another cluster: what the next exchange of the old one would have made."""

from collections.abc import Sequence
from typing import Any

import torch

from evenly.nodes import SQUARES, add_change, fractions

Tensors = dict[str, torch.Tensor]


def merge(nodes: list[Any], ranks: list[Any], layout: list[list[int]]) -> tuple[Any, Any]:
    """Returns one node's and one rank's state that stands for all of a saved run, for every rank of a new one."""
    node, rank = nodes[0], ranks[0]
    trainees = {}
    for name, local in rank["trainees"].items():
        own = [max(r["trainees"][name]["progress"]["samples"]) for r in ranks]
        weights = fractions([sum(own[r] for r in members) for members in layout])
        for saved in nodes:
            _land(saved[name])
        for saved in ranks:
            _land_buffers(saved["trainees"][name])
        state = node[name]
        state["parameters"] = _average([n[name]["parameters"] for n in nodes], weights)
        slots = state["optimizer"]["state"]
        for key in slots:
            slots[key] |= _average([_floats(n[name]["optimizer"]["state"].get(key, {})) for n in nodes], weights)
        buffers = [_floats(r["trainees"][name]["buffers"]) for r in ranks]
        trainees[name] = {
            "buffers": local["buffers"] | _average(buffers, fractions(own)),
            "agreed": None,
            "progress": _at_an_exchange(local["progress"]),
            "exchanges": None,
            "feed": local["feed"],
        }
    return node, {"trainees": trainees, "tracked": rank["tracked"], "random": None}


def _land(state: dict[str, Any]) -> None:
    """Merges what was under way into a node's parameters and its optimizer's state."""
    for piece in (piece for trip in state["pending"] for piece in trip):
        target = state["parameters"].get(piece["home"])
        if piece["slot"]:
            place = int(piece["label"].split(".")[0])
            target = state["optimizer"]["state"].get(place, {}).get(piece["slot"])
        if target is not None:
            start, stop = piece["rows"] or (0, target.shape[0] if target.ndim else 1)
            rows = target[start:stop] if target.ndim else target
            rows.add_(piece["value"].to(rows.dtype))
            if piece["slot"] in SQUARES:
                rows.clamp_(min=0)


def _land_buffers(state: dict[str, Any]) -> None:
    """Merges what was under way into a rank's buffers."""
    for trip in state["exchanges"]["trips"]:
        for name, agreed in trip["buffers"].items():
            add_change(state["buffers"][name], agreed, trip["snapshot"][name])


def _at_an_exchange(progress: dict[str, Any]) -> dict[str, Any]:
    fragments = len(progress["since"])
    return {**progress, "since": [0] * fragments, "samples": [0.0] * fragments}


def _average(rows: list[Tensors], weights: Sequence[float]) -> Tensors:
    return {name: _mean([row.get(name, value) for row in rows], weights) for name, value in rows[0].items()}


def _mean(values: list[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Returns the weighted mean; what is the same everywhere, or no float, stays as it is."""
    first = values[0]
    if not first.is_floating_point() or all(torch.equal(value, first) for value in values):
        return first
    wide = torch.float64 if first.dtype == torch.float64 else torch.float32
    total = sum(
        (w * value.to(wide) for w, value in zip(weights, values, strict=True)), torch.zeros_like(first, dtype=wide)
    )
    return total.to(first.dtype)


def _floats(values: dict[str, Any]) -> Tensors:
    return {k: v for k, v in values.items() if isinstance(v, torch.Tensor) and v.is_floating_point() and v.ndim}
