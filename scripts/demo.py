"""What `make demo` runs: one network trained in three ways on an uneven cluster of 2+1 ranks, in turns of a few steps.

As root on Linux the cluster is emulated with a slow link and CPU quotas. Elsewhere the ranks run plainly on this
machine: the methods are the same, but no link is slow, so the times say little. It takes at most three minutes.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from evenly.cli._follow import live_view
from evenly.lab import Lab, LabCluster, load_cluster, missing
from evenly.recipes.fashion_data import DEBIAN
from evenly.reports import read_recorded
from evenly.reports.live import FollowedRun
from evenly.reports.page import write_page

LIMIT_S = 170.0  # of everything; the installation is over
TEST_S = 12.0  # kept for the tests of the networks at the end
WAYS = {"global": "global", "node-based": "node-based", "planned": "node-based, planned batches"}
FEWEST = 4  # rounds from which a ratio is told
WIDEST = 1.5  # largest over smallest likely value of a ratio that is told
READY = "all ranks have started"  # what the ranks say before they wait for their quotas


@dataclass(frozen=True)
class Ratio:
    """How many times as long one way takes as another: the median of rounds, and the range in which it likely is."""

    median: float
    lower: float
    upper: float
    rounds: int

    @property
    def is_decided(self) -> bool:
        """Whether the rounds agree well enough to tell a number."""
        return self.rounds >= FEWEST and self.upper <= WIDEST * self.lower

    def __str__(self) -> str:
        if self.is_decided:
            return f"{self.median:.2f}x ({self.lower:.2f} to {self.upper:.2f})"
        return (
            f"undecided: {self.lower:.2f} to {self.upper:.2f} in {self.rounds} rounds, the machine is too busy to tell"
        )


def ratio_of(slow: Sequence[float], fast: Sequence[float]) -> Ratio:
    """Returns the ratio of turns that followed each other, and where its median likely is (in 9 of 10 cases)."""
    ratios = sorted(a / b for a, b in zip(slow, fast, strict=True))
    count, skipped = len(ratios), 0
    while 2 * sum(math.comb(count, k) for k in range(skipped + 2)) / 2**count <= 0.1:
        skipped += 1  # the median is outside of what is left in less than one of ten cases
    if not ratios:
        return Ratio(math.nan, math.nan, math.nan, 0)
    return Ratio(statistics.median(ratios), ratios[skipped], ratios[-1 - skipped], count)


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with the idx files of Fashion-MNIST")
    parser.add_argument("--run", type=Path, default=Path("runs/demo"), help="where the runs and the report go")
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help="about how long it takes")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    data = arguments.data or DEBIAN
    reason = missing()
    if not data.is_dir():
        console.print(f"There is no Fashion-MNIST in {data}: the demo trains on digits that it draws.", soft_wrap=True)
    if reason is not None:
        console.print(f"Without a slow link and CPU quotas: {reason}", soft_wrap=True)
    shutil.rmtree(arguments.run, ignore_errors=True)
    arguments.run.mkdir(parents=True)
    command = [str(Path(__file__).with_name("demo_ranks.py")), "--folder", str(arguments.run.resolve())]
    command += ["--data", str(data) if data.is_dir() else "made"]
    command += ["--until", str(time.time() + arguments.seconds - TEST_S)]
    with viewing(arguments.run, console):
        (on_lab if reason is None else on_this_machine)(command, arguments.run)
    rows = json.loads((arguments.run / "turns.json").read_text())
    show(rows, console, is_emulated=reason is None)
    page = arguments.run / "report.html"
    write_page([read_recorded(arguments.run / name) for name in WAYS], page)
    console.print(f"took {time.monotonic() - began:.0f} s; who computed, waited and sent when: {page}", soft_wrap=True)
    open_page(page)


@contextmanager
def viewing(folder: Path, console: Console) -> Iterator[None]:
    """Shows what the ranks do: a table that is renewed on a terminal, a line for each round elsewhere."""
    is_over = threading.Event()
    thread = threading.Thread(target=view, args=(folder, console, is_over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def view(folder: Path, console: Console, is_over: threading.Event) -> None:
    """Shows the way whose turn it is until `is_over`."""
    runs: dict[str, FollowedRun] = {}
    words = ""
    with Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else nullcontext() as live:
        while not is_over.wait(0.5):
            before, words = words, read_status(folder)
            for name in WAYS:
                if name not in runs and (folder / name).is_dir():
                    runs[name] = FollowedRun(folder / name)
                if name in runs:
                    runs[name].read()
            current = next((run for name, run in runs.items() if words.endswith(name)), None)
            if live is not None:
                live.update(words if current is None else live_view(current, words))
            elif words != before and (not words.startswith("round") or words.endswith("global")):
                console.print(words.partition(",")[0])


def read_status(folder: Path) -> str:
    """Returns what the ranks do now."""
    try:
        return (folder / "status").read_text() or "starting"
    except OSError:
        return "starting the ranks"


def open_page(page: Path) -> None:
    """Opens the page in a browser where there is a display and a person."""
    has_display = bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")) or sys.platform == "darwin"
    if sys.stdout.isatty() and has_display:
        webbrowser.open(page.resolve().as_uri())


def on_lab(command: list[str], folder: Path) -> None:
    """Runs the ranks on the emulated cluster; they start without quotas, so that starting takes little time."""
    cluster = load_cluster("demo")
    with Lab(cluster) as lab:
        for rank in range(lab_ranks(cluster)):
            lab.set_cpu(rank, None)
        waiting = threading.Thread(target=set_quotas, args=(lab, cluster, folder), daemon=True)
        waiting.start()
        lab.run([sys.executable, *command], output="capture").check()
        waiting.join()


def lab_ranks(cluster: LabCluster) -> int:
    return sum(node.ranks for node in cluster.nodes)


def set_quotas(lab: Lab, cluster: LabCluster, folder: Path) -> None:
    """Gives the ranks their CPU quotas once they have started."""
    status = folder / "status"
    while not status.exists() or status.read_text() != READY:
        time.sleep(0.05)
    shares = [node.cpu_of(rank) for node in cluster.nodes for rank in range(node.ranks)]
    for rank, share in enumerate(shares):
        lab.set_cpu(rank, share)
    (folder / "go").write_text("")


def on_this_machine(command: list[str], folder: Path) -> None:
    (folder / "go").write_text("")
    launch = [sys.executable, "-m", "evenly", "launch", "--nodes", "2,1", *command]
    subprocess.run(launch, check=True, stdout=subprocess.DEVNULL)


def show(rows: dict[str, dict[str, list[float]]], console: Console, *, is_emulated: bool) -> None:
    """Prints the three ways side by side, and how they compare."""
    table = Table(title="One network, one batch of 48 samples, three ways, in turns of 8 steps")
    for header in ("", "samples", "ms a step", "half of the turns", "predicted ms", "MB a step", "test accuracy %"):
        table.add_column(header, justify="left" if not header else "right")
    for name, words in WAYS.items():
        row = rows[name]
        times = [1e3 * second / 8 for second in row["seconds"]]
        quarters = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
        table.add_row(
            words,
            " + ".join(map(str, row["samples"])),
            f"{statistics.median(times):.0f}",
            f"{quarters[0]:.0f} to {quarters[2]:.0f}",
            f"{1e3 * row['predicted_s']:.0f}",  # type: ignore[operator]
            f"{statistics.median(row['bytes']) / 8e6:.2f}",
            f"{row['accuracy']:.1f}",
        )
    console.print("", table)
    console.print(
        "global: gradients are averaged over all ranks in every step. node-based: inside each node in every step, and "
        "parameters across nodes every 8 steps. planned: each rank gets the samples it can do in the same time.",
        soft_wrap=True,
    )
    seconds = {name: row["seconds"] for name, row in rows.items()}
    sent = {name: statistics.median(row["bytes"]) for name, row in rows.items()}
    if is_emulated:
        console.print(f"fewer bytes across the slow link: {sent['global'] / max(1, sent['node-based']):.1f}x")
    console.print(f"node-based against global, time: {ratio_of(seconds['global'], seconds['node-based'])}")
    console.print(f"planned batches against equal ones, time: {ratio_of(seconds['node-based'], seconds['planned'])}")
    console.print(f"both together, time: {ratio_of(seconds['global'], seconds['planned'])}")


if __name__ == "__main__":
    main()
