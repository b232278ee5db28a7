"""Random runs with any form of exchange: codecs, fragments, overlap, outer optimizers, policies, loads, checkpoints.

What every rank holds after every operation must be what a single process that plays all ranks has, to rounding, and to
the last bit the same on all ranks where nodes have just agreed; what cannot be agreed on must end in a typed error on
all ranks.
"""

import copy
import random
from dataclasses import dataclass, field

import torch
from torch import nn

from evenly._errors import EvenlyError
from evenly.nodes import join_nodes
from evenly.spec import Adaptive, AnyPeriod, EveryEpoch, EverySteps, Exchange
from tests.nodes.exchange_player import Player, RefusedError
from tests.ranks import RankError, cluster_of, ragged, run_ranks

BORROWED = 7  # a batch of this size counts no samples


@dataclass
class Run:
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


def make(seed: int) -> Run:
    """Returns the run of a seed."""
    rng = random.Random(seed)
    sizes = rng.choice([(1, 1), (2, 1), (3, 1), (2, 2), (1, 1, 1), (2, 1, 1)])
    steps = rng.randint(1, 4)
    warmup = rng.choice([0, 0, 0, 1, 2])
    period: AnyPeriod = rng.choice(
        [EverySteps(steps, warmup=warmup)] * 4
        + [EveryEpoch(warmup=warmup), Adaptive(drift=rng.choice([0.001, 0.02]), start=2, most=4, warmup=warmup)]
    )
    least = steps if isinstance(period, EverySteps) else 2
    network, optimizer = rng.choice(["plain", "norm", "counted"]), rng.choice(["sgd", "momentum", "adam"])
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
    run = Run(seed, sizes, period, exchange, network, optimizer)
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
        "counted": [{"total": "max"}, {"total": "first", "seen": "min"}, {"seen": "first"}],
    }
    return rng.choice(["auto", "auto", "keep", rng.choice(chosen[network])])


def _add_event(run: Run, rng: random.Random, number: int) -> None:
    """Adds what loops do between steps."""
    kinds = ["evaluate", "evaluate", "restart", "restart", "finish", *["restart otherwise"] * (rng.random() < 0.3), "load", "write", "write", "scale", "accept", "swap", "rate",
             "load optimizer", "look", "load part", "load one", "write one", "write one"]  # fmt: skip
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


def _batches(run: Run, rng: random.Random) -> tuple[int, ...]:
    return tuple(BORROWED if rng.random() < 0.08 else rng.choice([2, 3, 4]) for _ in range(run.ranks))


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


def make_network(run: Run, seed: int = 0) -> nn.Module:
    """Returns the network of a run, in float64."""
    generator = torch.Generator().manual_seed(seed + 17)
    layers = {
        "plain": lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)),
        "norm": lambda: nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)),
        "counted": Counted,
    }
    model = layers[run.network]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return model


def make_optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer of a run."""
    makers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    }
    return makers[run.optimizer](model.parameters())


def batch_of(number: int, rank: int, size: int) -> torch.Tensor:
    """Returns the batch of a step on a rank."""
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randn(size, 4, generator=generator, dtype=torch.float64)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """Returns the loss of an output."""
    return output.square().mean() + output.mean()


def count_of(x: torch.Tensor) -> int:
    """Returns the samples that a batch counts."""
    return 0 if len(x) == BORROWED else len(x)


def weights_of(run: Run, number: int) -> dict[str, torch.Tensor]:
    """Returns other weights, with the buffers of a network that has trained."""
    model = make_network(run, seed=500 + number)
    model(batch_of(number, 77, 5))
    return copy.deepcopy(model.state_dict())


def part_of(run: Run, number: int) -> dict[str, torch.Tensor]:
    """Returns other weights of the last layer."""
    weights = weights_of(run, number)
    last = [name for name in weights if name.endswith("weight")][-1].removesuffix("weight")
    return {name: value for name, value in weights.items() if name.startswith(last)}


@torch.no_grad()
def write(run: Run, model: nn.Module, number: int) -> None:
    """Writes other weights and buffers by hand."""
    weights = weights_of(run, number)
    for name, tensor in model.state_dict().items():
        tensor.copy_(weights[name])


@torch.no_grad()
def nudge(model: nn.Module, number: int) -> None:
    """Adds something to every parameter by hand."""
    for place, parameter in enumerate(model.parameters()):
        parameter.add_(batch_of(number, 50 + place, 1).mean())


@torch.no_grad()
def scale(model: nn.Module, factor: float) -> None:
    """Lets weights decay by hand."""
    for parameter in model.parameters():
        parameter.mul_(factor)


def scale_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Changes the learning rate."""
    for group in optimizer.param_groups:
        group["lr"] *= factor


