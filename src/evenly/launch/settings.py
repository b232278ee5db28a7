"""Access to the environment for all other packages."""

import os
from collections.abc import Mapping


def environment(name: str) -> str | None:
    """Returns the value of the environment variable `name`, or None where it is not set."""
    return os.environ.get(name)


def whole_environment() -> dict[str, str]:
    """Returns a copy of all variables of this process."""
    return dict(os.environ)


def overlay(extra: Mapping[str, str]) -> dict[str, str]:
    """Returns a copy of all variables of this process with `extra` on top, for a child process."""
    return {**os.environ, **extra}
