"""What `make demo` runs: one network trained in three ways on an uneven cluster of 2+1 ranks, in turns of a few steps.

As root on Linux the cluster is emulated with a slow link and CPU quotas. Elsewhere the ranks run plainly on this
machine: the methods are the same, but no link is slow, so the times say little. It takes at most three minutes.
"""

import argparse
import fcntl
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.live import Live

from evenly.cli._follow import live_view
from evenly.cli._show import open_console, say, table_of
from evenly.lab import Lab, LabCluster, load_cluster, missing
from evenly.recipes.data import DATASETS
from evenly.reports import read_recorded
from evenly.reports.live import FollowedRun
from evenly.reports.page import write_page

LEAST_S = 45.0  # starting and measuring take half a minute
LIMIT_S = 168.0  # of everything; the installation is over
TEST_S = 12.0  # kept for the tests of the networks at the end
STEPS = 8  # of a turn
WAYS = ("global", "node-based", "planned")
FILES = ("status", "go", "turns.json", "turns.new", "report.html")  # besides a folder for each way and "lock"
MEANINGS = {
    "global": "gradients are averaged over all ranks in every step, as DDP does",
    "node-based": f"gradients inside each node in every step, parameters across nodes every {STEPS} steps",
    "planned": "node-based, and each rank gets as many samples as it computes in the same time",
}
FEWEST = 4  # rounds from which a ratio is told
WIDEST = 1.5  # largest over smallest likely value of a ratio that is told
READY = "all ranks have started"  # what the ranks say before they wait for their quotas

Turns = dict[str, dict[str, Any]]  # of each way: seconds and bytes of its turns, samples, predicted_s, accuracy


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
            return f"{self.median:.2f}x as fast ({self.lower:.2f} to {self.upper:.2f})"
        if self.rounds < FEWEST:
            return f"undecided: {self.rounds} rounds in this time are too few to tell"
        spread = f"{self.lower:.2f} to {self.upper:.2f}x as fast in {self.rounds} rounds"
        return f"undecided ({spread}): the machine is too busy to tell"


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
    began = psutil.Process().create_time()  # what is imported takes seconds on a busy machine
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with the idx files of Fashion-MNIST")
    parser.add_argument("--run", type=Path, default=Path("runs/demo"), help="where the runs and the report go")
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help="about how long it takes")
    arguments = parser.parse_args()
    if not LEAST_S <= arguments.seconds <= 3600:
        parser.error(f"--seconds is {arguments.seconds:g}; give {LEAST_S:g} to 3600, of which a third is for the start")
    console = open_console()
    prepare_folder(arguments.run)
    data = arguments.data or DATASETS["fashion"].system_folder
    reason = missing()
    introduce(data, reason, arguments.seconds, console)
    command = [str(Path(__file__).with_name("demo_ranks.py")), "--folder", str(arguments.run.resolve())]
    command += ["--data", str(data) if data.is_dir() else "made"]
    command += ["--until", str(began + arguments.seconds - TEST_S)]
    with viewing(arguments.run, console):
        (on_lab if reason is None else on_this_machine)(command, arguments.run)
    show(read_turns(arguments.run), console, is_emulated=reason is None)
    page = arguments.run / "report.html"
    write_page([read_recorded(arguments.run / name) for name in WAYS], page)
    say([f"Took {time.time() - began:.0f} s. Who computed, waited and sent when, as a page: {page}"], console)
    open_page(page)


def introduce(data: Path, reason: str | None, seconds: float, console: Console) -> None:
    """Says what is going to happen, and what is missing."""
    say(
        [f"One small ResNet is trained in three ways, in turns of {STEPS} steps, for {seconds / 60:.1f} minutes:"],
        console,
    )
    say([f"  {name}: {meaning}" for name, meaning in MEANINGS.items()], console)
    if reason is None:
        cluster = load_cluster("demo")
        nodes = "; ".join(
            f"node {node.name}: {' + '.join(f'{node.cpu_of(rank):g}' for rank in range(node.ranks))} of a core, "
            f"{node.rate_mbit:g} Mbit/s"
            for node in cluster.nodes
        )
        say([f"The cluster is emulated on this machine. {nodes}."], console)
    else:
        say([f"The ranks run without a slow link and without CPU quotas, so times say little: {reason}"], console)
    if not data.is_dir():
        say([f"There is no Fashion-MNIST in {data}: the images are digits drawn by the demo."], console)
    say([""], console)


