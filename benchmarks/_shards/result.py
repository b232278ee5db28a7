"""Rows and claims of `shards.py`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.common import Claim, Row, median, spread, write_result

OURS = ("ours", "ours, planned", "ours, filters")
ByteCounts = dict[str, list[int]]  # network and method to bytes as counted and as predicted


class NetworkFigures(NamedTuple):
    """One network with these shares: `seconds` of each step and `counts` of the last, by method; `peer_seconds`."""

    name: str
    batch_size: int
    shares: Sequence[float]
    seconds: dict[str, list[float]]
    counts: dict[str, dict[str, int]]
    peer_seconds: list[float] | None


def report(networks: Sequence[NetworkFigures], resnet: ByteCounts, *, save: bool) -> None:
    """Prints rows and claims as a table and as JSON; with `save` writes them to `results/shards.json`."""
    resnet = resnet | block_bytes(resnet)
    rows = [row for figures in networks for row in network_rows(figures)]
    rows += resnet_rows(resnet, rows[0])
    sizes = ", ".join(f"{figures.name}: batch {figures.batch_size}" for figures in networks)
    note = (
        f"{sizes}. Quotas of a core with a 4 ms period, ranks on loopback. MB are those of all ranks together; 'on the "
        "wire' is what the loopback interface counted, with headers. ResNet-50 'blocks' are the five bottleneck blocks "
        "1024-256-256-1024 of its third stage: a run with them less a run without."
    )
    write_result("shards", rows, shards_claims(networks, resnet), note=note, save=save)


def network_rows(figures: NetworkFigures) -> list[Row]:
    """Returns a row for each method of one network, then the peer's, if it ran, and the ideal."""
    alone_ms = 1e3 * median(figures.seconds["alone"])
    rows = [_method_row(figures, method) for method in figures.seconds]
    columns = {**dict.fromkeys(rows[0]), "network": rows[0]["network"]}
    if figures.peer_seconds:
        peer_row = {"way": "tensor_parallel, one process", **_speed(figures, 1e3 * median(figures.peer_seconds))}
        rows.append({**columns, **peer_row, "spread_ms": spread([1e3 * s for s in figures.peer_seconds])})
    ideal_ms = alone_ms * max(figures.shares) / sum(figures.shares)
    rows.append({**columns, "way": "ideal", **_speed(figures, ideal_ms)})
    return rows


def _method_row(figures: NetworkFigures, method: str) -> Row:
    """Returns time and traffic of one method; a network on one device has no traffic."""
    seconds = figures.seconds[method]
    counts = figures.counts.get(method)
    speed = _speed(figures, 1e3 * median(seconds))
    return {
        "network": f"{figures.name} {'/'.join(map(str, figures.shares))}",
        "way": method,
        "ms_per_step": speed["ms_per_step"],
        "spread_ms": spread([1e3 * s for s in seconds]),
        "samples_per_s": speed["samples_per_s"],
        "speedup_over_alone": speed["speedup_over_alone"],
        "messages": counts["messages"] if counts else None,
        "mb": counts["bytes"] / 1e6 if counts else None,
        "mb_predicted": counts["predicted_bytes"] / 1e6 if counts else None,
        "mb_on_the_wire": counts["loopback_bytes"] / 1e6 if counts else None,
    }


def _speed(figures: NetworkFigures, step_ms: float) -> dict[str, float]:
    """Returns a step's time with the throughput and the speed-up over one device that follow from it."""
    return {
        "ms_per_step": step_ms,
        "samples_per_s": 1e3 * figures.batch_size / step_ms,
        "speedup_over_alone": 1e3 * median(figures.seconds["alone"]) / step_ms,
    }


def block_bytes(resnet: ByteCounts) -> ByteCounts:
    """Returns the bytes of five blocks of ResNet-50: those of the run with them less those of the run without."""
    return {
        f"blocks {method}": [
            more - fewer for more, fewer in zip(resnet[f"five {method}"], resnet[f"none {method}"], strict=True)
        ]
        for method in ("alternation", "ours")
    }


def resnet_rows(resnet: ByteCounts, columns: Row) -> list[Row]:
    """Returns the bytes of ResNet-50 and of its blocks, with the columns of the other rows."""
    rows = []
    for method in ("alternation", "ours"):
        for part in ("whole", "blocks"):
            counted, predicted = resnet[f"{part} {method}"]
            row = {"network": f"ResNet-50, {part}", "way": method, "mb": counted / 1e6, "mb_predicted": predicted / 1e6}
            rows.append({**dict.fromkeys(columns), **row})
    return rows


def shards_claims(networks: Sequence[NetworkFigures], resnet: ByteCounts) -> list[Claim]:
    """Returns the claims about speed, predicted traffic and the traffic of residual blocks."""
    step_s = {
        figures.name: {method: median(seconds) for method, seconds in figures.seconds.items()} for figures in networks
    }
    cifar, wide = step_s["cifar"], step_s["wide"]
    best_of_ours = min(wide[method] for method in OURS if method in wide)
    blocks = resnet["blocks ours"][0] / resnet["blocks alternation"][0]
    worst = max(_traffic_ratios(networks, resnet), key=lambda ratio: abs(ratio - 1))
    return [
        Claim("speedup_over_even_70_25_5", cifar["even"] / cifar["ours"], 6.0, "higher"),
        Claim("speedup_over_fastest_alone_wide_50_30_20", wide["alone"] / best_of_ours, 1.8, "higher"),
        Claim("published_70_25_5_over_fastest_alone", cifar["alone"] / cifar["ours, planned"], 1.0, "higher"),
        Claim("bytes_counted_over_predicted", worst, 1.0, "lower"),
        Claim("resnet50_stream_bytes_over_alternation", blocks, 0.4, "lower"),
    ]


def _traffic_ratios(networks: Sequence[NetworkFigures], resnet: ByteCounts) -> list[float]:
    """Returns all counts of bytes and messages over their predictions."""
    counts: list[dict[str, Any]] = [entry for figures in networks for entry in figures.counts.values()]
    ratios = [entry["bytes"] / entry["predicted_bytes"] for entry in counts]
    ratios += [entry["messages"] / entry["predicted_messages"] for entry in counts]
    ratios += [counted / predicted for counted, predicted in resnet.values()]
    return ratios
