"""Shows a run while it goes on: a line for each epoch, and on a terminal a bar for the current one."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from evenly.batches import Feed
from evenly.launch.terminal import is_terminal
from evenly.spec import EpochDone, Event, Measured, RunStarted, RunStopped, StepsDone, Straggler
from evenly.spec.plan import counted

if TYPE_CHECKING:
    from rich.progress import Progress


class ProgressDisplay:
    """Listens to a session on rank 0 and writes to `stream`, stderr by default."""

    def __init__(self, samples: Callable[[], float], feed: Callable[[], Feed | None]) -> None:
        """`samples` returns those of all ranks so far, `feed` the loader that the run trains with."""
        self._stream: TextIO | None = sys.stderr
        self._samples, self._feed = samples, feed
        self._epochs = 0
        self._values: dict[str, float | None] = {}  # logged in this epoch
        self._began: tuple[float, int, float] = (0.0, 0, 0.0)  # when this epoch began: time, step, samples
        self._bar: Progress | None = None

    def begin(self, epochs: int) -> None:
        """Sets the number of epochs of the run."""
        self._epochs = epochs

    def __call__(self, event: Event) -> None:
        """Shows one event."""
        match event:
            case RunStarted(at_s=at_s, resumed_step=step):
                self._began = (at_s, step, self._samples())
                if event.left_out:
                    self.announce(left_out_words(event))
                if step:
                    self._write(f"resumed at step {step}")
            case Measured(values=values):
                self._values.update(values)
            case StepsDone(at_s=at_s, epoch=epoch, step=step):
                self._show_bar(at_s, epoch, step)
            case Straggler():
                self.close()
                self._write(event.explain())
            case EpochDone(at_s=at_s, epoch=epoch, step=step):
                self.close()
                self._write(self._line(at_s, epoch, step))
                self._values, self._began = {}, (at_s, step, self._samples())
            case RunStopped(step=step, reason=reason):
                self.close()
                self._write(", ".join([f"stopped early after step {step}: {reason}", *self._logged()]))

    def announce(self, line: str) -> None:
        """Writes a line before training begins."""
        self._write(line)

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _line(self, at_s: float, epoch: int, step: int) -> str:
        began_s, first_step, samples = self._began
        seconds = max(at_s - began_s, 1e-9)
        parts = [
            counted(step - first_step, "step"),
            f"{seconds:.1f} s",
            f"{(self._samples() - samples) / seconds:.0f} samples/s",
            *self._logged(),
        ]
        return f"epoch {epoch}/{self._epochs}: {', '.join(parts)}"

    def _logged(self) -> list[str]:
        return [f"{name} {'not finite' if value is None else f'{value:.4g}'}" for name, value in self._values.items()]

    def _write(self, line: str) -> None:
        if self._stream is not None:
            self._stream.write(f"{line}\n")
            self._stream.flush()

    def _show_bar(self, at_s: float, epoch: int, step: int) -> None:
        if self._stream is None or not is_terminal(self._stream):
            return
        feed = self._feed()
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = TextColumn("{task.description}"), BarColumn()
            self._bar = Progress(*columns, console=Console(file=self._stream), transient=True)
            self._bar.add_task("", total=_size(feed))
            self._bar.start()
        rate = (self._samples() - self._began[2]) / max(at_s - self._began[0], 1e-9)
        words = [f"epoch {epoch + 1}/{self._epochs}", f"step {step}", f"{rate:.0f} samples/s", *self._logged()]
        completed = 0 if feed is None else feed.offset
        self._bar.update(self._bar.task_ids[0], completed=completed, description=", ".join(words))


def _size(feed: Feed | None) -> int | None:
    """Returns the samples of an epoch; None if they are not known."""
    try:
        return None if feed is None else len(feed) * feed.global_batch
    except TypeError:
        return None


def left_out_words(started: RunStarted) -> str:
    """Returns how many ranks train, and what to do if all should."""
    ranks = started.cluster.world_size + len(started.left_out)
    return (
        f"training on {started.cluster.world_size} of {ranks} ranks: the others would only slow these down, as "
        "plan.explain() says. A plan with batch_size= in place of global_batch= uses all"
    )
