"""Plan and forecast -> a picture of bars: how long each rank computes, communicates and waits."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from evenly.errors import SpecError
from evenly.reports.plan_table import RankRow, milliseconds, per_second
from evenly.spec import Forecast

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 40  # ranks in one picture; beyond that only the slowest and the fastest
COLORS = {"computes": "#2a6f97", "on the wires": "#f4a259", "waits for others": "#dcdcdc"}
SUFFIXES = (".png", ".svg")
WIDTH = 72  # characters of a title's line


@dataclass(frozen=True)
class Panel:
    """One plan in a picture."""

    title: str
    rows: Sequence[RankRow]
    forecast: Forecast


def require_picture(path: Path) -> None:
    """Raises `SpecError` unless a picture can be drawn into this file."""
    if path.suffix.lower() not in SUFFIXES:
        raise SpecError(f"the picture {path} was asked for, but pictures are .png or .svg files. Give such a name.")
    if find_spec("matplotlib") is None:
        raise SpecError(
            f"the picture {path} was asked for, but matplotlib is not installed. Run: pip install 'evenly[plot]'."
        )


def draw_picture(panels: Sequence[Panel], path: Path) -> None:
    """Draws plans side by side, with one scale, into a .png or .svg file."""
    require_picture(path)
    from matplotlib.figure import Figure

    shown = [_chosen(panel.rows) for panel in panels]
    height = 1.9 + 0.27 * max(len(rows) for rows in shown)
    figure = Figure(figsize=(7.5 * len(panels), max(3.0, height)), layout="constrained")
    subplots = figure.subplots(1, len(panels), sharex=True, squeeze=False)
    for axes, panel, rows in zip(subplots[0], panels, shown, strict=True):
        _draw(axes, panel, rows)
    _legend(figure, any(row.left_out for rows in shown for row in rows))
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise SpecError(f"cannot draw into {path}: {error.strerror}. Give a file in a folder that exists.") from None


def _chosen(rows: Sequence[RankRow]) -> list[RankRow]:
    """Returns all rows, or if they are too many those that compute longest and shortest."""
    if len(rows) <= MOST:
        return list(rows)
    order = sorted((row for row in rows if not row.left_out), key=lambda row: (-row.compute_s, row.rank))
    few = order if len(order) <= MOST else [*order[: MOST // 2], *order[-MOST // 2 :]]
    return few or list(rows)[:MOST]


def _draw(axes: "Axes", panel: Panel, rows: Sequence[RankRow]) -> None:
    longest = max(row.total_s for row in panel.rows) or panel.forecast.step_s
    for bar, row in enumerate(rows):
        if row.left_out:
            axes.barh(bar, 1e3 * longest, height=0.72, facecolor="white", edgecolor="#b0b0b0", hatch="////", lw=0.6)
            continue
        start_s = 0.0
        for seconds, color in zip((row.compute_s, row.wires_s, row.wait_s), COLORS.values(), strict=True):
            axes.barh(bar, 1e3 * seconds, left=1e3 * start_s, height=0.72, color=color)
            start_s += seconds
    axes.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("ms of a step, in the mean")
    axes.spines[["top", "right"]].set_visible(False)
    summary = f"{milliseconds(panel.forecast.step_s)} ms a step, {per_second(panel.forecast.samples_per_s)} samples/s"
    few = f"\nthe slowest and the fastest of {len(panel.rows)} ranks" if len(rows) < len(panel.rows) else ""
    title = fill(f"{panel.title}: {summary}" if panel.title else summary, WIDTH)
    axes.set_title(title + few, fontsize=10, loc="left")


def _label(row: RankRow) -> str:
    samples = "left out" if row.left_out else f"{row.samples} samples" if row.samples != 1 else "1 sample"
    return f"rank {row.rank} ({_short(row.node)}), {samples}"


def _short(name: str) -> str:
    return name if len(name) <= 16 else name[:15] + "…"


def _legend(figure: "Figure", left_out: bool) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=color, label=name) for name, color in COLORS.items()]
    if left_out:
        patches.append(Patch(facecolor="white", edgecolor="#b0b0b0", hatch="////", label="left out"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9)
