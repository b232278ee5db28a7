"""`evenly report --follow` shows a run that another process makes until it ends."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from evenly.cli._follow import live_view
from evenly.reports.live import FollowedRun
from evenly.spec import Measured
from tests.reports.recorded import write_recorded


class GrowingRun:
    """A recorded run whose files are written again, part by part, as training would."""

    def __init__(self, source: Path, folder: Path) -> None:
        self._files = {
            folder / file.relative_to(source): file.read_text().splitlines(keepends=True)
            for file in source.rglob("*.jsonl")
        }
        self.folder = folder

    def write(self, part: float) -> None:
        """Writes every file up to a part of its lines; all of them at 1."""
        for file, lines in self._files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(lines[: int(part * len(lines))]))


@pytest.fixture
def growing(tmp_path: Path) -> GrowingRun:
    run = GrowingRun(write_recorded(tmp_path / "source"), tmp_path / "run")
    run.write(0.4)
    return run


def command(run: GrowingRun) -> list[str]:
    return [sys.executable, "-m", "evenly", "report", "--follow", str(run.folder)]


def test_lines_where_there_is_no_terminal_and_the_table_at_the_end(growing: GrowingRun) -> None:
    with subprocess.Popen(command(growing), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        growing.write(1)
        rest = process.stdout.read()
    assert re.fullmatch(r"step \d+, [\d.]+ MB between nodes: rank 0 \d+% computing, \d+% waiting; .*rank 2 .*\n", first)
    assert "\x1b" not in first + rest
    assert "samples/s" in rest  # the table of every report
    assert process.returncode == 0


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)


def read_until(terminal: int, text: str | None, *, timeout_s: float = 30.0) -> str:
    """Returns what a terminal shows until `text` is part of it, or without one until no process has it open."""
    shown, deadline = "", time.monotonic() + timeout_s
    while text is None or text not in shown:
        assert select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0], shown
        try:
            shown += os.read(terminal, 65536).decode(errors="replace")
        except OSError:
            assert text is None, shown
            break
    return shown


def test_a_table_on_a_terminal_which_an_interruption_leaves(growing: GrowingRun, terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(command(growing), stdout=theirs, env=environment) as process:
        os.close(theirs)
        try:
            shown = read_until(ours, "computing")
            for header in ("rank", "steps/s", "MB of its node", "averaging", "waiting"):
                assert header in shown or header in read_until(ours, header)
            growing.write(0.8)
            read_until(ours, "\x1b[1A")  # drawn again
            process.send_signal(signal.SIGINT)
            read_until(ours, None)  # a program whose terminal nobody reads waits
            assert process.wait(timeout=20) == 130
        finally:
            process.kill()  # it would follow the run for ever


def test_names_are_shown_as_they_are(growing: GrowingRun) -> None:
    event = Measured(at_s=1.0, step=1, values={"map[/]": 0.5, "acc[val]": 0.25})
    with (growing.folder / "run.jsonl").open("a") as stream:
        stream.write(event.model_dump_json() + "\n")
    run = FollowedRun(growing.folder)
    run.read()
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(live_view(run, console))
    assert "map[/] 0.5, acc[val] 0.25" in console.export_text()


def test_a_run_that_has_ended_is_said_to_have(growing: GrowingRun) -> None:
    growing.write(1)
    done = subprocess.run(command(growing), capture_output=True, text=True, timeout=60)
    assert "has ended" in done.stdout
    assert done.returncode == 0


def test_wishes_that_cannot_be_met(growing: GrowingRun, fails, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert "shows one" in fails("report", "--follow", growing.folder, growing.folder)
    code = "import evenly.cli._follow as f; f.APPEAR_S = 0; from evenly.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "report", "--follow", "nowhere"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert "waiting for nowhere" in done.stdout
    assert "no such folder" in done.stderr
    assert done.returncode == 1
