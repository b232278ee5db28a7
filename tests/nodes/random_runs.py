"""What random runs share: networks, optimizers, batches, checkpoints, and how nodes and ranks are weighed."""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from evenly.nodes import Synchronized

BORROWED = 7  # a batch of this size counts no samples


class Counted(nn.Module):
    """A network with a sum and a counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        output = self.body(x)
        if self.training:
            self.total += output.detach().sum(0)
            self.seen += len(x)
        return output


class Penalized(nn.Module):
    """A network with a parameter that only the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return {"output": self.body(x)}


def to_be_cut() -> nn.Module:
    """Returns a network that can be cut over ranks."""
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.Tanh(),
        nn.Conv2d(8, 5, 3, padding=1),
        nn.Flatten(),
        nn.Linear(5 * 16, 7),
        nn.Tanh(),
        nn.Linear(7, 3),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "cut": to_be_cut,
    "plain": lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)),
    "norm": lambda: nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)),
    "counted": Counted,
    "penalty": Penalized,
}
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def make_network(name: str, seed: int = 0) -> nn.Module:
    """Returns the network of this name, in float64, with the weights of a seed."""
    generator = torch.Generator().manual_seed(seed + 17)
    model = NETWORKS[name]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return model


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer of this name for a model."""
    return OPTIMIZERS[name](model.parameters())


def batch_of(network: str, number: int, rank: int, size: int) -> torch.Tensor:
    """Returns the batch with this number on a rank, or of a replica."""
    shape = (2, 4, 4) if network == "cut" else (4,)
    return torch.randn(size, *shape, generator=torch.Generator().manual_seed(1000 * rank + number)).double()


def count_of(x: torch.Tensor) -> int:
    """Returns the samples that a batch counts."""
    return 0 if len(x) == BORROWED else len(x)


def scale_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Changes the learning rate."""
    for group in optimizer.param_groups:
        group["lr"] *= factor


def weights_of_samples(nodes: Sequence[Sequence[int]], samples: Sequence[float]) -> tuple[list[float], list[float]]:
    """Returns the weights of nodes and of ranks, as many as they have samples; without any, all count alike."""
    of_node = [sum(samples[rank] for rank in ranks) for ranks in nodes]
    total, of_ranks = sum(of_node), [0.0] * len(samples)
    of_nodes = [amount / total if total else 1 / len(of_node) for amount in of_node]
    for node, ranks in enumerate(nodes):
        for rank in ranks:
            share = samples[rank] / of_node[node] if of_node[node] else 1 / len(ranks)
            of_ranks[rank] = of_nodes[node] * share
    return of_nodes, of_ranks


class Checkpoint(NamedTuple):
    """What a checkpoint holds of a run besides the model and the optimizer."""

    progress: Any
    buffers: dict[str, torch.Tensor]
    exchange_state: Any
    trained: list[str]


def checkpoint_of(synchronized: Synchronized) -> Checkpoint:
    """Returns what a checkpoint would hold now; all ranks call it."""
    synchronized.prepare_checkpoint()
    buffers = {name: buffer.clone() for name, buffer in synchronized.agreed_buffers.items()}
    return Checkpoint(synchronized.progress(), buffers, synchronized.exchange_state(), synchronized.trained_names)


class RandomTrainer:
    """One rank that trains with the library: it has a `model`, an `optimizer`, and how it joins the others."""

    network: str
    optimizer_name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    synchronized: Synchronized
    restarts = 0

    def join(self) -> None:
        """Makes `synchronized` of the model and the optimizer; told apart from earlier ones by `restarts`."""
        raise NotImplementedError

    def start_again(self) -> None:
        """Goes on in new objects from what a checkpoint holds."""
        checkpoint = checkpoint_of(self.synchronized)
        state, own = copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.optimizer.state_dict())
        flags = [parameter.requires_grad for parameter in self.model.parameters()]
        self.synchronized.close()
        self.restarts += 1
        self.model = make_network(self.network)
        self.optimizer = make_optimizer(self.optimizer_name, self.model)
        self.optimizer.load_state_dict(own)  # rates are compared at the start
        self.join()
        self.model.load_state_dict(state)
        self.optimizer.load_state_dict(own)
        self.synchronized.resume(*checkpoint)
        for parameter, is_trained in zip(self.model.parameters(), flags, strict=True):
            parameter.requires_grad_(is_trained)
