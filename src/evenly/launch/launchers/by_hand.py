"""No launcher: a process alone, or one with its rank given by arguments."""

from collections.abc import Mapping
from typing import ClassVar

from evenly.errors import LaunchError
from evenly.launch.launchers.launcher import MASTER, Environ, Launcher, read_master
from evenly.launch.launchers.place import Place

_ADVICE = "Pass master_addr= and master_port=, the same on all ranks."


class Arguments(Launcher):
    """Reads the caller's arguments; the environment may still give the local rank and the master."""

    name = "arguments"
    variables: ClassVar[Mapping[str, str]] = {
        "rank": "RANK",
        "world_size": "WORLD_SIZE",
        "local_rank": "LOCAL_RANK",
        **MASTER,
    }

    def detects(self, environ: Environ) -> bool:
        """Returns False: it is chosen by arguments only."""
        return False

    def place(self, environ: Environ) -> Place:
        """Returns the place the arguments describe."""
        ranks = self.ranks(environ)
        alone = ranks["world_size"] == 1
        master = {} if alone else read_master(environ, addr=None, port=None, advice=_ADVICE)
        return Place(**ranks, **master, launcher=self.name)


class Alone(Launcher):
    """The only process of its world, if no launcher is detected."""

    name = "alone"
    variables: ClassVar[Mapping[str, str]] = {**Arguments.variables}

    def detects(self, environ: Environ) -> bool:
        """Returns True: it is tried last."""
        return True

    def place(self, environ: Environ) -> Place:
        """Returns rank 0 of 1, unless only one of RANK and WORLD_SIZE is set."""
        for variable, missing in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
            if variable in environ:
                raise LaunchError(
                    f"the place of this process was asked of the environment; {variable}={environ[variable]!r} is set "
                    f"but {missing} is not, and no launcher is seen. Set both, or unset {variable} to run alone."
                )
        local_rank = self._number(environ, "local_rank") if "LOCAL_RANK" in environ else 0
        return Place(
            rank=0, world_size=1, local_rank=local_rank, local_size=None if local_rank else 1, launcher=self.name
        )
