"""OpenMPI's mpirun, versions 4 and 5."""

from collections.abc import Mapping
from typing import ClassVar

from evenly.launch.launchers.launcher import MASTER, Environ, Launcher, derive_port, read_master
from evenly.launch.launchers.place import Place

_ADVICE = "Add `-x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500` to the mpirun line."
_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri")


class OpenMpi(Launcher):
    """Reads OMPI_COMM_WORLD_*; it does not number nodes (its _NODE_RANK is a rank on the node, not the node)."""

    name = "openmpi"
    forwards_output = True
    variables: ClassVar[Mapping[str, str]] = {
        "rank": "OMPI_COMM_WORLD_RANK",
        "world_size": "OMPI_COMM_WORLD_SIZE",
        "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
        "local_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
        **MASTER,
    }

    def detects(self, environ: Environ) -> bool:
        """Returns whether mpirun set rank or size."""
        return bool(environ.keys() & {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"})

    def place(self, environ: Environ) -> Place:
        """Returns the place set by mpirun; on one machine the master is the loopback at a port of the job."""
        ranks = self.ranks(environ)
        if ranks["world_size"] == 1:
            return Place(**ranks, launcher=self.name)
        job = next((environ[name] for name in _JOB if name in environ), None)
        addr = "127.0.0.1" if ranks["local_size"] == ranks["world_size"] else None
        port = None if job is None else derive_port(job)
        return Place(**ranks, **read_master(environ, addr=addr, port=port, advice=_ADVICE), launcher=self.name)
