"""torchrun, and every script that sets the same four variables by hand."""

from collections.abc import Mapping
from typing import ClassVar

from evenly.launch.launchers.launcher import MASTER, Environ, Launcher, read_master
from evenly.launch.launchers.place import Place

PLAIN: Mapping[str, str] = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_size": "LOCAL_WORLD_SIZE",
    **MASTER,
}
_ADVICE = "Set both, or start the script with torchrun or `evenly launch`."


class Torchrun(Launcher):
    """Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK (the node)."""

    name = "torchrun"
    variables: ClassVar[Mapping[str, str]] = PLAIN
    node_variable: ClassVar[str] = "GROUP_RANK"

    def detects(self, environ: Environ) -> bool:
        """Returns whether torchrun, or a script of that habit, set both rank and world size."""
        return "TORCHELASTIC_RUN_ID" in environ or {"RANK", "WORLD_SIZE"} <= environ.keys()

    def place(self, environ: Environ) -> Place:
        """Returns the place told by the plain variables."""
        ranks = self.ranks(environ)
        needed = ranks["world_size"] != 1 or "MASTER_ADDR" in environ
        master = read_master(environ, addr=None, port=None, advice=_ADVICE) if needed else {}
        node_id = environ.get(self.node_variable, "")
        return Place(**ranks, **master, node_id=node_id, launcher=self.name)
