"""Random training loops, and a single process that plays all ranks of them in turn.

A program is a list of operations, the same on every rank but for batches. What it does must be what the player does,
to rounding; programs with something that cannot be averaged must end in a typed error on all ranks.
"""

import copy
import random
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from evenly.errors import EvenlyError
from evenly.nodes import join_nodes
from evenly.spec import Exchange, period_of
from tests.nodes.random_runs import (
    BORROWED,
    Penalized,
    RandomTrainer,
    batch_of,
    count_of,
    make_network,
    make_optimizer,
    scale_rate,
    weights_of_samples,
)
from tests.ranks import RankError, cluster_of, ragged, run_ranks

WRONG = ("plain", "layer", "by hand", "one loads", "one rate", "freeze", "add group", "step again")


@dataclass
class Program:
    """One random loop."""

    seed: int
    sizes: tuple[int, ...]
    every: int | str
    overlap: int
    network: str
    optimizer: str
    operations: list[tuple] = field(default_factory=list)
    wrong: str = ""

    @property
    def ranks(self) -> int:
        return sum(self.sizes)


def make(seed: int) -> Program:
    """Returns the program of a seed."""
    rng = random.Random(seed)
    sizes = rng.choice([(2,), (1, 1), (2, 1), (3, 1), (2, 2)])
    every = rng.choice([1, 2, 3, "global", "epoch"])
    network = rng.choice(["plain", "norm", "penalty"])
    overlap = rng.choice(range(every)) if isinstance(every, int) and network != "norm" and len(sizes) > 1 else 0
    optimizer = rng.choice(["sgd", "momentum", "adam"])
    program = Program(seed, sizes, every, overlap, network, optimizer)
    for number in range(rng.randint(4, 8)):
        _add_step(program, rng, number)
    if rng.random() < 0.3:
        program.wrong = rng.choice(WRONG)
        _add_wrong(program, rng)
    return program


