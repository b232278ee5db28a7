"""Shows a run: a progress bar on a terminal, plain lines elsewhere, a table at the end."""

import time
from collections.abc import Sequence
from typing import Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from evenly.cli._devices import shared_in_cluster
from evenly.cli._show import open_console, say, table_of
from evenly.reports import (
    HEADERS,
    PHASE_HEADERS,
    PREDICTION_HEADERS,
    TableRow,
    cells,
    notes,
    phase_rows,
    prediction_rows,
    remarks,
    row_of,
)
from evenly.spec import (
    CheckpointFailed,
    CheckpointSaved,
    EpochDone,
    Event,
    ExchangeDone,
    Measured,
    Run,
    RunFinished,
    RunStarted,
    StepsDone,
    Straggler,
)

LINE_S = 5.0  # plain progress lines come at most this often


def show_rows(rows: Sequence[TableRow], *, console: Console) -> None:
    """Prints the runs as a table of at most 80 columns, and below it why unfinished runs stopped."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for number, header in enumerate(HEADERS):
        justify: Literal["left", "right"] = "left" if number < 4 else "right"
        table.add_column(header, justify=justify, overflow="fold", no_wrap=number > 1)
    for row in rows:
        table.add_row(*map(escape, cells(row)))
    console.print(table)
    for note in notes(rows):
        console.print(note, markup=False, soft_wrap=True)


def show_phases(run: Run, *, console: Console) -> None:
    """Prints where the time of each rank of a run went, and what the plan predicted, if that was recorded."""
    tables = ((PHASE_HEADERS, phase_rows(run), 0), (PREDICTION_HEADERS, prediction_rows(run), 1))
    for headers, rows, left in tables:
        if rows:
            table = table_of(headers, left=left)
            for row in rows:
                table.add_row(*map(escape, row))
            console.print()
            console.print(table)
    say(remarks(run), console)


class Watcher:
    """Listens to a session on rank 0 and shows its events."""

    def __init__(self, console: Console | None = None, *, says_shared_devices: bool = False) -> None:
        self._says_shared_devices = says_shared_devices
        self._console = console or open_console()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._total: int | None = None
        self._events: list[Event] = []
        self._printed_at = 0.0
        self._began = time.time()

    def __call__(self, event: Event) -> None:
        """Shows one event."""
        self._events.append(event)
        match event:
            case RunStarted():
                self._start(event)
            case StepsDone():
                self._progress(event)
            case Measured(values=values, step=step):
                texts = [
                    f"{name} {'not finite' if value is None else f'{value:.4g}'}" for name, value in values.items()
                ]
                self._say(f"step {step}: {', '.join(texts)}")
            case EpochDone(epoch=epoch, step=step):
                self._say(f"epoch {epoch} done at step {step}")
            case CheckpointSaved(path=path, seconds=seconds):
                self._say(f"checkpoint {path} ({seconds:.2f} s)")
            case CheckpointFailed(step=step, error=error):
                self._say(f"no checkpoint of step {step}: {error}")
            case Straggler():
                self._say(event.explain())
            case RunFinished():
                self.close()
                show_rows([row_of(Run(events=tuple(self._events)))], console=self._console)
            case ExchangeDone():
                pass

    def close(self) -> None:
        """Removes the progress bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _start(self, event: RunStarted) -> None:
        if event.plan is not None:
            self._console.print(event.plan.explain(), markup=False, soft_wrap=True)
        if self._says_shared_devices:
            say(shared_in_cluster(event.cluster), self._console)
        total = event.settings.get("total_steps")
        self._total = int(total) if isinstance(total, int) else None
        if self._total is not None and event.resumed_step >= self._total:
            self._console.print(f"this run is already done: it made all its {self._total} steps")
        elif event.resumed_step:
            self._console.print(f"resumed at step {event.resumed_step}")
        self._began = event.at_s
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task("steps", total=self._total, completed=event.resumed_step)
            self._bar.start()

    def _progress(self, event: StepsDone) -> None:
        rate = event.samples / max(event.at_s - self._began, 1e-9)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=event.step, description=f"epoch {event.epoch + 1}, {rate:.0f}/s")
        elif time.monotonic() - self._printed_at > LINE_S:
            self._printed_at = time.monotonic()
            total = f"/{self._total}" if self._total else ""
            self._console.print(f"epoch {event.epoch + 1} step {event.step}{total}: {rate:.0f} samples/s")

    def _say(self, text: str) -> None:
        (self._bar.console if self._bar is not None else self._console).print(text, markup=False, soft_wrap=True)