def scale_state(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Loads a state whose momenta are smaller."""
    state = copy.deepcopy(optimizer.state_dict())
    for slots in state["state"].values():
        for slot in ("momentum_buffer", "exp_avg"):
            if slots.get(slot) is not None:
                slots[slot] *= factor
    optimizer.load_state_dict(state)


class _Trainer:
    """One rank that trains with the library."""

    def __init__(self, run: Run, party) -> None:
        self.run, self.party, self.rank = run, party, party.rank
        self.nodes = ragged(*run.sizes)
        self.model = make_network(run, seed=self.rank)  # all begin with that of rank 0
        self.optimizer = make_optimizer(run, self.model)
        self.restarts, self.seen, self.exchange = 0, [], run.exchange
        self.join()

    def join(self) -> None:
        self.synchronized = join_nodes(
            self.model,
            self.optimizer,
            party=self.party.chapter(f"run{self.restarts}"),
            cluster=cluster_of(self.nodes),
            period=self.run.period,
            exchange=self.exchange,
            count=count_of,
        )

    def play(self) -> list[list[torch.Tensor]]:
        try:
            for operation, *arguments in self.run.operations:
                getattr(self, operation.replace(" ", "_"))(*arguments)
                self.look_at()
            self.synchronized.finish()
            self.look_at()
        finally:
            self.synchronized.close()
        return self.seen

    def look_at(self) -> None:
        self.seen.append([tensor.detach().clone() for tensor in self.model.state_dict().values()])

    def step(self, number, sizes) -> None:
        loss_of(self.synchronized(batch_of(number, self.rank, sizes[self.rank]))).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def look(self, number) -> None:
        """A forward without a step: in training it changes buffers."""
        with torch.no_grad():
            self.synchronized(batch_of(number, 60 + self.rank, 3))

    def evaluate(self) -> None:
        with self.synchronized.agreed():
            self.look_at()

    def end_epoch(self) -> None:
        self.synchronized.end_epoch()

    def load(self, number, node) -> None:
        if node is None or self.rank in self.nodes[node]:
            self.model.load_state_dict(weights_of(self.run, number))

    def load_part(self, number) -> None:
        self.model.load_state_dict(part_of(self.run, number), strict=False)

    def swap(self, number) -> None:
        own = copy.deepcopy(self.model.state_dict())
        self.model.load_state_dict(weights_of(self.run, number))
        self.model.load_state_dict(own)

    def write(self, number, node) -> None:
        if node is None or self.rank in self.nodes[node]:
            write(self.run, self.model, number)

    def nudge(self, number, node) -> None:
        if self.rank in self.nodes[node]:
            nudge(self.model, number)

    def scale(self, factor) -> None:
        scale(self.model, factor)

    def accept(self) -> None:
        self.synchronized.accept_weights()

    def rate(self, factor) -> None:
        scale_rate(self.optimizer, factor)

    def load_optimizer(self, factor) -> None:
        scale_state(self.optimizer, factor)

    def finish(self) -> None:
        self.synchronized.finish()

    def restart(self, codec) -> None:
        """Goes on in a new object from what a checkpoint holds, with another codec if it is given."""
        before = self.synchronized
        before.come_together()
        progress, exchange_state = before.progress(), before.exchange_state()
        buffers = {name: buffer.clone() for name, buffer in before.agreed_buffers.items()}
        state, own = copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.optimizer.state_dict())
        before.close()
        self.restarts += 1
        if codec is not None:
            self.exchange = self.exchange.model_copy(update={"codec": codec})
        self.model = make_network(self.run)
        self.optimizer = make_optimizer(self.run, self.model)
        self.optimizer.load_state_dict(own)  # rates are compared at the start
        self.join()
        self.model.load_state_dict(state)
        self.optimizer.load_state_dict(own)
        self.synchronized.resume(progress, buffers, exchange_state)


class _Referee:
    """All ranks of a run, played in turn by one process; `exact` tells where ranks must be equal to the last bit."""

    def __init__(self, run: Run) -> None:
        self.run, self.nodes = run, ragged(*run.sizes)
        self.player = Player(
            make_network(run), lambda model: make_optimizer(run, model), self.nodes, run.period, run.exchange
        )
        self.seen, self.exact = [], []
        self.is_refused = ""

    def play(self) -> None:
        try:
            for operation, *arguments in self.run.operations:
                getattr(self, operation.replace(" ", "_"))(*arguments)
                self.look_at(exact=operation == "step" and self.player.is_agreed)
            self.player.finish()
            self.look_at(exact=True)
        except RefusedError as error:
            self.is_refused = str(error)

    def look_at(self, *, exact: bool) -> None:
        states = [list(model.state_dict().values()) for model in self.player.models]
        self.seen.append([[tensor.detach().clone() for tensor in state] for state in states])
        self.exact.append(exact)

    def step(self, number, sizes) -> None:
        batches = [batch_of(number, rank, size) for rank, size in enumerate(sizes)]
        self.player.step([(x, count_of(x)) for x in batches], loss_of)

    @torch.no_grad()
    def look(self, number) -> None:
        for rank, model in enumerate(self.player.models):
            model(batch_of(number, 60 + rank, 3))

    def evaluate(self) -> None:
        self.player.evaluate(lambda: self.look_at(exact=True))

    def end_epoch(self) -> None:
        self.player.end_epoch()

    def ranks_of(self, node):
        return range(self.run.ranks) if node is None else self.nodes[node]

    def load(self, number, node) -> None:
        self.player.load(weights_of(self.run, number), self.ranks_of(node))

    def load_part(self, number) -> None:
        self.player.load(part_of(self.run, number), range(self.run.ranks))

    def swap(self, number) -> None:
        pass

    def write(self, number, node) -> None:
        for rank in self.ranks_of(node):
            write(self.run, self.player.models[rank], number)

    def nudge(self, number, node) -> None:
        for rank in self.nodes[node]:
            nudge(self.player.models[rank], number)

    def scale(self, factor) -> None:
        for model in self.player.models:
            scale(model, factor)

    def accept(self) -> None:
        self.player.accept()

    def rate(self, factor) -> None:
        for optimizer in self.player.optimizers:
            scale_rate(optimizer, factor)

    def load_optimizer(self, factor) -> None:
        self.player.load_optimizer(lambda optimizer: scale_state(optimizer, factor))

    def finish(self) -> None:
        self.player.finish()

    def restart(self, codec) -> None:
        self.player.restart(codec)


def judge(run: Run) -> str:
    """Returns how a run ended: 'equal', 'refused', or what is wrong."""
    referee = _Referee(run)
    referee.play()
    try:
        found = run_ranks(run.ranks, lambda party: _Trainer(run, party).play(), limit_s=90.0)
    except RankError as error:
        if not all(isinstance(one, EvenlyError) for one in error.errors):
            return f"wrong: not a typed error on all ranks: {error.errors}"
        return "refused" if referee.is_refused else f"wrong: refused: {error}"
    if referee.is_refused:
        return f"wrong: taken, though {referee.is_refused}"
    return _compare(found, referee) or "equal"


def _compare(found, referee: _Referee) -> str:
    names = list(referee.player.models[0].state_dict())
    for place, (row, exact) in enumerate(zip(referee.seen, referee.exact, strict=True)):
        for rank, theirs in enumerate(row):
            for name, a, b in zip(names, found[rank][place], theirs, strict=True):
                if not torch.allclose(a.double(), b.double(), rtol=1e-9, atol=1e-9):
                    return f"wrong: rank {rank}, look {place}, {name}: {(a - b).abs().max():g}"
                is_own = referee.player.policies.get(name) == "keep"
                if exact and not is_own and not torch.equal(a, found[0][place][names.index(name)]):
                    return f"wrong: ranks 0 and {rank} differ in last bits, look {place}, {name}"
    return ""
