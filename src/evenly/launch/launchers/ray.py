"""Ray Train's workers."""

from typing import ClassVar

from evenly.launch.launchers.launcher import Environ
from evenly.launch.launchers.torchrun import Torchrun


class Ray(Torchrun):
    """Reads torchrun's variables with NODE_RANK for the node."""

    name = "ray"
    node_variable: ClassVar[str] = "NODE_RANK"

    def detects(self, environ: Environ) -> bool:
        """Returns whether the plain variables come with Ray's NODE_RANK and without torchrun's own."""
        torchrun = environ.keys() & {"TORCHELASTIC_RUN_ID", "GROUP_RANK"}
        return {"RANK", "WORLD_SIZE", "NODE_RANK"} <= environ.keys() and not torchrun
