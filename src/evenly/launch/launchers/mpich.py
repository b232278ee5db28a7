"""MPICH's mpiexec (Hydra) and its kin, Intel MPI among them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from evenly.launch.launchers.launcher import MASTER, Environ, Launcher, derive_port, read_master
from evenly.launch.launchers.place import Place
from evenly.launch.launchers.slurm import is_step

_ADVICE = "Add `-genv MASTER_ADDR <host of rank 0> -genv MASTER_PORT 29500` to the mpiexec line."
_USUAL_PORT = 29500


class Mpich(Launcher):
    """Reads PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS; the node is the host as Hydra calls it."""

    name = "mpich"
    forwards_output = True
    variables: ClassVar[Mapping[str, str]] = {
        "rank": "PMI_RANK",
        "world_size": "PMI_SIZE",
        "local_rank": "MPI_LOCALRANKID",
        "local_size": "MPI_LOCALNRANKS",
        **MASTER,
    }

    def detects(self, environ: Environ) -> bool:
        """Returns whether Hydra started this process; `srun --mpi=pmi2` sets PMI_RANK too, and is SLURM's."""
        return "MPI_LOCALRANKID" in environ or ("PMI_RANK" in environ and not is_step(environ))

    def place(self, environ: Environ) -> Place:
        """Returns the place set by mpiexec; on one machine the master is the loopback at a port of the job."""
        ranks = self.ranks(environ)
        node_id = environ.get("PMI_HOSTNAME", "")
        if ranks["world_size"] == 1:
            return Place(**ranks, node_id=node_id, launcher=self.name)
        is_one_machine = ranks["local_size"] == ranks["world_size"]
        addr, port = ("127.0.0.1", _job_port()) if is_one_machine else (None, None)
        master = read_master(environ, addr=addr, port=port, advice=_ADVICE)
        return Place(**ranks, **master, node_id=node_id, launcher=self.name)


def _job_port() -> int:
    """Hydra names its job in no variable, but all ranks of one machine descend from one proxy process."""
    pid = os.getpid()
    while pid > 1:
        name, parent = _process(pid)
        if name.startswith("hydra_pmi_proxy"):
            return derive_port("hydra", str(pid))
        pid = parent
    return _USUAL_PORT


def _process(pid: int) -> tuple[str, int]:
    """Returns name and parent of a process, ("", 0) if the system does not say."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", 0
    name, _, fields = text.partition("(")[2].rpartition(")")  # a name may hold brackets and blanks
    return name, int(fields.split()[1])
