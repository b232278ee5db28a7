"""`evenly experiment`: a grid of runs, resumed where it stopped, and its table."""

import json
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenly.cli._completion import experiments
from evenly.errors import SpecError

if TYPE_CHECKING:
    from evenly.cli._experiment_table import Results
    from evenly.recipes.experiments import PlannedRun


def experiment(
    name: Annotated[
        str, typer.Argument(autocompletion=experiments, help="An experiment (see --list), or a TOML file like theirs.")
    ] = "",
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each kind, with seeds 0, 1, ...")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE,...", help="Only runs that fit: `every=10,global`, `seed=0`. May be repeated."),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of all runs; may be repeated."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small networks, little data: minutes on a CPU.")] = False,
    to: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where runs and results go; runs/NAME if left out.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder that holds a folder for each data set; `data` if left out.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time: on a GPU that one does not fill.")] = 1,
    devices: Annotated[
        str | None, typer.Option(metavar="cuda:0,cpu,...", help="The device of each rank, as in `evenly launch`.")
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Starts the ranks of a run in place of `evenly launch`: 'srun --ntasks 4', 'evenly lab run demo --'.",
        ),
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="Start nothing; show the table of what is done.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="List the experiments, or NAME's runs, and exit.")] = False,
) -> None:
    """Run a grid of trainings over seeds, and compare them: mean, deviation, paired difference to the baseline.

    What is done is skipped, and what was interrupted goes on: give the same command again. Results are written to
    results.json, table.md and report.html in the folder of the experiment, after every run.

    Examples: `evenly experiment --list`; `evenly experiment cifar --quick`;
    `evenly experiment cifar --seeds 5 --only every=10,global`;
    `evenly experiment cifar --launcher 'srun --ntasks 4' --to /shared/cifar`.
    """
    from evenly.recipes.experiments import describe_experiment, experiment_names, load_experiment, planned_runs

    if not name:
        if listing:
            for one in experiment_names():
                print(f"{one}: {describe_experiment(one)}")
            return
        raise SpecError(f"no experiment was named. Choose one of: {', '.join(experiment_names())}; or see --list.")
    chosen = load_experiment(name)
    runs = planned_runs(chosen, seeds=seeds, changes=change or (), only=only or (), quick=quick)
    if listing:
        for run in runs:
            print(f"{run.folder}: nodes {run.nodes}")
        return
    from evenly.cli._experiment_table import Results

    stem = Path(name).stem
    folder = to or Path("runs", f"{stem}-quick" if quick else stem)
    results = Results(folder, stem, chosen, runs)
    failed: list[PlannedRun] = []
    if not table:
        command = RunCommand(chosen.recipe, data=data or Path("data"), devices=devices, launcher=launcher)
        failed = _make(runs, folder, command, jobs=jobs, results=results)
    results.write()
    results.show()
    if failed:
        raise typer.Exit(1)


class RunCommand:
    """The command that makes a run."""

    def __init__(self, recipe: str, *, data: Path, devices: str | None, launcher: str | None) -> None:
        if devices is not None and launcher is not None:
            raise SpecError(
                "--devices and --launcher were both given; devices are given to `evenly launch`. Leave one out."
            )
        self._recipe = recipe
        self._data = data
        self._devices = devices
        self._launcher = launcher

    @property
    def has_launcher(self) -> bool:
        """Whether ranks are started by another program than `evenly launch`."""
        return self._launcher is not None

    def __call__(self, run: "PlannedRun", folder: Path) -> list[str]:
        """Returns the words of the command."""
        data = self._data / run.config.data
        words = ["train", self._recipe, "--run", str(folder), *(["--data", str(data)] if data.is_dir() else [])]
        for key, value in run.changes.items():
            words += ["--set", f"{key}={_toml(value)}"]
        if self._launcher is not None:
            return [*shlex.split(self._launcher), sys.executable, "-m", "evenly", *words]
        devices = [] if self._devices is None else ["--devices", self._devices]
        return [sys.executable, "-m", "evenly", "launch", "--nodes", run.nodes, *devices, "-m", "evenly", *words]


def _make(
    runs: Sequence["PlannedRun"], folder: Path, command: RunCommand, *, jobs: int, results: "Results"
) -> list["PlannedRun"]:
    """Makes the runs that are not done; returns those that failed."""
    from evenly.launch.settings import overlay
    from evenly.launch.threads import thread_variables
    from evenly.recipes.experiments import Runner

    def say(line: str) -> None:
        print(line, flush=True)
        results.write()

    # `evenly launch` divides the cores for one run; runs that go on at a time share them.
    num_ranks = min(jobs, len(runs)) * max((run.num_ranks for run in runs), default=1)
    environ = overlay({} if command.has_launcher or jobs == 1 else thread_variables(num_ranks))
    runner = Runner(folder, command, environ=environ, jobs=jobs, say=say)
    pending = runner.pending(runs)
    done = len(runs) - len(pending)
    print(
        f"{len(runs)} run{'s' if len(runs) > 1 else ''} in {folder}" + (f", {done} of them done" if done else ""),
        flush=True,
    )
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that runs are ended by it, too
    try:
        return runner.run(pending)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _toml(value: object) -> str:
    """Returns a value as `--set` reads it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value)
    return "none" if value is None else repr(value)
