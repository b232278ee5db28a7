"""Access to the environment for all other packages."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evenly.errors import LaunchError
from evenly.launch.addresses import address_text, parse_coordinator
from evenly.launch.secret import read_secret, require_long


def environment(name: str) -> str | None:
    """Returns the value of the environment variable `name`, or None where it is not set."""
    return os.environ.get(name)


def whole_environment() -> dict[str, str]:
    """Returns a copy of all variables of this process."""
    return dict(os.environ)


def overlay(extra: Mapping[str, str]) -> dict[str, str]:
    """Returns a copy of all variables of this process with `extra` on top, for a child process."""
    return {**os.environ, **extra}


@dataclass(frozen=True)
class ElasticSettings:
    """How this process takes part in an elastic run, as `evenly join` says in the environment."""

    coordinator: tuple[str, int] | str  # or the etcd that knows it: `etcd://HOST:PORT,...`
    node: str
    start: str  # random, the same on all ranks of one start of the node
    job: str
    secret_file: Path | None = None

    def secret(self) -> bytes | None:
        """Returns what all nodes share, or None; raises `SpecError` if the file that should have it is of no use."""
        return shared_secret(self.secret_file)

    def variables(self) -> dict[str, str]:
        """Returns the environment from which `elastic_settings` reads this."""
        return {
            "EVENLY_COORDINATOR": address_text(self.coordinator),
            "EVENLY_NODE": self.node,
            "EVENLY_START": self.start,
            "EVENLY_JOB": self.job,
            **({} if self.secret_file is None else {"EVENLY_SECRET_FILE": str(self.secret_file)}),
        }


def elastic_settings() -> ElasticSettings | None:
    """Returns how this process takes part in an elastic run, or None if `evenly join` has not started it.

    Workers that torchrun itself has started again are another start of the node.
    """
    address = environment("EVENLY_COORDINATOR")
    if not address:
        return None
    names = ("EVENLY_NODE", "EVENLY_START", "EVENLY_JOB")
    missing = [name for name in names if not environment(name)]
    if missing:
        raise LaunchError(
            f"an elastic run was to be joined, as EVENLY_COORDINATOR is set; {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not. Start the command with `evenly join`."
        )
    node, start, job = (environment(name) or "" for name in names)
    restarts = environment("TORCHELASTIC_RESTART_COUNT") or "0"
    secret_file = environment("EVENLY_SECRET_FILE")
    return ElasticSettings(
        coordinator=parse_coordinator(address, source="EVENLY_COORDINATOR"),
        node=node,
        start=start if restarts == "0" else f"{start}-{restarts}",
        job=job,
        secret_file=Path(secret_file) if secret_file else None,
    )


def shared_secret(path: Path | None) -> bytes | None:
    """Returns the secret in the file `path`, or what EVENLY_SECRET_FILE or EVENLY_SECRET say, or None."""
    file = path or environment("EVENLY_SECRET_FILE")
    if file:
        return read_secret(Path(file))
    value = environment("EVENLY_SECRET")
    return require_long(value.strip().encode(), source="the variable EVENLY_SECRET") if value else None
