"""Events -> a run of MLflow."""

import logging
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from evenly.integrations.loggers.base import EventLogger, Settings, require_client
from evenly.spec import Event

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

logger = logging.getLogger(__name__)

_REFUSED = re.compile(r"[^\w\-. :/]")  # in the names of metrics and parameters


class MlflowLogger(EventLogger):
    """Makes a run in an experiment of MLflow, with the settings as its parameters."""

    def __init__(self, experiment: str = "evenly", *, tracking_uri: str | None = None) -> None:
        """Connects to nothing yet; without `tracking_uri` MLflow's own settings say where runs are kept."""
        super().__init__()
        require_client("mlflow", extra="mlflow", name="MlflowLogger")
        self._experiment, self._tracking_uri = experiment, tracking_uri
        self._client: MlflowClient | None = None
        self._refused: set[str] = set()  # names of settings and numbers
        self.run_id = ""  # MLflow's, once the run has begun

    def load(self) -> None:
        """Imports MLflow."""
        import mlflow  # noqa: F401  (`begin` uses it)

    def begin(self, name: str, settings: Settings) -> None:
        """Makes a run, and its experiment if there is none of this name."""
        from mlflow import MlflowClient

        self._client = MlflowClient(self._tracking_uri)
        found = self._client.get_experiment_by_name(self._experiment)
        experiment_id = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        self.run_id = self._client.create_run(experiment_id, run_name=name).info.run_id
        for key, value in settings.items():
            self._take(key, partial(self._client.log_param, self.run_id, _name(key), value))

    def write(self, event: Event, step: int, values: Mapping[str, float]) -> None:
        """Logs metrics."""
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        if self._client is None:
            return
        metrics = {name: Metric(_name(name), value, int(event.at_s * 1000), step) for name, value in values.items()}
        known = [metric for name, metric in metrics.items() if name not in self._refused]
        try:
            self._client.log_batch(self.run_id, metrics=known)
        except MlflowException as error:
            if not _is_refusal(error):
                raise
            for name, metric in metrics.items():  # one by one, as one name costs the whole batch
                self._take(name, partial(self._client.log_batch, self.run_id, metrics=[metric]))

    def _take(self, name: str, log: Callable[[], object]) -> None:
        """Logs one setting or number; one that MLflow refuses is left out, with a warning."""
        from mlflow.exceptions import MlflowException

        if name in self._refused:
            return
        try:
            log()
        except MlflowException as error:
            if not _is_refusal(error):
                raise
            self._refused.add(name)
            reason = str(error).strip().splitlines()[0]
            logger.warning("MLflow refuses %r, which is not logged: %s", name, reason)

    def end(self, *, has_failed: bool) -> None:
        """Ends the run."""
        if self._client is not None:
            self._client.set_terminated(self.run_id, status="FAILED" if has_failed else "FINISHED")
            self._client = None


def _is_refusal(error: "MlflowException") -> bool:
    """Returns whether MLflow works, but does not take a name or a value."""
    return error.error_code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")


def _name(name: str) -> str:
    """Returns a name that MLflow takes.

    >>> _name("top-5 (%)")
    'top-5 ___'
    """
    return _REFUSED.sub("_", name)
