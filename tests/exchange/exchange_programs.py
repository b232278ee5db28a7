"""Random runs with any form of exchange: what ranks do between steps, networks, optimizers and batches."""

import copy
import random
from dataclasses import dataclass, field

import torch
from torch import nn

from evenly.spec import Adaptive, AnyPeriod, EveryEpoch, EverySteps, Exchange
from tests.nodes.random_runs import BORROWED, batch_of, make_network

KINDS = ("evaluate", "evaluate", "restart", "restart", "finish", "load", "write", "write", "scale", "accept", "swap",
         "rate", "load optimizer", "look", "load part", "load one", "write one", "write one")  # fmt: skip


@dataclass
class RandomRun:
    """One random run; operations are the same on every rank but for batches, and for the nodes that they name."""

    seed: int
    sizes: tuple[int, ...]
    period: AnyPeriod
    exchange: Exchange
    network: str
    optimizer: str
    operations: list[tuple] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        """How many there are."""
        return sum(self.sizes)


def make(seed: int, *, sizes: tuple[int, ...] | None = None, network: str = "") -> RandomRun:
    """Returns the run of a seed; `sizes` are the ranks of each node, or its replicas where the network is cut."""
    rng = random.Random(seed)
    chosen_sizes = rng.choice([(1, 1), (2, 1), (3, 1), (2, 2), (1, 1, 1), (2, 1, 1)])
    sizes = sizes or chosen_sizes
    steps = rng.randint(1, 4)
    warmup = rng.choice([0, 0, 0, 1, 2])
    period: AnyPeriod = rng.choice(
        [EverySteps(steps, warmup=warmup)] * 4
        + [EveryEpoch(warmup=warmup), Adaptive(drift=rng.choice([0.001, 0.02]), start=2, most=4, warmup=warmup)]
    )
    least = steps if isinstance(period, EverySteps) else 2
    chosen_network, optimizer = rng.choice(["plain", "norm", "counted"]), rng.choice(["sgd", "momentum", "adam"])
    network = network or chosen_network
    exchange = Exchange(
        overlap=rng.choice([0, 0, *range(1, least + 1)]),
        fragments=1 if isinstance(period, EveryEpoch) else rng.choice([1, 1, *range(2, least + 1)]),
        codec=rng.choice(["fp32", "fp32", "bf16", "int8", "int4"]),
        outer=rng.choice([None, None, None, "nesterov", {"name": "SGD", "settings": {"lr": 1.0}}]),
        optimizer_state=rng.choice(["keep", "keep", "average", "reset", {"exp_avg": "average", "step": "reset"}])
        if optimizer == "adam"
        else rng.choice(["keep", "average", "reset"]),
        state_every=rng.choice([1, 1, 2]),
        buffers=_policies(rng, network),
        timeout_s=30.0,
    )
    run = RandomRun(seed, sizes, period, exchange, network, optimizer)
    for number in range(rng.randint(4, 9)):
        for _ in range(rng.choice([0, 0, 1, 1, 2])):
            _add_event(run, rng, rng.randrange(100))
        run.operations.append(("step", number, _batches(run, rng)))
        if rng.random() < 0.15:
            run.operations.append(("end_epoch",))
    for _ in range(rng.choice([0, 1, 2])):
        _add_event(run, rng, rng.randrange(100))
    return run


def _policies(rng: random.Random, network: str):
    if network == "plain":
        return "auto"
    chosen = {
        "norm": [{"*running_mean": "first"}, {"*running_var": "max"}, {"*running_mean": "min"}, {"*tracked": "first"}],
        "cut": [{"*running_mean": "first"}],
        "counted": [{"total": "max"}, {"total": "first", "seen": "min"}, {"seen": "first"}],
    }
    return rng.choice(["auto", "auto", "keep", rng.choice(chosen[network])])


def _add_event(run: RandomRun, rng: random.Random, number: int) -> None:
    """Adds what loops do between steps."""
    kinds = [*KINDS, *["restart otherwise"] * (rng.random() < 0.3)]
    kind, node = rng.choice(kinds), rng.randrange(len(run.sizes))
    if kind in ("load part", "load one") and rng.random() < 0.6:
        kind = "load"  # the others are mostly refused with codecs and outer optimizers
    added = {
        "evaluate": [("evaluate",)],
        "finish": [("finish",)],
        "restart": [("restart", None)],
        "restart otherwise": [*rng.choice([[], [("finish",)]]), ("restart", rng.choice(["fp32", "bf16", "int8"]))],
        "load": [("load", number, None)],
        "load one": [("load", number, node)],
        "load part": [("load part", number)],
        "write": [("write", number, None)],
        "write one": [("nudge", number, node)],
        "scale": [("scale", 0.9)],
        "accept": [("write", number, None), ("accept",)],
        "swap": [("swap", number)],
        "rate": [("rate", rng.choice([0.5, 2.0]))],
        "load optimizer": [("load optimizer", 0.5)],
        "look": [("look", number)],
    }[kind]
    run.operations += added
    if rng.random() < 0.2:
        run.operations.append(rng.choice([("evaluate",), ("restart", None)]))


def _batches(run: RandomRun, rng: random.Random) -> tuple[int, ...]:
    return tuple(BORROWED if rng.random() < 0.08 else rng.choice([2, 3, 4]) for _ in range(run.ranks))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """Returns the loss of an output."""
    return output.square().mean() + output.mean()


def weights_of(run: RandomRun, number: int) -> dict[str, torch.Tensor]:
    """Returns other weights, with the buffers of a network that has trained."""
    model = make_network(run.network, seed=500 + number)
    model(batch_of(run.network, number, 77, 5))
    return copy.deepcopy(model.state_dict())


def part_of(run: RandomRun, number: int) -> dict[str, torch.Tensor]:
    """Returns other weights of the last layer."""
    weights = weights_of(run, number)
    last = [name for name in weights if name.endswith("weight")][-1].removesuffix("weight")
    return {name: value for name, value in weights.items() if name.startswith(last)}


@torch.no_grad()
def nudge(model: nn.Module, number: int) -> None:
    """Adds something to every parameter by hand."""
    for place, parameter in enumerate(model.parameters()):
        parameter.add_(0.1 * (1 + (number + place) % 7))


@torch.no_grad()
def scale(model: nn.Module, factor: float) -> None:
    """Lets weights decay by hand."""
    for parameter in model.parameters():
        parameter.mul_(factor)


def scale_state(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Loads a state whose momenta are smaller."""
    state = copy.deepcopy(optimizer.state_dict())
    for slots in state["state"].values():
        for slot in ("momentum_buffer", "exp_avg"):
            if slots.get(slot) is not None:
                slots[slot] *= factor
    optimizer.load_state_dict(state)
