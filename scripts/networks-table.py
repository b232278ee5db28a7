"""Writes the table of docs/recipes/networks.md: parameters, layers that are cut, and what is computed whole.

    python scripts/networks-table.py

Every network is laid out at its published size over three ranks with shares 70, 25 and 5; nothing is trained.
"""

import re
from collections import Counter
from pathlib import Path

import torch

from evenly.graph import trace_module
from evenly.layouts import lay_out
from evenly.recipes.networks import NETWORKS, build_network
from evenly.spec.layout import Layout

PAGE = Path(__file__).parents[1] / "docs" / "recipes" / "networks.md"
TABLE = re.compile(r"(<!-- table -->\n\n).*?(?=\n\n|\Z)", re.DOTALL)
SHARES = [70, 25, 5]
BATCH_SIZE = 64
WEIGHTED = ("conv", "linear", "embedding", "recurrent")
WORKING = (*WEIGHTED, "attention", "matmul")
HEAD = "| network | parameters | figure | options | layers cut | computed whole |\n|---|---|---|---|---|---|"


def row(name: str) -> str:
    info = NETWORKS[name]
    layout = layout_of(name)
    weighted = [choice for choice in layout.choices if choice.op in WEIGHTED]
    cut = sum(choice.mode != "whole" for choice in weighted)
    options = ", ".join(f"`{option}`" for option in info.options)
    cells = [f"`{name}`", f"{info.parameters:,}", info.source, options, f"{cut} of {len(weighted)}", whole(layout)]
    return f"| {' | '.join(cells)} |"


def layout_of(name: str) -> Layout:
    info = NETWORKS[name]
    with torch.device("meta"):
        network = build_network(name)
        example = tuple(
            torch.zeros([BATCH_SIZE, *map(int, size.split("x")[1:])], dtype=getattr(torch, dtype))
            for size, dtype in zip(info.inputs, info.dtypes, strict=True)
        )
    return lay_out(trace_module(network, example).graph, SHARES)


def whole(layout: Layout) -> str:
    """Returns what every rank computes whole: operations without a rule, with the reason, and those left whole."""
    reasons = dict.fromkeys(
        f"`{choice.where or choice.layer}`: {choice.note}" for choice in layout.choices if choice.note
    )
    left = Counter(c.op for c in layout.choices if c.mode == "whole" and c.op in WORKING and not c.note)
    return "; ".join([*reasons, *(f"{count} {op}" for op, count in left.items())])


def main() -> None:
    rows = [row(name) for name in NETWORKS]
    table = "\n".join([HEAD, *rows])
    PAGE.write_text(TABLE.sub(lambda found: found[1] + table, PAGE.read_text()))


if __name__ == "__main__":
    main()
