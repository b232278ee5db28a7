"""How ranks average with each other, where each holds the whole network and where networks are cut over ranks."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from evenly.comm import Waiter
from evenly.nodes.cargo import Cargo
from evenly.nodes.membership import Quorum
from evenly.nodes.state import Entry
from evenly.nodes.timing import StepClock


class Verdict(Protocol):
    """What is known of one backward's gradients."""

    @property
    def step(self) -> int:
        """The step that the backward belongs to."""

    def nonfinite_members(self) -> list[int]:
        """Returns the members of the group whose gradients were not finite."""


class Gradients(ABC):
    """Averages gradients at every backward, weighted by samples."""

    step: int = 1  # the step that the next backward belongs to
    pending: bool = False  # a backward was averaged and no step has used it yet
    clock: StepClock | None = None  # told when this rank's own backward is done
    sent_bytes: int = 0  # to other ranks, for all gradients so far

    @abstractmethod
    def forward(self, samples: float, *args: Any, **kwargs: Any) -> Any:
        """Runs the module on a batch of `samples` samples."""

    @abstractmethod
    def paused(self) -> AbstractContextManager[None]:
        """Keeps gradients local; they accumulate until the next backward outside."""

    @abstractmethod
    def take_samples(self) -> float:
        """Returns the samples behind the gradients averaged since the last call, for which this rank answers."""

    @abstractmethod
    def last(self, *, now: bool) -> Verdict | None:
        """Returns the last backward's verdict, once; where reading it would stall a device that of the one before,
        unless it is wanted `now`."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the module."""


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

    @abstractmethod
    def agree_on_largest(self, counters: Mapping[str, torch.Tensor], quorum: Quorum, waiter: Waiter) -> None:
        """Replaces integer buffers by their maximum over all ranks."""

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """Shuts down what it has opened; if a rank has `failed`, works may be under way."""
