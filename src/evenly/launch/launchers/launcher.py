"""The base of all launcher adapters, and their helpers for reading the environment."""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from evenly.errors import LaunchError
from evenly.launch.launchers.place import Place

Environ = Mapping[str, str]

MASTER = {"master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT"}
_LOWEST_PORT, _NUM_PORTS = 12000, 18000  # below the ephemeral ports of Linux (32768) and those of Kubernetes (30000)


class Launcher(ABC):
    """One way of starting processes, detected by the variables that it sets."""

    name: ClassVar[str]
    variables: ClassVar[Mapping[str, str]]
    """Field of `Place` -> the variable of this launcher."""
    forwards_output: ClassVar[bool] = False
    """Whether it reads what ranks write, also from a pseudo terminal, and writes it elsewhere."""

    @abstractmethod
    def detects(self, environ: Environ) -> bool:
        """Returns whether `environ` was written by this launcher."""

    @abstractmethod
    def place(self, environ: Environ) -> Place:
        """Returns the place `environ` describes, or raises `LaunchError` naming the variable at fault."""

    def ranks(self, environ: Environ, *, local_size: int | None = None) -> dict[str, Any]:
        """Returns rank, world size, local rank and local size as `variables` names them, checked against each other."""
        rank, size = self._number(environ, "rank"), self._number(environ, "world_size")
        if rank >= size:
            raise self._error(f"{self._text_of(environ, 'rank')} is not below {self._text_of(environ, 'world_size')}")
        alone = size == 1 and self.variables["local_rank"] not in environ
        local_rank = 0 if alone else self._number(environ, "local_rank")
        if local_size is None and self.variables.get("local_size") in environ:
            local_size = self._number(environ, "local_size")
        if local_size is not None and not local_rank < local_size <= size:
            slot = f"{self._text_of(environ, 'local_rank')} of {local_size} local ranks"
            raise self._error(f"{slot} does not fit {self._text_of(environ, 'world_size')}")
        return {"rank": rank, "world_size": size, "local_rank": local_rank, "local_size": local_size}

    def _number(self, environ: Environ, field: str) -> int:
        variable = self.variables[field]
        if variable not in environ:
            present = [self._text_of(environ, name) for name in self.variables if self.variables[name] in environ]
            raise self._error(f"{', '.join(present) or 'part of it'} is set but {variable} is not")
        return whole_number(environ, variable)

    def _text_of(self, environ: Environ, field: str) -> str:
        variable = self.variables[field]
        return f"{variable}={environ.get(variable, '')!r}"

    def _error(self, case: str) -> LaunchError:
        return LaunchError(
            f"the place of this process was asked of {self.name}; {case}. Set these variables together and in "
            "agreement, unset them all, or pass rank=, world_size= and local_rank= yourself."
        )


def whole_number(environ: Environ, variable: str) -> int:
    """Returns the value of `variable`, which must be a whole number from 0."""
    text = environ.get(variable, "").strip()
    if not (text.isascii() and text.isdecimal()):
        raise LaunchError(
            f"the variable {variable} should be a whole number; it is {environ.get(variable, '')!r}. "
            f"Correct or unset {variable}."
        )
    return int(text)


def read_master(environ: Environ, *, addr: str | None, port: int | None, advice: str) -> dict[str, Any]:
    """Returns the master address: MASTER_ADDR and MASTER_PORT where set, else `addr` and `port`.

    Raises `LaunchError`, ending with `advice`, if neither the environment nor the launcher gives it.
    """
    addr = environ.get("MASTER_ADDR") or addr
    port = whole_number(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else port
    missing = [name for name, value in (("MASTER_ADDR", addr), ("MASTER_PORT", port)) if value is None]
    if addr is None or port is None:
        raise LaunchError(
            f"an address where all ranks meet is needed; {' and '.join(missing)} "
            f"{'are' if len(missing) > 1 else 'is'} not set and the launcher offers none. {advice}"
        )
    if not 0 < port < 65536:
        raise LaunchError(
            f"MASTER_PORT should be a port from 1 to 65535; it is {environ.get('MASTER_PORT', port)!r}. Correct it."
        )
    return {"master_addr": addr, "master_port": port}


def derive_port(*ids: str) -> int:
    """Returns a port every process finds alike from the same `ids`, so that two jobs on one machine seldom collide."""
    return _LOWEST_PORT + zlib.crc32("/".join(ids).encode()) % _NUM_PORTS
