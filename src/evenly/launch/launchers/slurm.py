"""A step of SLURM: what srun starts. A batch script outside srun is not one, though it sees most of the variables."""

from collections.abc import Mapping
from typing import ClassVar

from evenly.errors import LaunchError
from evenly.launch.launchers.launcher import MASTER, Environ, Launcher, derive_port, read_master, whole_number
from evenly.launch.launchers.place import Place
from evenly.launch.launchers.slurm_lists import expand_counts, expand_hosts

_ADVICE = "Export MASTER_ADDR and MASTER_PORT before srun."
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # batch, extern, interactive and pending steps count down from 2**32


def is_step(environ: Environ) -> bool:
    """Returns whether this process is a task of an ordinary step, not of a batch script or an interactive shell."""
    step = _step(environ)
    return step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


class Slurm(Launcher):
    """Reads the step's own variables; the job's (SLURM_TASKS_PER_NODE, SLURM_JOB_NODELIST) may be larger than it."""

    name = "slurm"
    variables: ClassVar[Mapping[str, str]] = {
        "rank": "SLURM_PROCID",
        "world_size": "SLURM_STEP_NUM_TASKS",
        "local_rank": "SLURM_LOCALID",
        **MASTER,
    }

    def detects(self, environ: Environ) -> bool:
        """Returns whether srun started this process."""
        return is_step(environ)

    def place(self, environ: Environ) -> Place:
        """Returns the place of the task; the master is the step's first host at a port of the step."""
        if "SLURM_STEP_NUM_TASKS" not in environ and "SLURM_NTASKS" in environ:
            environ = {**environ, "SLURM_STEP_NUM_TASKS": environ["SLURM_NTASKS"]}
        ranks = self.ranks(environ, local_size=_local_size(environ))
        node_id = environ.get("SLURM_NODEID", "")
        if ranks["world_size"] == 1:
            return Place(**ranks, node_id=node_id, launcher=self.name)
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "")
        job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID", "")
        addr = expand_hosts(nodes)[0] if nodes else None
        addr = "127.0.0.1" if ranks["local_size"] == ranks["world_size"] else addr  # all ranks are on this machine
        port = derive_port(job, _step(environ)) if job else None
        master = read_master(environ, addr=addr, port=port, advice=_ADVICE)
        return Place(**ranks, **master, node_id=node_id, launcher=self.name)


def _step(environ: Environ) -> str:
    return environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID", "")


def _local_size(environ: Environ) -> int | None:
    text = environ.get("SLURM_STEP_TASKS_PER_NODE")
    if not text or "SLURM_NODEID" not in environ:
        return None
    counts, node = expand_counts(text), whole_number(environ, "SLURM_NODEID")
    if node >= len(counts):
        raise LaunchError(
            f"the tasks on this node were asked of SLURM; SLURM_NODEID={environ['SLURM_NODEID']!r} is not one of the "
            f"{len(counts)} nodes of SLURM_STEP_TASKS_PER_NODE={text!r}. Start the processes with srun."
        )
    return counts[node]