def _add_step(program: Program, rng: random.Random, number: int) -> None:
    operations, ids = program.operations, iter(range(100 * number, 100 * number + 100))
    if rng.random() < 0.2:
        operations.append(("look", next(ids), _batches(program, rng)))
    if program.overlap == 0 and rng.random() < 0.2:
        operations.append(("evaluate",))
    if rng.random() < 0.1:
        operations.append(("rate", rng.choice([0.5, 2.0])))
    if rng.random() < 0.15:
        operations.append(("restart",))
    for _ in range(rng.choice([0, 0, 1, 2])):  # accumulated
        forward = next(ids)
        operations.append(("forward", forward, _batches(program, rng), True, "model"))
        operations.append(("backward", (forward,)))
        if rng.random() < 0.15:
            operations.append(("clear", rng.random() < 0.5))
    forwards = [next(ids) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    for forward in forwards:
        operations.append(("forward", forward, _batches(program, rng), False, "model"))
        if rng.random() < 0.1:
            operations.append(("forward", next(ids), _batches(program, rng), False, "model"))  # never used
    shape = rng.choice(["each", "all", "twice", "turned"])
    rounds = {
        "each": [(f,) for f in forwards],
        "all": [tuple(forwards)],
        "twice": [(f,) for f in forwards for _ in range(2)],
        "turned": [(f,) for f in reversed(forwards)],
    }[shape]
    for backward in rounds:
        operations.append(("backward", backward))
        if rng.random() < 0.05:
            operations.append(("clear", rng.random() < 0.5))
            operations.append(("backward", backward))
    if rng.random() < 0.2:
        operations.append(("clip", rng.choice([0.01, 0.5])))
    skipped = rng.random() < 0.1
    if not skipped:
        operations.append(("step",))
    if skipped or rng.random() < 0.85:
        operations.append(("clear", rng.random() < 0.7))
    if rng.random() < 0.15:
        operations.append(("end_epoch",))


def _add_wrong(program: Program, rng: random.Random) -> None:
    """Puts in something that ranks cannot agree on, before a step."""
    steps = [place for place, operation in enumerate(program.operations) if operation[0] == "step"]
    if not steps:
        return
    place, forward = rng.choice(steps), 9000
    batches = _batches(program, rng)
    match program.wrong:
        case "plain" | "layer":
            added = [("forward", forward, batches, False, program.wrong), ("backward", (forward,))]
        case "by hand":
            added = [("clear", True), ("by hand", forward, batches)]
        case "step again":
            added = [("step",)]
        case _:
            added = [(program.wrong,)]
    program.operations[place:place] = added


def _batches(program: Program, rng: random.Random) -> tuple[int, ...]:
    """Returns the samples of each rank; a borrowed batch counts none."""
    chance = 0.01 if program.network == "penalty" else 0.1
    return tuple(BORROWED if rng.random() < chance else rng.choice([2, 3, 4]) for _ in range(program.ranks))


def first_layer(model: nn.Module) -> nn.Module:
    """Returns a layer that can be called by itself."""
    return model.body[0] if isinstance(model, Penalized) else model[0]


def loss_of(model: nn.Module, output) -> torch.Tensor:
    """Returns the loss of an output."""
    if isinstance(output, dict):
        return output["output"].square().mean() * model.scale.square()
    return output.square().mean()


def run(program: Program) -> list[list[list[torch.Tensor]]]:
    """Returns what each rank saw: its tensors after every step, in every evaluation, and at the end."""
    return run_ranks(program.ranks, lambda rank_group: _Trainer(program, rank_group).play(), limit_s=90.0)


class _Trainer(RandomTrainer):
    """One rank that trains with the library."""

    def __init__(self, program: Program, rank_group) -> None:
        self.program, self.rank_group, self.rank = program, rank_group, rank_group.rank
        self.network, self.optimizer_name = program.network, program.optimizer
        self.model = make_network(program.network, seed=self.rank)  # all begin with that of rank 0
        self.optimizer = make_optimizer(program.optimizer, self.model)
        self.seen, self.losses = [], {}
        self.join()

    def join(self) -> None:
        program = self.program
        self.synchronized = join_nodes(
            self.model,
            self.optimizer,
            rank_group=self.rank_group.scoped(f"run{self.restarts}"),
            cluster=cluster_of(ragged(*program.sizes)),
            period=period_of(program.every),
            exchange=Exchange(overlap=program.overlap, timeout_s=30.0),
            count=count_of,
        )

    def play(self) -> list[list[torch.Tensor]]:
        try:
            for operation, *arguments in self.program.operations:
                getattr(self, operation.replace(" ", "_"))(*arguments)
            self.synchronized.finish()
            self.look_at()
        finally:
            self.synchronized.close()
        return self.seen

    def look_at(self) -> None:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        self.seen.append([tensor.detach().clone() for tensor in tensors])

    def batch(self, number, batches) -> torch.Tensor:
        return batch_of(self.network, number, self.rank, batches[self.rank])

    def forward(self, number, batches, paused, how) -> None:
        x = self.batch(number, batches)
        with self.synchronized.no_sync() if paused else nullcontext():
            if how == "layer":
                self.losses[number] = first_layer(self.model)(x).square().mean()
            else:
                network = self.synchronized if how == "model" else self.model
                self.losses[number] = loss_of(self.model, network(x))

    def backward(self, numbers) -> None:
        sum(self.losses[number] for number in numbers).backward(retain_graph=True)

    def by_hand(self, number, batches) -> None:
        loss = loss_of(self.model, self.synchronized(self.batch(number, batches)))
        parameters = list(self.model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient

    def look(self, number, batches) -> None:
        with torch.no_grad():
            self.synchronized.eval()
            self.synchronized(self.batch(number, batches))
            self.synchronized.train()

    def clear(self, to_none) -> None:
        self.optimizer.zero_grad(set_to_none=to_none)

    def clip(self, norm) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def step(self) -> None:
        self.optimizer.step()
        self.look_at()

    def evaluate(self) -> None:
        with self.synchronized.agreed():
            self.look_at()

    def end_epoch(self) -> None:
        self.synchronized.end_epoch()

    def rate(self, factor) -> None:
        scale_rate(self.optimizer, factor)

    def one_rate(self) -> None:
        if self.rank == 0:
            self.rate(3.0)

    def one_loads(self) -> None:
        if self.rank == 0:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.add_(1.0)

    def freeze(self) -> None:
        next(self.model.parameters()).requires_grad_(False)

    def add_group(self) -> None:
        self.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.float64))]})

    def restart(self) -> None:
        """Goes on in a new object from what a checkpoint holds, with gradients and open losses gone."""
        if all(parameter.grad is None for parameter in self.model.parameters()):
            self.start_again()
            self.losses = {}


