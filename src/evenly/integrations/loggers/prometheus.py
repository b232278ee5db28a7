"""Events -> a text file for Prometheus, which node_exporter's textfile collector reads."""

import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from evenly.errors import SpecError
from evenly.integrations.loggers.base import EventLogger, Settings
from evenly.spec import Event, Measured

_REFUSED = re.compile(r"[^a-zA-Z0-9_]")
_INDEXED = {
    "batch_samples": "index",
    "straggler": "rank",
}  # numbers of several ranks: the last part of the name is a label
REPLACE_S = 1.0  # the file is replaced at most this often
LOGGED = "evenly_logged"  # numbers of the program, whose names may have any characters


class PrometheusLogger(EventLogger):
    """Keeps the latest numbers in a file that is replaced once a second, and never seen half written.

    It needs no package. The file stays when the run ends: `evenly_last_event_timestamp_seconds` says how old it is.
    """

    def __init__(self, file: str | Path) -> None:
        """Writes nothing yet; `file` ends in `.prom`, which the collector looks for."""
        super().__init__()
        self._file = Path(file)
        if self._file.suffix != ".prom":
            raise SpecError(f"PrometheusLogger was given {file}; node_exporter reads only files that end in .prom.")
        self._run = ""
        self._samples: dict[str, dict[str, float]] = {}  # metric: labels: number
        self._is_changed = False  # since the file was written
        self._replaced_at = -math.inf

    def begin(self, name: str, settings: Settings) -> None:
        """Forgets the numbers of an earlier run."""
        self._run, self._samples = name, {}

    def write(self, event: Event, step: int, values: Mapping[str, float]) -> None:
        """Replaces the file, unless that was done less than a second ago."""
        for name, value in values.items():
            metric, labels = (LOGGED, {"name": name}) if isinstance(event, Measured) else _metric(name)
            self._set(metric, value, labels)
        self._set("evenly_step", step, {})
        self._set("evenly_last_event_timestamp_seconds", event.at_s, {})
        self._is_changed = True
        if time.monotonic() - self._replaced_at >= REPLACE_S:
            self.flush()

    def flush(self) -> None:
        """Replaces the file if there are new numbers."""
        if not self._is_changed:
            return
        self._is_changed, self._replaced_at = False, time.monotonic()
        unfinished = self._file.with_name(f"{self._file.name}.{os.getpid()}.tmp")
        unfinished.write_text(exposition(self._samples), encoding="utf-8")
        unfinished.replace(self._file)

    def end(self, *, has_failed: bool) -> None:
        """Replaces the file a last time, and leaves it."""
        self.flush()

    def _set(self, metric: str, value: float, labels: Mapping[str, str]) -> None:
        pairs = {"run": self._run, **labels}.items()
        text = ",".join(f'{name}="{_escaped(label)}"' for name, label in pairs)
        self._samples.setdefault(metric, {})[text] = value


def exposition(samples: Mapping[str, Mapping[str, float]]) -> str:
    """Returns gauges in Prometheus's text format.

    >>> print(exposition({"evenly_step": {'run="a"': 3.0}}), end="")
    # TYPE evenly_step gauge
    evenly_step{run="a"} 3.0
    """
    lines = []
    for metric, values in samples.items():
        lines.append(f"# TYPE {metric} gauge")
        lines += [f"{metric}{{{labels}}} {_number(value)}" for labels, value in values.items()]
    return "".join(f"{line}\n" for line in lines)


def _metric(name: str) -> tuple[str, dict[str, str]]:
    """Returns the metric and the labels of one of our own names.

    >>> _metric("evenly/exchange/seconds"), _metric("evenly/straggler/3")
    (('evenly_exchange_seconds', {}), ('evenly_straggler', {'rank': '3'}))
    """
    group, _, last = name.removeprefix("evenly/").partition("/")
    if group in _INDEXED and last:
        return f"evenly_{group}", {_INDEXED[group]: last}
    return _REFUSED.sub("_", name), {}


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(float(value))
