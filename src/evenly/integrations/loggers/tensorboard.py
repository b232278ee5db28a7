"""Events -> TensorBoard's event files."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from evenly.integrations.loggers.base import EventLogger, Settings, require_client
from evenly.spec import Event

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger(EventLogger):
    """Writes scalars into a folder: `tensorboard --logdir FOLDER` shows them."""

    def __init__(self, folder: str | Path) -> None:
        """Writes nothing yet; `folder` is made with the first event."""
        super().__init__()
        require_client("tensorboard", extra="tensorboard", name="TensorBoardLogger")
        self._folder = Path(folder)
        self._writer: SummaryWriter | None = None

    def load(self) -> None:
        """Imports the writer."""
        import torch.utils.tensorboard  # noqa: F401  (`begin` uses it)

    def begin(self, name: str, settings: Settings) -> None:
        """Opens an event file."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder))
        lines = [f"| {key} | {value} |" for key, value in {"run": name, **settings}.items()]
        self._writer.add_text("settings", "\n".join(["| setting | value |", "|---|---|", *lines]))

    def write(self, event: Event, step: int, values: Mapping[str, float]) -> None:
        """Adds scalars."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, global_step=step, walltime=event.at_s)

    def end(self, *, has_failed: bool) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
