"""What a person sees of a run: a progress bar on a terminal, plain lines elsewhere, a table at the end."""

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from evenly.reports import HEADERS, Row, cells
from evenly.spec import (
    CheckpointSaved,
    EpochDone,
    Event,
    ExchangeDone,
    Measured,
    Run,
    RunFinished,
    RunStarted,
    StepsDone,
)

LINE_S = 5.0  # plain progress lines come at most this often


def table_of(rows: Sequence[Row]) -> Table:
    """Returns the runs as a table."""
    table = Table()
    for number, header in enumerate(HEADERS):
        table.add_column(header, justify="left" if number < 4 else "right", overflow="fold")
    for row in rows:
        table.add_row(*cells(row))
    return table


class Watcher:
    """Listens to a session on rank 0 and shows its events."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._total: int | None = None
        self._events: list[Event] = []
        self._lined = 0.0
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
                words = ", ".join(f"{name} {value:.4g}" for name, value in values.items() if value is not None)
                self._say(f"step {step}: {words}")
            case EpochDone(epoch=epoch, step=step):
                self._say(f"epoch {epoch} done at step {step}")
            case CheckpointSaved(path=path, seconds=seconds):
                self._say(f"checkpoint {path} ({seconds:.2f} s)")
            case RunFinished():
                self.close()
                self._console.print(table_of([self._row()]))
            case ExchangeDone():
                pass

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _row(self) -> Row:
        from evenly.reports import row_of

        return row_of(Run(events=tuple(self._events)))

    def _start(self, event: RunStarted) -> None:
        if event.plan is not None:
            self._console.print(event.plan.explain(), soft_wrap=True)
        if event.resumed_step:
            self._console.print(f"resumed at step {event.resumed_step}")
        total = event.settings.get("total_steps")
        self._total = int(total) if isinstance(total, int) else None
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
        elif time.monotonic() - self._lined > LINE_S:
            self._lined = time.monotonic()
            of = f"/{self._total}" if self._total else ""
            self._console.print(f"epoch {event.epoch + 1} step {event.step}{of}: {rate:.0f} samples/s")

    def _say(self, text: str) -> None:
        (self._bar.console if self._bar is not None else self._console).print(text, soft_wrap=True)
