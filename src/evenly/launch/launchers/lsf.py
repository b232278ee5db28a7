"""LSF's jsrun."""

from collections.abc import Mapping
from typing import ClassVar

from evenly.launch.launchers.launcher import MASTER, Environ, Launcher, derive_port, read_master
from evenly.launch.launchers.place import Place

_ADVICE = "Add `-E MASTER_ADDR=<host of rank 0> -E MASTER_PORT=29500` to the jsrun line."


class Jsrun(Launcher):
    """Reads JSM_NAMESPACE_*; jsrun sets OpenMPI's variables too, with the same meaning."""

    name = "jsrun"
    forwards_output = True
    variables: ClassVar[Mapping[str, str]] = {
        "rank": "JSM_NAMESPACE_RANK",
        "world_size": "JSM_NAMESPACE_SIZE",
        "local_rank": "JSM_NAMESPACE_LOCAL_RANK",
        "local_size": "JSM_NAMESPACE_LOCAL_SIZE",
        **MASTER,
    }

    def detects(self, environ: Environ) -> bool:
        """Returns whether jsrun set the rank."""
        return "JSM_NAMESPACE_RANK" in environ

    def place(self, environ: Environ) -> Place:
        """Returns the place set by jsrun; on one machine the master is the loopback at a port of the job."""
        ranks = self.ranks(environ)
        if ranks["world_size"] == 1:
            return Place(**ranks, launcher=self.name)
        addr = "127.0.0.1" if ranks["local_size"] == ranks["world_size"] else None
        port = (
            derive_port(environ["LSB_JOBID"], environ.get("JSM_NAMESPACE_ID", "")) if "LSB_JOBID" in environ else None
        )
        return Place(**ranks, **read_master(environ, addr=addr, port=port, advice=_ADVICE), launcher=self.name)
