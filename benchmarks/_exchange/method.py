"""One method of training: what a round of `exchange.py` calls, and what it records."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

PERIOD = 8  # K', the steps between exchanges
Nodes = list[list[int]]  # the ranks of each node


@dataclass(eq=False)
class Method:
    """One method of training.

    `model` is called in training and `plain` is the network in it; `step` follows the backward pass. An exchange is
    complete `overlap_steps` steps after it began.
    """

    model: nn.Module
    plain: nn.Module
    step: Callable[[], Any]
    zero_grad: Callable[[], Any]
    overlap_steps: int = 0
    close: Callable[[], Any] = lambda: None
    step_seconds: list[float] = field(default_factory=list)  # the mean of each round
    sent_bytes: list[list[int]] = field(default_factory=list)  # by each node, of each round


MethodFactory = Callable[[Nodes, nn.Module], Method]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer that all methods use."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
