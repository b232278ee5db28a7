"""From the environment and arguments to a `Place`."""

from evenly.errors import LaunchError
from evenly.launch.launchers.by_hand import Alone, Arguments
from evenly.launch.launchers.launcher import Environ, Launcher
from evenly.launch.launchers.lsf import Jsrun
from evenly.launch.launchers.mpich import Mpich
from evenly.launch.launchers.openmpi import OpenMpi
from evenly.launch.launchers.place import Place
from evenly.launch.launchers.ray import Ray
from evenly.launch.launchers.slurm import Slurm
from evenly.launch.launchers.torchrun import Torchrun
from evenly.launch.settings import whole_environment

# The innermost first: torchrun and mpirun are themselves started by srun, jsrun sets OpenMPI's variables.
LAUNCHERS: tuple[Launcher, ...] = (Ray(), Torchrun(), Jsrun(), OpenMpi(), Mpich(), Slurm(), Alone())


def find_place(
    environ: Environ | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> Place:
    """Returns the place of this process from its launcher; arguments beat the environment.

    With both `rank` and `world_size` given no launcher is asked; only LOCAL_RANK, MASTER_ADDR and MASTER_PORT may
    still fill what the arguments leave out. A local rank is never computed from a rank.

    >>> find_place({}).launcher
    'alone'
    """
    fields = {
        "rank": rank,
        "world_size": world_size,
        "local_rank": local_rank,
        "master_addr": master_addr,
        "master_port": master_port,
    }
    arguments = {field: str(value) for field, value in fields.items() if value is not None}
    environ = whole_environment() if environ is None else environ
    launcher = Arguments() if {"rank", "world_size"} <= arguments.keys() else _detect(environ)
    try:
        return launcher.place({**environ, **{launcher.variables[field]: text for field, text in arguments.items()}})
    except LaunchError as error:
        if not arguments:
            raise
        argument_text = ", ".join(f"{field}={text}" for field, text in arguments.items())
        raise LaunchError(f"{error} (Arguments stand in for the variables here: {argument_text}.)") from None


def _detect(environ: Environ) -> Launcher:
    return next(launcher for launcher in LAUNCHERS if launcher.detects(environ))
