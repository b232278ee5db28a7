"""Random runs with any form of exchange: codecs, fragments, overlap, outer optimizers, policies, loads, checkpoints.

What every rank holds after every operation must be what a single process that plays all ranks has, to rounding, and to
the last bit the same on all ranks where nodes have just agreed; what cannot be agreed on must end in a typed error on
all ranks.
"""

from collections.abc import Callable, Sequence

import torch

from evenly.errors import EvenlyError
from evenly.nodes import join_nodes
from tests.exchange.exchange_player import Player, RefusedError
from tests.exchange.exchange_programs import RandomRun, loss_of, nudge, part_of, scale, scale_state, weights_of
from tests.nodes.random_runs import RandomTrainer, batch_of, count_of, make_network, make_optimizer, scale_rate
from tests.ranks import RankError, cluster_of, ragged, run_ranks


class Trainer(RandomTrainer):
    """One rank that trains with the library."""

    state_placement = None  # of networks cut over ranks: how state of the optimizer is cut

    def __init__(self, run: RandomRun, rank_group) -> None:
        self.run, self.rank_group, self.place = run, rank_group, rank_group.rank
        self.nodes = self.ranks = ragged(*run.sizes)
        self.model = make_network(run.network, seed=self.place)  # all begin with that of rank 0
        self.begin()

    def begin(self) -> None:
        """Joins the others with the model."""
        self.network, self.optimizer_name = self.run.network, self.run.optimizer
        self.optimizer = make_optimizer(self.optimizer_name, self.model)
        self.seen, self.exchange = [], self.run.exchange
        self.join()

    def join(self) -> None:
        self.synchronized = join_nodes(
            self.model,
            self.optimizer,
            rank_group=self.rank_group.scoped(f"run{self.restarts}"),
            cluster=cluster_of(self.ranks),
            period=self.run.period,
            exchange=self.exchange,
            count=count_of,
            state_placement=self.state_placement,
        )

    def play(self) -> list[list[torch.Tensor]]:
        try:
            for operation, *arguments in self.run.operations:
                getattr(self, operation.replace(" ", "_"))(*arguments)
                self.look_at()
            self.synchronized.finish()
            self.look_at()
        finally:
            self.close()
        return self.seen

    def close(self) -> None:
        self.synchronized.close()

    def look_at(self) -> None:
        self.seen.append(self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in self.model.state_dict().values()]

    def step(self, number, sizes) -> None:
        loss_of(self.synchronized(batch_of(self.run.network, number, self.place, sizes[self.place]))).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def look(self, number) -> None:
        """A forward without a step: in training it changes buffers."""
        with torch.no_grad():
            self.synchronized(batch_of(self.run.network, number, 60 + self.place, 3))

    def evaluate(self) -> None:
        with self.synchronized.agreed():
            self.look_at()

    def end_epoch(self) -> None:
        self.synchronized.end_epoch()

    def load(self, number, node) -> None:
        if node is None or self.place in self.nodes[node]:
            self.put(weights_of(self.run, number))

    def put(self, state) -> None:
        self.model.load_state_dict(state, strict=False)

    def load_part(self, number) -> None:
        self.put(part_of(self.run, number))

    def swap(self, number) -> None:
        own = dict(zip(weights_of(self.run, number), self.tensors(), strict=True))
        self.put(weights_of(self.run, number))
        self.put(own)

    def write(self, number, node) -> None:
        if node is None or self.place in self.nodes[node]:
            self.copy_by_hand(weights_of(self.run, number))

    @torch.no_grad()
    def copy_by_hand(self, weights) -> None:
        for name, tensor in self.model.state_dict().items():
            tensor.copy_(weights[name])

    def nudge(self, number, node) -> None:
        if self.place in self.nodes[node]:
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
        if codec is not None:
            self.exchange = self.exchange.model_copy(update={"codec": codec})
        self.start_again()


class Referee:
    """All ranks of a run, played in turn by one process; `exact` tells where ranks must be equal to the last bit."""

    def __init__(self, run: RandomRun, parts=None) -> None:
        self.run, self.nodes = run, ragged(*run.sizes)
        settings = {"period": run.period, "settings": run.exchange, "rows": run.network != "cut", "parts": parts}
        self.player = Player(
            make_network(run.network), lambda model: make_optimizer(run.optimizer, model), self.nodes, **settings
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
        batches = [batch_of(self.run.network, number, rank, size) for rank, size in enumerate(sizes)]
        self.player.step([(x, count_of(x)) for x in batches], loss_of)

    @torch.no_grad()
    def look(self, number) -> None:
        for rank, model in enumerate(self.player.models):
            model(batch_of(self.run.network, number, 60 + rank, 3))

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
        weights = weights_of(self.run, number)

        def copy_by_hand(model) -> None:
            for name, tensor in model.state_dict().items():
                tensor.copy_(weights[name])

        self.player.write(copy_by_hand, self.ranks_of(node))

    def nudge(self, number, node) -> None:
        self.player.write(lambda model: nudge(model, number), self.nodes[node])

    def scale(self, factor) -> None:
        self.player.write(lambda model: scale(model, factor), range(self.run.ranks))

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


def judge(run: RandomRun) -> str:
    """Returns how a run ended: 'equal', 'refused', or what is wrong."""
    return verdict(run, lambda: run_ranks(run.ranks, lambda rank_group: Trainer(run, rank_group).play(), limit_s=90.0))


def verdict(run: RandomRun, train: Callable[[], list], *, places: Sequence[int] | None = None, parts=None) -> str:
    """Returns how a run ended that `train` makes; of cut networks `places` are the replicas of the ranks."""
    referee = Referee(run, parts)
    referee.play()
    try:
        found = train()
    except RankError as error:
        if not all(isinstance(one, EvenlyError) for one in error.errors):
            return f"wrong: not a typed error on all ranks: {error.errors}"
        return "refused" if referee.is_refused else f"wrong: refused: {error}"
    if referee.is_refused:
        return f"wrong: taken, though {referee.is_refused}"
    return _compare(found, referee, places or range(run.ranks)) or "equal"


def _compare(found, referee: Referee, places: Sequence[int]) -> str:
    names = list(referee.player.models[0].state_dict())
    for look, (row, exact) in enumerate(zip(referee.seen, referee.exact, strict=True)):
        for rank, place in enumerate(places):
            for number, (name, ours, theirs) in enumerate(zip(names, found[rank][look], row[place], strict=True)):
                if not torch.allclose(ours.double(), theirs.double(), rtol=1e-9, atol=1e-9):
                    return f"wrong: rank {rank}, look {look}, {name}: {(ours - theirs).abs().max():g}"
                is_own = referee.player.policies.get(name) == "keep"
                if exact and not is_own and not torch.equal(ours, found[0][look][number]):
                    return f"wrong: ranks 0 and {rank} differ in last bits, look {look}, {name}"
    return ""
