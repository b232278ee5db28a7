"""Draws the picture of the README from `results/exchange_full.json`, for light and dark pages."""

import json
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
LABELS = {
    "global DDP": "DDP",
    "DDP, fp16 hook": "DDP, fp16 hook",
    "fairscale SlowMo": "fairscale SlowMo",
    "DiLoCo by hand": "DiLoCo by hand",
    "accelerate LocalSGD": "accelerate LocalSGD",
    "post_localSGD": "torch post_localSGD",
    "evenly, fp32 waited for": "evenly, default",
    "evenly, int8": "evenly, overlap=3, codec int8",
}
COLORS = {
    "light": {"text": "#1f2328", "peer": "#9aa4b2", "ours": "#0a7d6c", "line": "#d0d7de", "page": "#ffffff"},
    "dark": {"text": "#e6edf3", "peer": "#6e7681", "ours": "#2fbf9f", "line": "#30363d", "page": "#0d1117"},
}


def main() -> None:
    """Writes `docs/images/exchange-light.svg` and `exchange-dark.svg`."""
    rows = json.loads((HERE / "results" / "exchange_full.json").read_text())["rows"]
    measured = {
        row["method"]: row["throughput_over_limit"]
        for row in rows
        if (row.get("part"), row.get("mbit_per_s"), row.get("nodes")) == ("throughput", 50.0, "3 + 1")
    }
    folder = HERE.parent / "docs" / "images"
    folder.mkdir(exist_ok=True)
    for theme, colors in COLORS.items():
        draw(measured, colors, folder / f"exchange-{theme}.svg")


def draw(measured: dict[str, float], colors: dict[str, str], path: Path) -> None:
    """Draws one bar a method: its throughput, as a part of that without any exchange."""
    mpl.rcParams |= {"svg.hashsalt": "evenly", "font.size": 10, "text.color": colors["text"]}
    methods = sorted(LABELS, key=lambda method: (not method.startswith("evenly"), -measured[method]))
    figure, axes = plt.subplots(figsize=(7.6, 3.3), layout="constrained")
    bars = axes.barh(
        [LABELS[method] for method in methods],
        [measured[method] for method in methods],
        color=[colors["ours"] if method.startswith("evenly") else colors["peer"] for method in methods],
    )
    axes.bar_label(bars, fmt="%.2f", padding=4, color=colors["text"], zorder=3, backgroundcolor=colors["page"])
    axes.axvline(1.0, color=colors["line"], linewidth=1)
    axes.set_xlim(0, 1.08)
    title = "Training throughput over a 50 Mbit/s link between nodes of 3 and 1 ranks (no exchange = 1)"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    axes.tick_params(colors=colors["text"], length=0)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
