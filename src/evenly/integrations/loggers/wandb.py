"""Events -> a run of Weights & Biases."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from evenly.integrations.loggers.base import EventLogger, Settings, require_client
from evenly.spec import Event

if TYPE_CHECKING:
    import wandb

STEP = "evenly/step"  # a number of its own: an exchange may be told after later steps, which wandb's own step refuses


class WandbLogger(EventLogger):
    """Makes a run in a project of Weights & Biases, with the settings as its config."""

    def __init__(self, project: str = "evenly", **options: Any) -> None:
        """Starts nothing yet; `options` are those of `wandb.init`, such as `mode="offline"`, `dir=` and `group=`."""
        super().__init__()
        require_client("wandb", extra="wandb", name="WandbLogger")
        self._options = {"project": project, **options}
        self._run: wandb.Run | None = None

    def load(self) -> None:
        """Imports wandb."""
        import wandb  # noqa: F401  (`begin` uses it)

    def begin(self, name: str, settings: Settings) -> None:
        """Starts a run."""
        import wandb

        self._run = wandb.init(**{"name": name, "config": dict(settings), **self._options})
        self._run.define_metric("*", step_metric=STEP)

    def write(self, event: Event, step: int, values: Mapping[str, float]) -> None:
        """Logs the numbers of one event together."""
        if self._run is not None:
            self._run.log({**values, STEP: step})

    def end(self, *, has_failed: bool) -> None:
        """Ends the run."""
        if self._run is not None:
            self._run.finish(exit_code=1 if has_failed else 0)
            self._run = None
