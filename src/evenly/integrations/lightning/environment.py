"""Where this process stands among the others, as Lightning asks for it."""

from lightning.fabric.plugins.environments import ClusterEnvironment

from evenly.launch import Place, find_place


class EvenlyEnvironment(ClusterEnvironment):
    """The ranks that torchrun, srun, mpirun, Ray or `evenly launch` has started, in any numbers per node.

    Lightning's own environments multiply devices by nodes and refuse nodes with unequal numbers of ranks.
    """

    def __init__(self, place: Place | None = None) -> None:
        """Looks for the launcher in the environment, unless the place of this process is given."""
        super().__init__()
        self.place = place or find_place()

    @property
    def creates_processes_externally(self) -> bool:
        """True: the launcher has started all ranks."""
        return True

    @property
    def main_address(self) -> str:
        """The host of rank 0."""
        return self.place.master_addr or "127.0.0.1"

    @property
    def main_port(self) -> int:
        """The port of rank 0."""
        return self.place.master_port or 0

    @staticmethod
    def detect() -> bool:
        """Returns whether a launcher has started this process."""
        return find_place().launcher != "alone"

    def world_size(self) -> int:
        """Returns the number of ranks."""
        return self.place.world_size

    def set_world_size(self, size: int) -> None:
        """Does nothing: the launcher decides."""

    def global_rank(self) -> int:
        """Returns the rank of this process."""
        return self.place.rank

    def set_global_rank(self, rank: int) -> None:
        """Does nothing: the launcher decides."""

    def local_rank(self) -> int:
        """Returns the rank of this process on its node."""
        return self.place.local_rank

    def node_rank(self) -> int:
        """Returns the launcher's number of the node; where it gives none, 0 on the node of rank 0 and 1 elsewhere."""
        if self.place.node_id.isdecimal():
            return int(self.place.node_id)
        return int(self.place.rank != self.place.local_rank)