class Player:
    """All ranks of a program, played in turn by one process without communication."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.nodes = ragged(*program.sizes)
        self.is_global = program.every == "global"
        self.groups = [list(range(program.ranks))] if self.is_global else self.nodes
        model = make_network(program.network)
        self.models = [copy.deepcopy(model) for _ in range(program.ranks)]
        self.optimizers = [make_optimizer(program.optimizer, m) for m in self.models]
        self.seen = [[] for _ in self.models]
        self.samples = [0.0] * program.ranks  # since the last exchange
        self.steps = self.since = 0
        self.pending = []  # exchanges to be merged: step, changes by rank
        self.is_poisoned = self.is_frozen = False
        self.is_doubtful = False  # a parameter was frozen between a forward and its step, or its gradient set to zero
        self.forget()
        self.losses, self.counted = {}, set()
        self.before_freezing = set()  # forwards
        self.foreign, self.is_local, self.has_averaged = False, False, False

    def forget(self) -> None:
        self.averaged = [None] * len(self.models)  # gradients that are the same in a group
        self.local = [None] * len(self.models)
        self.local_samples = [0.0] * len(self.models)
        self.behind = [0.0] * len(self.models)  # samples behind what was averaged since the last step

    def play(self) -> list[list[list[torch.Tensor]]]:
        for operation, *arguments in self.program.operations:
            getattr(self, operation.replace(" ", "_"))(*arguments)
        self.finish()
        self.look_at()
        return self.seen

    def look_at(self) -> None:
        for seen, model in zip(self.seen, self.models, strict=True):
            seen.append([tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())])

    def forward(self, number, batches, paused, how) -> None:
        losses = []
        for rank, model in enumerate(self.models):
            x = batch_of(self.program.network, number, rank, batches[rank])
            losses.append(first_layer(model)(x).square().mean() if how == "layer" else loss_of(model, model(x)))
        self.losses[number] = (losses, [count_of(torch.empty(size, 0)) for size in batches], paused, how)

    def backward(self, numbers) -> None:
        found = [self.losses[number] for number in numbers]
        if any(how != "model" for *_, how in found):
            self.foreign = True
            return
        self.is_doubtful |= any(number in self.before_freezing for number in numbers)
        averages = any(not paused for _, _, paused, _ in found)
        fresh = [number for number in numbers if number not in self.counted]
        self.counted |= set(fresh)
        if (
            self.program.network == "penalty"
            and not self.is_frozen
            and any(  # it freezes the parameter of the penalty
                not all(counts[rank] for _, counts, *_ in found)
                and (
                    any(counts[rank] for _, counts, *_ in found)
                    or any(
                        g and any(t is not None and bool(t.any()) for t in g)
                        for g in (self.local[rank], self.averaged[rank])
                    )
                )
                for rank in range(len(self.models))
            )
        ):
            self.is_poisoned = True  # what the loss adds to its own parameter cannot be taken back
        totals, new = [], []
        for rank, model in enumerate(self.models):
            gradient = self._gradient(model, [losses[rank] for losses, counts, *_ in found if counts[rank]])
            local = self.local[rank]
            gradient = gradient if local is None else list(map(added_up, local, gradient))
            new.append(gradient)
            totals.append(self.local_samples[rank] + sum(counts[rank] for _, counts, *_ in found))
        added = [sum(self.losses[number][1][rank] for number in fresh) for rank in range(len(self.models))]
        if not averages:
            self.local = new
            self.local_samples = [a + b for a, b in zip(self.local_samples, added, strict=True)]
            self.is_local = True
            return
        for ranks in self.groups:
            weight = sum(totals[rank] for rank in ranks)
            shares = [totals[rank] / weight if weight else 1 / len(ranks) for rank in ranks]
            mean = [
                None
                if gradients[0] is None
                else sum(share * gradient for share, gradient in zip(shares, gradients, strict=True))
                for gradients in zip(*(new[rank] for rank in ranks), strict=True)
            ]
            for rank in ranks:
                before = self.averaged[rank]
                self.averaged[rank] = mean if before is None else list(map(added_up, before, mean))
        self.behind = [sum(three) for three in zip(self.behind, added, self.local_samples, strict=True)]
        self.local, self.local_samples = [None] * len(self.models), [0.0] * len(self.models)
        self.is_local, self.has_averaged = False, True

    @staticmethod
    def _gradient(model, losses) -> list[torch.Tensor]:
        parameters = list(model.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        found = [torch.zeros_like(parameter) for parameter in trained]
        if losses:
            gradients = torch.autograd.grad(sum(losses), trained, retain_graph=True, allow_unused=True)
            found = [zeros if g is None else g for zeros, g in zip(found, gradients, strict=True)]
        of_trained = iter(found)
        return [next(of_trained) if parameter.requires_grad else None for parameter in parameters]

    def by_hand(self, number, batches) -> None:
        for rank, model in enumerate(self.models):
            model(batch_of(self.program.network, number, rank, batches[rank]))
        self.is_poisoned = True

    def look(self, number, batches) -> None:
        pass

    def clear(self, to_none) -> None:
        self.forget()
        self.foreign = self.is_local = self.has_averaged = False
        self.is_doubtful |= self.is_frozen and not to_none

    def clip(self, norm) -> None:
        for rank, gradients in enumerate(self.averaged):
            if gradients is not None:
                length = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in gradients if g is not None]))
                factor = (norm / (length + 1e-6)).clamp(max=1.0)
                self.averaged[rank] = [None if gradient is None else factor * gradient for gradient in gradients]

    def step(self) -> None:
        has_gradients = self.averaged[0] is not None
        if self.foreign or self.is_local or (has_gradients and not self.has_averaged):
            self.is_poisoned = True
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            gradients = self.averaged[rank] or [None] * len(list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.clone()
            optimizer.step()
            self.samples[rank] += self.behind[rank]
        self.behind = [0.0] * len(self.models)
        self.foreign = self.is_local = self.has_averaged = False
        self.steps += 1
        self.since += 1
        self._merge()
        if isinstance(self.program.every, int) and self.steps % self.program.every == 0:
            self.exchange()
        self.look_at()

    def _merge(self, *, at_once: bool = False) -> None:
        due = [entry for entry in self.pending if at_once or entry[0] <= self.steps]
        self.pending = [entry for entry in self.pending if entry not in due]
        with torch.no_grad():
            for _, changes in due:
                for model, change in zip(self.models, changes, strict=True):
                    for parameter, difference in zip(model.parameters(), change, strict=True):
                        parameter.add_(difference)

    @torch.no_grad()
    def exchange(self, *, overlap: int | None = None) -> None:
        overlap = self.program.overlap if overlap is None else overlap
        if overlap:
            self._merge(at_once=True)
        means = self._means()
        buffers = self._mean_buffers()
        changes = [[m - p for m, p in zip(means, model.parameters(), strict=True)] for model in self.models]
        if overlap:
            self.pending.append((self.steps + overlap, changes))
        else:
            self._put(means, buffers)
        self.samples, self.since = [0.0] * len(self.models), 0

    def _put(self, means, buffers) -> None:
        for model in self.models:
            for parameter, mean in zip(model.parameters(), means, strict=True):
                parameter.copy_(mean)
            for buffer, mean in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(mean)

    def _means(self) -> list[torch.Tensor]:
        nodes, _ = weights_of_samples(self.nodes, self.samples)
        leaders = [list(self.models[ranks[0]].parameters()) for ranks in self.nodes]
        return [sum(w * p for w, p in zip(nodes, of, strict=True)) for of in zip(*leaders, strict=True)]

    def _mean_buffers(self) -> list[torch.Tensor]:
        _, ranks = weights_of_samples(self.nodes, self.samples)
        found = []
        for buffers in zip(*(list(model.buffers()) for model in self.models), strict=True):
            if buffers[0].is_floating_point():
                found.append(sum(w * b for w, b in zip(ranks, buffers, strict=True)))
            else:
                found.append(torch.stack(buffers).amax(0))
        return found

    @torch.no_grad()
    def evaluate(self) -> None:
        kept = [copy.deepcopy(model.state_dict()) for model in self.models]
        self._average_rest() if not self.since else self._put(self._means(), self._mean_buffers())
        self.look_at()
        for model, state in zip(self.models, kept, strict=True):
            model.load_state_dict(state)

    def end_epoch(self) -> None:
        if self.program.every in ("global", "epoch") and self.since:
            self.exchange()

    def finish(self) -> None:
        with torch.no_grad():
            landed = bool(self.pending)
            self._merge(at_once=True)
            if self.since:
                self.exchange(overlap=0)
            elif landed:
                self._put(self._means(), self._mean_buffers())
            else:
                self._average_rest()

    def _average_rest(self) -> None:
        """Averages buffers that forwards without a step have changed; all ranks count alike."""
        kept, self.samples = self.samples, [1.0] * len(self.models)
        buffers, self.samples = self._mean_buffers(), kept
        for model in self.models:
            for buffer, mean in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(mean)

    def rate(self, factor) -> None:
        for optimizer in self.optimizers:
            scale_rate(optimizer, factor)

    def _poison(self) -> None:
        self.is_poisoned = True

    add_group = _poison

    def freeze(self) -> None:
        self.is_frozen = True
        self.before_freezing |= set(self.losses)
        self.is_doubtful |= any(gradients is not None for gradients in self.local)
        for model in self.models:
            next(model.parameters()).requires_grad_(False)

    @property
    def is_first_alone(self) -> bool:
        """Whether rank 0 shares no gradients, so that it may differ from the others until an exchange."""
        return len(self.groups[0]) == 1

    def one_rate(self) -> None:
        self.is_poisoned |= not self.is_first_alone
        scale_rate(self.optimizers[0], 3.0)

    @torch.no_grad()
    def one_loads(self) -> None:
        self.is_poisoned |= not self.is_first_alone
        for parameter in self.models[0].parameters():
            parameter.add_(1.0)

    def restart(self) -> None:
        if all(gradients is None for gradients in (*self.averaged, *self.local)):
            self.losses = {}


def added_up(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the sum of two gradients, of which that of a frozen parameter is None."""
    return one if other is None else other if one is None else one + other


def judge(program: Program) -> str:
    """Returns how a program ended: 'equal', 'refused', or what is wrong."""
    player = Player(program)
    expected = player.play()
    try:
        found = run(program)
    except RankError as error:
        if not all(isinstance(one, EvenlyError) for one in error.errors):
            return f"wrong: not a typed error on all ranks: {error.errors}"
        return "refused" if player.is_poisoned or player.is_doubtful else f"wrong: refused: {error}"
    if player.is_doubtful:
        return "equal"
    if player.is_poisoned:
        return "wrong: what cannot be averaged was taken"
    for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            for number, (a, b) in enumerate(zip(one, other, strict=True)):
                if not torch.allclose(a.double(), b.double(), rtol=1e-9, atol=1e-9):
                    return f"wrong: rank {rank}, look {place}, tensor {number}: {(a - b).abs().max():g}"
    return "equal"
