"""The state of a run for another cluster: what the next exchange of the old one would have made."""

from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


def merge(nodes: list[Any], ranks: list[Any], layout: list[list[int]]) -> tuple[Any, Any]:
    """Returns one node's and one rank's state that stands for all of a saved run, for every rank of a new one."""
    node, rank = nodes[0], ranks[0]
    trainees = {}
    for name, local in rank["trainees"].items():
        own = [max(r["trainees"][name]["progress"]["samples"]) for r in ranks]
        weights = _fractions([sum(own[r] for r in members) for members in layout])
        state = node[name]
        state["parameters"] = _average([n[name]["parameters"] for n in nodes], weights)
        slots = state["optimizer"]["state"]
        for key in slots:
            slots[key] |= _average([_floats(n[name]["optimizer"]["state"].get(key, {})) for n in nodes], weights)
        buffers = [_floats(r["trainees"][name]["buffers"]) for r in ranks]
        trainees[name] = {
            "buffers": local["buffers"] | _average(buffers, _fractions(own)),
            "agreed": None,
            "progress": _at_an_exchange(local["progress"]),
            "exchanges": None,
            "feed": local["feed"],
        }
    return node, {"trainees": trainees, "tracked": rank["tracked"], "random": None}


def _at_an_exchange(progress: dict[str, Any]) -> dict[str, Any]:
    fragments = len(progress["since"])
    return {**progress, "since": [0] * fragments, "samples": [0.0] * fragments}


def _average(rows: list[Tensors], weights: list[float]) -> Tensors:
    return {name: _mean([row.get(name, value) for row in rows], weights) for name, value in rows[0].items()}


def _mean(values: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
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


def _fractions(amounts: list[float]) -> list[float]:
    total = sum(amounts)
    return [amount / total if total else 1 / len(amounts) for amount in amounts]
