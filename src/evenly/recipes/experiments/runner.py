"""Runs of an experiment -> processes, some at a time; what is done is skipped, what was interrupted goes on."""

import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from evenly.errors import SpecError
from evenly.recipes.config import TrainConfig
from evenly.recipes.experiments.grid import PlannedRun
from evenly.recipes.experiments.results import read_outcome
from evenly.recipes.training_files import LOG, SETTINGS

GRACE_S = 60.0  # ranks save a checkpoint and end; then they are killed
POLL_S = 0.2
SHOWN_LINES = 15  # of the output of a run that failed


@dataclass
class _Started:
    run: PlannedRun
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    began: float


class Runner:
    """Runs the commands of an experiment's runs and says what becomes of them."""

    def __init__(
        self,
        folder: Path,
        command: Callable[[PlannedRun, Path], Sequence[str]],
        *,
        environ: Mapping[str, str],
        jobs: int = 1,
        say: Callable[[str], None],
    ) -> None:
        """Starts nothing yet.

        Args:
            folder: of the experiment; each run has its own in it.
            command: returns the command that makes a run, given the run and its folder.
            environ: the environment of the commands.
            jobs: how many runs may go on at a time.
            say: called with each line of progress.
        """
        self._folder = folder
        self._command = command
        self._jobs = jobs
        self._say = say
        self._environ = dict(environ)
        self._going: list[_Started] = []
        self._done = 0

    def pending(self, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
        """Returns the runs that are not complete; raises `SpecError` if one was begun with other settings."""
        for run in runs:
            _require_same_settings(run, self._folder / run.folder)
        return [run for run in runs if read_outcome(self._folder / run.folder) is None]

    def run(self, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
        """Makes the runs and returns those that failed. Interrupted, it ends what it has started."""
        waiting, failed = list(runs), list[PlannedRun]()
        self._done = 0
        try:
            while waiting or self._going:
                while waiting and len(self._going) < self._jobs:
                    self._start(waiting.pop(0))
                failed += self._ended(total=len(runs))
                time.sleep(POLL_S)
        finally:
            self._end_all()
        return failed

    def _start(self, run: PlannedRun) -> None:
        folder = self._folder / run.folder
        folder.mkdir(parents=True, exist_ok=True)
        log = (folder / LOG).open("ab")
        command = list(self._command(run, folder))
        # In a group of its own: Ctrl-C reaches it once, from here.
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=self._environ, process_group=0
        )
        self._say(f"{run.name}, seed {run.seed}: started, output in {folder / LOG}")
        self._going.append(_Started(run, process, log, time.monotonic()))

    def _ended(self, *, total: int) -> list[PlannedRun]:
        """Returns the runs that have failed since the last call."""
        failed: list[PlannedRun] = []
        for started in [one for one in self._going if one.process.poll() is not None]:
            self._going.remove(started)
            started.log.close()
            self._done += 1
            folder, seconds = self._folder / started.run.folder, time.monotonic() - started.began
            outcome = read_outcome(folder)
            name = f"{started.run.name}, seed {started.run.seed}"
            if started.process.returncode or outcome is None:
                failed.append(started.run)
                self._say(f"{name}: failed after {seconds:.0f} s. The end of {folder / LOG}:\n{_tail(folder / LOG)}")
            else:
                figures = ", ".join(f"{key} {value:.4g}" for key, value in outcome.figures.items())
                self._say(f"{name}: done in {seconds:.0f} s ({self._done} of {total}): {figures}")
        return failed

    def _end_all(self) -> None:
        """Asks what still runs to end, waits, and kills what does not."""
        for started in self._going:
            started.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        for started in self._going:
            try:
                started.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                started.process.kill()
                started.process.wait()
            started.log.close()
        self._going.clear()


def _require_same_settings(run: PlannedRun, folder: Path) -> None:
    file = folder / SETTINGS
    if not file.is_file():
        return
    try:
        before = TrainConfig(**TrainConfig.model_validate_json(file.read_text(encoding="utf-8")).model_dump())
    except ValueError as error:
        raise SpecError(f"{file} cannot be read: {error}. Remove {folder}, or give another --to.") from None
    if before != run.config:
        old, new = before.model_dump(), run.config.model_dump()
        changed = [f"{key} was {old[key]!r}, now {new[key]!r}" for key in new if old[key] != new[key]]
        raise SpecError(
            f"the run in {folder} was begun with other settings: {'; '.join(changed)}. Give another folder by --to, or "
            "remove this one."
        )


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]
    return "\n".join(f"    {line}" for line in lines)
