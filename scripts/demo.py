"""What `make demo` runs: the recipe `fashion` on an uneven cluster of 2+1 ranks, global and node-based, one table.

As root on Linux the cluster is emulated with a slow link and CPU quotas. Elsewhere the ranks run plainly on this
machine: the method is the same, but no wire is slow, so the times say little.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from evenly.lab import Lab, load_cluster, missing
from evenly.spec import Run, RunFinished

WAYS = {"global": "global", "node-based, K' = 8": "8"}
SETTINGS = {
    "width": 48,
    "batch_size": 16,
    "epochs": 3,
    "train_limit": 2400,
    "test_limit": 2000,
    "evaluate_every": 0,
    "lr": 0.03,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with the idx files of Fashion-MNIST")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting of both runs")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    more = ["--data", str(arguments.data)] if arguments.data else []
    changes = [f"{key}={value}" for key, value in SETTINGS.items()] + arguments.set
    reason = missing()
    runs: dict[str, Run] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way, every in WAYS.items():
            console.print(f"\n[bold]{way}[/bold]")
            run = Path(folder) / ("global" if every == "global" else "node-based")
            command = [sys.executable, "-m", "evenly", "train", "fashion", "--run", str(run), *more]
            for change in [*changes, f"every={every}", "checkpoint_every=none"]:
                command += ["--set", change]
            (on_lab if reason is None else on_this_machine)(command)
            runs[way] = Run.read(run)
    console.print("", table(runs))
    if reason is None:
        nodes = load_cluster("demo").nodes
        shares = " + ".join(str(node.cpu_of(rank)) for node in nodes for rank in range(node.ranks))
        where = f"2+1 ranks on two emulated nodes, {nodes[0].rate_mbit:g} Mbit/s between them, {shares} of a core."
        console.print(where, soft_wrap=True)
    else:
        console.print(f"2+1 ranks on this machine, without a slow link or CPU shares: {reason}", soft_wrap=True)


def on_lab(command: list[str]) -> None:
    with Lab(load_cluster("demo")) as lab:
        lab.run(command, output="rank0").check()


def on_this_machine(command: list[str]) -> None:
    launch = [sys.executable, "-m", "evenly", "launch", "--nodes", "2,1", *command[1:]]
    subprocess.run(launch, check=True)


def table(runs: dict[str, Run]) -> Table:
    """Returns both runs side by side, and the ratio."""
    shown = Table(title="Fashion-MNIST, the same network, data and epochs")
    for header in ("", "time s", "samples/s", "MB across nodes", "test accuracy %"):
        shown.add_column(header, justify="left" if not header else "right")
    ends = [finished(run) for run in runs.values()]
    sent = [sum(end.interface_bytes) / 1e6 for end in ends]
    for way, end, mb in zip(runs, ends, sent, strict=True):
        accuracy = 100 * float(runs[way].latest_values()["accuracy"] or 0)
        shown.add_row(way, f"{end.seconds:.1f}", f"{end.samples_per_s:.0f}", f"{mb:.1f}", f"{accuracy:.2f}")
    ratio: Callable[[float, float], str] = lambda a, b: f"{a / b:.2f}x" if b else "-"  # noqa: E731
    faster = ratio(ends[0].seconds, ends[1].seconds)
    shown.add_row("ratio", faster, ratio(ends[1].samples_per_s, ends[0].samples_per_s), ratio(sent[0], sent[1]), "")
    return shown


def finished(run: Run) -> RunFinished:
    end = run.last(RunFinished)
    if end is None:
        raise SystemExit("a run did not finish; see its output above")
    return end


if __name__ == "__main__":
    main()
