"""How ranks average with each other, where each holds the whole network and where networks are cut over ranks."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from evenly.comm import Waiter
from evenly.nodes.averaged import Gradients
from evenly.nodes.cargo import Cargo
from evenly.nodes.fingerprint import Fingerprint
from evenly.nodes.membership import Quorum
from evenly.nodes.state import Entry


class Sharing(ABC):
    """Who averages what with whom."""

    splits_rows: bool  # whether a fragment may have some rows of a tensor

    @property
    @abstractmethod
    def is_first(self) -> bool:
        """Whether this rank, or the replica it belongs to, gives all others what is taken from one: rank 0 is in it."""

    @property
    @abstractmethod
    def answers(self) -> bool:
        """Whether this rank answers for the samples of its network: the first of those that hold one together."""

    @abstractmethod
    def level(self, module: torch.nn.Module, waiter: Waiter) -> None:
        """Gives every rank the state of rank 0; all ranks call it together, once, before all else."""

    @abstractmethod
    def relearn(self, module: torch.nn.Module, waiter: Waiter) -> None:
        """Goes on after parts of a cut network have changed hands; all ranks call it together."""

    @abstractmethod
    def gradients(self, module: torch.nn.Module, *, find_unused_parameters: bool) -> Gradients:
        """Returns what averages the gradients of `module` inside the node."""

    @abstractmethod
    def state(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Entry]:
        """Returns the optimizer's state that can be averaged."""

    @abstractmethod
    def sizes(self, named: Sequence[tuple[str, torch.Tensor]]) -> list[int]:
        """Returns the elements of each tensor on one device; named are the parameters or buffers that they lie like."""

    @abstractmethod
    def load(
        self, entries: Mapping[str, Sequence[Entry]], state: Sequence[Entry] = (), *, change: bool = False
    ) -> Cargo:
        """Returns a snapshot of parameters, by the key under which their point is remembered, and of state."""

    @property
    @abstractmethod
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """Which ranks of the node, by their places in it, hold one network together."""

    @abstractmethod
    def fingerprint(self, entries: Sequence[Entry]) -> Fingerprint:
        """Returns the fingerprint of what this rank holds of the parameters; those of all holders are summed."""

    @abstractmethod
    def agree_on_largest(self, counters: Mapping[str, torch.Tensor], quorum: Quorum, waiter: Waiter) -> None:
        """Replaces integer buffers by their maximum over all ranks."""

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """Shuts down what it has opened; if a rank has `failed`, works may be under way."""
