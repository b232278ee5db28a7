"""Types of a checkpoint's content: the state of a run, of its nodes and of its ranks, in full tensors."""

from typing import Any, NotRequired, Protocol, TypedDict

import torch

from evenly.checkpoints.state_form import StateForm
from evenly.exchange import ExchangeState, PayloadEntryState, Progress

Tensors = dict[str, torch.Tensor]
Saved = dict[str, Any]  # a state_dict() of torch or of an object of the user's


class Stateful(Protocol):
    """An object whose state can be saved: a scheduler, a GradScaler."""

    def state_dict(self) -> Saved:
        """Returns the state."""

    def load_state_dict(self, state_dict: Saved, /) -> object:
        """Loads a state."""


class Manifest(TypedDict):
    """Step, nodes and models of a checkpoint, and the SHA-256 of its files."""

    step: int
    epoch: int
    nodes: list[list[int]]
    models: dict[str, dict[str, str]]  # the dtype and shape of each tensor
    files: dict[str, str]
    sizes: NotRequired[dict[str, int]]  # the bytes of the files
    ended_epochs: NotRequired[int]  # the run ended, finished or stopped early, in a loop over so many epochs


class NodeState(TypedDict):
    """One model as the ranks of a node hold it together."""

    parameters: Tensors
    optimizer: Saved
    pending: list[list[PayloadEntryState]]  # the payload of pending exchanges
    form: NotRequired[StateForm | None]  # of the network's state_dict
    trained: NotRequired[list[str]]  # the parameters that the last forward trained


class FullState(NodeState):
    """One model with the state that differs between ranks."""

    buffers: Tensors
    agreed: Tensors  # the buffers of the last exchange
    exchanges: ExchangeState


class LocalState(TypedDict):
    """The part of one model's state that differs between ranks."""

    buffers: Tensors
    agreed: Tensors | None
    progress: Progress
    exchanges: ExchangeState | None
    feed: dict[str, int] | None


class RandomState(TypedDict):
    """The generators of a process."""

    torch: torch.Tensor
    cuda: torch.Tensor | None
    python: tuple[object, ...]
    numpy: list[Any]  # name, keys, position, has_gauss, gauss


class RankState(TypedDict):
    """One rank, with all its models."""

    trainees: dict[str, LocalState]
    tracked: dict[str, Saved]
    random: RandomState | None


class Restored(TypedDict):
    """The state that one rank resumes from."""

    manifest: Manifest
    node: dict[str, NodeState]
    rank: RankState
