"""How a measurement speaks: a table for people, then one JSON object on the last line."""

import json
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Claim:
    """A figure that was promised, as it was measured, whether it passes or not."""

    name: str
    value: float
    bar: float
    better: Literal["lower", "higher"]

    @property
    def holds(self) -> bool:
        """Whether the measured figure reaches its bar."""
        return self.value <= self.bar if self.better == "lower" else self.value >= self.bar


def tell(
    benchmark: str,
    rows: Sequence[Mapping[str, Any]],
    claims: Sequence[Claim],
    *,
    note: str,
    save: bool,
    shown: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Prints the rows (or those to be `shown`), the claims and the JSON object; keeps it in `results/` if asked."""
    show(rows if shown is None else shown)
    console = _console()
    for claim in claims:
        verdict = "holds" if claim.holds else "DOES NOT HOLD"
        sign = "<=" if claim.better == "lower" else ">="
        console.print(f"{claim.name}: {claim.value:.4g} ({sign} {claim.bar:g}: {verdict})", soft_wrap=True)
    result = {
        "benchmark": benchmark,
        "commit": COMMIT,
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "rows": list(rows),
        "claims": [asdict(claim) for claim in claims],
        "note": note,
    }
    if save:
        (RESULTS / f"{benchmark}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result), flush=True)


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints rows as a table."""
    if rows:
        _console().print(_table(rows))


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120)


def median(values: Sequence[float]) -> float:
    """Returns the median."""
    return statistics.median(values)


def spread(values: Sequence[float]) -> list[float]:
    """Returns the smallest and the largest value, rounded."""
    return [round(min(values), 2), round(max(values), 2)]


def commit() -> str:
    """Returns the commit of the working tree, with a plus if it was changed."""
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(
            ["git", "status", "--porcelain", "src", "benchmarks/*.py"], capture_output=True, text=True
        )
        return found.stdout.strip() + ("+" if changed.stdout.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> dict[str, Any]:
    """Returns what the measurement ran on."""
    import torch

    return {
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


COMMIT = commit()  # at the start: the tree may go on while a long measurement runs
HERE = {"commit": COMMIT, "architecture": platform.machine()}  # of rows that are made part by part


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table()
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return (" to " if len(value) == 2 else ", ").join(str(item) for item in value)
    return "-" if value is None else str(value)
