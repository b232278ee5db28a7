"""Plan and forecast -> the rows of a table, bars of text, and the notes below."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from evenly.spec import (
    Adaptive,
    Cluster,
    EveryEpoch,
    EveryGradient,
    EverySeconds,
    EverySteps,
    Forecast,
    Layout,
    Plan,
)
from evenly.spec.layout import Choice
from evenly.spec.period import EPOCH_STEPS

WEIGHTED = ("conv", "linear", "embedding", "attention", "recurrent")
MOST_NAMED = 8  # ranks named in a line
BLOCKS, ASCII = "█▒░", "#=."  # computing, communicating, waiting


@dataclass(frozen=True)
class RankRow:
    """The times of one rank in a step, averaged over a forecast."""

    rank: int
    node: str
    device: str
    samples: int
    share: float  # of the global batch; the ranks of a replica all have the replica's share
    compute_s: float
    wires_s: float
    wait_s: float
    memory_bytes: int
    left_out: str

    @property
    def total_s(self) -> float:
        """The time of its step."""
        return self.compute_s + self.wires_s + self.wait_s


def rank_rows(plan: Plan, forecast: Forecast, cluster: Cluster) -> list[RankRow]:
    """Returns one row for each rank."""
    batch = max(1, sum(plan.batch_shares))
    rows = []
    for role, times in zip(plan.roles, forecast.devices, strict=True):
        device = cluster.device_of(role.rank)
        part = 1 / forecast.steps if role.samples else 0.0
        rows.append(
            RankRow(
                rank=role.rank,
                node=cluster.nodes[cluster.node_of(role.rank)].name,
                device=device.name or (f"cuda:{device.index}" if device.kind == "cuda" else device.kind),
                samples=role.samples,
                share=role.samples / batch,
                compute_s=times.compute_s * part,
                wires_s=times.wires_s * part,
                wait_s=times.wait_s * part,
                memory_bytes=role.memory_bytes,
                left_out=role.left_out,
            )
        )
    return rows


PLAN_HEADERS = ("rank", "node", "device", "samples", "computes ms", "wires ms", "waits ms", "memory")


def plan_cells(row: RankRow) -> tuple[str, ...]:
    """Returns a row as texts, under `PLAN_HEADERS`."""
    identity = (str(row.rank), row.node, row.device)
    if row.left_out:
        return (*identity, "left out", "-", "-", "-", "-")
    times = (milliseconds(seconds) for seconds in (row.compute_s, row.wires_s, row.wait_s))
    return (*identity, f"{row.samples} ({row.share:.1%})", *times, gigabytes(row.memory_bytes))


def milliseconds(seconds: float) -> str:
    """Returns a time in ms, short.

    >>> milliseconds(0.1234567), milliseconds(2e-6), milliseconds(1e-10)
    ('123.5', '0.002', '0')
    """
    value = 1e3 * seconds if seconds > 5e-7 else 0.0
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def gigabytes(size_bytes: int) -> str:
    """Returns bytes in a unit that suits; - for 0, which is not known.

    >>> gigabytes(8_200_000_000), gigabytes(3_000_000), gigabytes(0)
    ('8.2 GB', '3 MB', '-')
    """
    if not size_bytes:
        return "-"
    factor, unit = next((pair for pair in ((1e9, "GB"), (1e6, "MB")) if size_bytes >= pair[0]), (1e3, "kB"))
    return f"{size_bytes / factor:.3g} {unit}"


def per_second(rate: float) -> str:
    """Returns samples a second without an exponent.

    >>> per_second(127.23), per_second(29320.4)
    ('127.2', '29320')
    """
    return f"{rate:.4g}" if rate < 1000 else f"{rate:.0f}"


def left_out_notes(rows: Sequence[RankRow]) -> list[str]:
    """Returns a line for each reason for which ranks take no part."""
    reasons = by_reason({row.rank: row.left_out for row in rows if row.left_out})
    return [f"{named(ranks)} {'is' if len(ranks) == 1 else 'are'} left out: {why}" for why, ranks in reasons.items()]


def by_reason(left_out: Mapping[int, str]) -> dict[str, list[int]]:
    """Returns the ranks that are left out for each reason."""
    reasons: dict[str, list[int]] = {}
    for rank, why in left_out.items():
        reasons.setdefault(why, []).append(rank)
    return reasons


def named(ranks: Sequence[int]) -> str:
    """Returns ranks in words, at most `MOST_NAMED` of them.

    >>> named([1]), named(range(10))
    ('rank 1', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more')
    """
    rest = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:MOST_NAMED]))}{rest}"


def totals(plan: Plan, forecast: Forecast) -> list[str]:
    """Returns the totals of a plan, in words."""
    lines = [f"{milliseconds(forecast.step_s)} ms a step in the mean, {per_second(forecast.samples_per_s)} samples/s"]
    if plan.predicted is not None:
        source = "what was measured" if plan.predicted.is_measured else "the speeds you gave"
        lines.append(f"a step alone takes {milliseconds(plan.predicted.step_s)} ms; predicted from {source}")
    if not forecast.exchanges:
        return [*lines, "no exchanges: only one node takes part"]
    exchange_ms = milliseconds(forecast.exchange_s / forecast.exchanges)
    part = forecast.exchange_s / forecast.seconds
    return [*lines, f"an exchange between nodes takes {exchange_ms} ms, {_often(plan)}: {part:.1%} of the time"]


def _often(plan: Plan) -> str:
    match plan.period:
        case EverySteps(steps=steps):
            return "after every step" if steps == 1 else f"every {steps} steps"
        case EverySeconds(seconds=seconds):
            return f"every {seconds:g} s"
        case EveryEpoch(epochs=1):
            return f"once an epoch (taken as {EPOCH_STEPS} steps)"
        case EveryEpoch(epochs=epochs):
            return f"every {epochs} epochs (of {EPOCH_STEPS} steps each)"
        case Adaptive(start=steps):
            return f"every {'step' if steps == 1 else f'{steps} steps'} at first, then as measured"
        case EveryGradient():
            return "of gradients at every step"


def bars(rows: Sequence[RankRow], *, width: int, ascii_only: bool = False) -> list[str]:
    """Returns a line for each rank: how long it computes, communicates and waits; the last line is a legend."""
    signs = ASCII if ascii_only else BLOCKS
    longest = max((row.total_s for row in rows), default=0.0) or 1.0
    head = max((len(f"rank {row.rank}") for row in rows), default=0)
    lines = []
    for row in rows:
        times = (row.compute_s, row.wires_s, row.wait_s)
        edges = [round(width * sum(times[:count]) / longest) for count in range(4)]
        drawn = "".join(sign * (edges[i + 1] - edges[i]) for i, sign in enumerate(signs))
        text = "left out" if row.left_out else f"{drawn.ljust(width)} {milliseconds(row.total_s)} ms"
        lines.append(f"{f'rank {row.rank}'.ljust(head)} {text}")
    return [*lines, f"{' ' * head} {signs[0]} computes  {signs[1]} on the wires  {signs[2]} waits for others"]


@dataclass(frozen=True)
class BlockRow:
    """Consecutive layers that are cut alike."""

    layers: str
    unit: str
    counts: tuple[int, ...]  # one for each rank that holds the network; empty: whole on every rank


def block_rows(layout: Layout) -> list[BlockRow]:
    """Returns each rank's units of every layer with weights; neighbours that are cut alike share a row."""
    rows = []
    for (unit, counts), members in groupby(_unit_counts(layout), key=lambda entry: entry[1:]):
        names = [name for name, *_ in members]
        text = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"
        rows.append(BlockRow(text, unit, counts))
    return rows


def _unit_counts(layout: Layout) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for choice in layout.choices:
        if choice.op not in WEIGHTED:
            continue
        name = choice.where or choice.layer
        placement = next((r for r in (*choice.gives, *choice.needs) if r.state == "sharded"), None)
        if placement is None:
            yield name, "whole", ()
            continue
        cut = layout.cuts[placement.cut]
        counts = dict(zip(layout.members, cut.counts(), strict=True))
        yield name, _unit(choice, rows=cut.rows), tuple(counts.get(index, 0) for index in range(len(layout.shares)))


def _unit(choice: Choice, *, rows: int) -> str:
    """Returns the name of the units in which a layer is cut."""
    if rows:
        return "samples" if rows == 1 else "rows of the batch"
    if choice.op == "attention":
        return "heads"
    if choice.mode in ("reduced", "columns", "rows", "units", "bystander"):
        return {"reduced": "inputs", "bystander": "indices"}.get(choice.mode, choice.mode)
    return "filters" if choice.op == "conv" else "outputs"
