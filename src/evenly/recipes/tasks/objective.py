"""What one network is trained for: its data, its loss, and how well it does."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import Dataset

Batch = Any  # what a loader yields: a tuple of tensors


class Objective(ABC):
    """The data of a training, and what its network is to learn."""

    num_sums: ClassVar[int]  # that `score` returns
    train_set: Dataset[Any]
    test_set: Dataset[Any]
    collate: Callable[[Any], Any]

    @abstractmethod
    def build(self) -> nn.Module:
        """Returns the network, with weights from torch's random numbers."""

    @abstractmethod
    def example(self, batch_size: int) -> torch.Tensor:
        """Returns inputs of the network, for planning."""

    @abstractmethod
    def loss(self, network: nn.Module, batch: Batch, *, epoch: int) -> torch.Tensor:
        """Returns the mean loss of a training batch."""

    @abstractmethod
    def score(self, network: nn.Module, batch: Batch) -> list[float]:
        """Returns sums over the samples of a test batch, the number of samples last."""

    @abstractmethod
    def figures(self, sums: list[float]) -> dict[str, float]:
        """Returns the figures of a test from the sums of all its batches."""
