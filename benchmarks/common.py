"""What every benchmark writes: a table for people, then one JSON object on the last line."""

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

RESULTS_DIR = Path(__file__).parent / "results"
Row = dict[str, Any]  # one line of a result: column name to value


@dataclass(frozen=True)
class Claim:
    """A figure that an issue asked for, as it was measured, whether it passes or not."""

    name: str
    value: float
    bar: float
    better: Literal["lower", "higher"]

    @property
    def holds(self) -> bool:
        """Whether the measured figure reaches its bar."""
        return self.value <= self.bar if self.better == "lower" else self.value >= self.bar


def write_result(
    benchmark: str,
    rows: Sequence[Mapping[str, Any]],
    claims: Sequence[Claim],
    *,
    note: str,
    save: bool,
    shown: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Prints the rows (or those `shown`) as a table, the claims and the JSON object; `save` also writes its file."""
    print_table(rows if shown is None else shown)
    console = _console()
    for claim in claims:
        verdict = "holds" if claim.holds else "DOES NOT HOLD"
        sign = "<=" if claim.better == "lower" else ">="
        console.print(f"{claim.name}: {claim.value:.4g} ({sign} {claim.bar:g}: {verdict})", soft_wrap=True)
    result = {
        "benchmark": benchmark,
        "commit": COMMIT,
        "command": shlex.join(["python", *sys.argv]),
        "machine": describe_machine(),
        "rows": list(rows),
        "claims": [asdict(claim) for claim in claims],
        "note": note,
    }
    if save:
        (RESULTS_DIR / f"{benchmark}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result), flush=True)


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints rows as a table."""
    if rows:
        _console().print(_table(rows))


def _console() -> Console:
    """Returns a console as wide as the terminal, or of 120 columns where the output is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 120)


def median(values: Sequence[float]) -> float:
    """Returns the median."""
    return statistics.median(values)


def last_json(output: str) -> Any:
    """Returns the object that a process printed on the last line of its output."""
    return json.loads(output.strip().splitlines()[-1])


def spread(values: Sequence[float]) -> list[float]:
    """Returns the smallest and the largest value, rounded."""
    return [round(min(values), 2), round(max(values), 2)]


def current_commit() -> str:
    """Returns the commit of the working tree, with a plus if it has uncommitted changes."""
    try:
        revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run(
            ["git", "status", "--porcelain", "src", "benchmarks/*.py"], capture_output=True, text=True
        )
        return revision.stdout.strip() + ("+" if changes.stdout.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def describe_machine() -> dict[str, Any]:
    """Returns cores, memory, architecture and versions of the machine that runs the benchmark."""
    import torch

    return {
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


COMMIT = current_commit()  # read at the start: the working tree may change during a long measurement
ROW_ORIGIN = {"commit": COMMIT, "architecture": platform.machine()}  # in each row of a result saved part by part


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns a table with a column for each key of the first row."""
    table = Table()
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    return table


def _cell(value: Any) -> str:
    """Returns a value as a table shows it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return (" to " if len(value) == 2 else ", ").join(str(item) for item in value)
    return "-" if value is None else str(value)