def prepare_folder(folder: Path) -> None:
    """Removes the files of an earlier demo from the folder; one that holds others is left alone."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if (folder.exists() and not folder.is_dir()) or names - {*WAYS, *FILES, "lock"}:
        raise SystemExit(f"{folder} is not the folder of an earlier demo. Give another one with --run.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)  # until the process ends
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"another demo runs in {folder}. Wait for it, or give another folder with --run.") from None
    except OSError as error:
        raise SystemExit(f"{folder} cannot be written: {error.strerror}. Give another folder with --run.") from None
    for name in WAYS:
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in FILES:
        (folder / name).unlink(missing_ok=True)


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
    """Shows the ranks of the way whose turn it is, and the times of all ways so far, until `is_over`."""
    runs: dict[str, FollowedRun] = {}
    said = ""
    with Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else nullcontext() as live:
        while not is_over.wait(0.5):
            for name in WAYS:
                if name not in runs and (folder / name).is_dir():
                    runs[name] = FollowedRun(folder / name)
                if name in runs:
                    runs[name].read()
            words, times = read_status(folder), so_far(read_turns(folder))
            current = next((run for name, run in runs.items() if words.endswith(name)), None)
            if live is not None:
                title = f"{words}\n{times}" if times else words
                live.update(title if current is None else live_view(current, console, title))
            elif (line := times or words.partition(",")[0]) != said:
                say([line], console)
                said = line


def so_far(rows: Turns) -> str:
    """Returns the times of all ways until now in one line."""
    rounds = min((len(row["seconds"]) for row in rows.values()), default=0)
    if not rounds:
        return ""
    times = [f"{name} {1e3 * statistics.median(row['seconds']) / STEPS:.0f}" for name, row in rows.items()]
    return f"after {rounds} rounds: " + ", ".join(times) + " ms a step"


def read_turns(folder: Path) -> Turns:
    """Returns what was measured until now."""
    try:
        rows: Turns = json.loads((folder / "turns.json").read_text())
    except OSError:
        return {}
    return rows


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


def show(rows: Turns, console: Console, *, is_emulated: bool) -> None:
    """Prints the three ways side by side, and how they compare."""
    times = {name: [1e3 * second / STEPS for second in row["seconds"]] for name, row in rows.items()}
    medians = {name: f"{statistics.median(values):.0f}" if values else "-" for name, values in times.items()}
    table = table_of(("", *WAYS), left=1)
    lines: dict[str, Callable[[str], str]] = {
        "samples of each rank": lambda name: " + ".join(map(str, rows[name]["samples"])),
        "ms a step": lambda name: medians[name],
        "in half of the turns": lambda name: middle_half(times[name]),
        "predicted ms a step": lambda name: f"{1e3 * rows[name]['predicted_s']:.0f}",
        "MB a step across nodes": lambda name: f"{megabytes(rows[name]):.2f}" if rows[name]["bytes"] else "-",
        "test accuracy": lambda name: f"{rows[name]['accuracy']:.1f} %",
    }
    if not is_emulated:
        del lines["MB a step across nodes"]  # nothing crosses a network
    for header, cell in lines.items():
        table.add_row(header, *map(cell, WAYS))
    console.print("", table, "")
    seconds = {name: row["seconds"] for name, row in rows.items()}
    is_counted = is_emulated and rows["global"]["bytes"]
    fewer = f"{megabytes(rows['global']) / megabytes(rows['node-based']):.1f}x fewer bytes, " if is_counted else ""
    say(
        [
            f"node-based instead of global: {fewer}{ratio_of(seconds['global'], seconds['node-based'])}",
            f"planned batches instead of equal ones: {ratio_of(seconds['node-based'], seconds['planned'])}",
            f"both together: {ratio_of(seconds['global'], seconds['planned'])}",
            "Each is the median over all rounds of the ratio of two turns in a round, with the range in which it",
            "likely lies; medians of the ways themselves, above, may give a slightly other one.",
        ],
        console,
    )


def middle_half(values: list[float]) -> str:
    """Returns the range of the middle half of the values."""
    if len(values) < 2:
        return "-"
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return f"{lower:.0f} to {upper:.0f}"


def megabytes(row: dict[str, Any]) -> float:
    """Returns what all nodes sent in one step."""
    return statistics.median(row["bytes"]) / STEPS / 1e6


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
