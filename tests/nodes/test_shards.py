"""Node-based training of networks cut over ranks equals the single-process reference with whole ones, in float64."""

import copy
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import nn

from evenly.comm import local_shard_of
from evenly.errors import LockstepError, MismatchError, NonFiniteError, PeerError, SpecError
from evenly.graph import trace_module
from evenly.layouts import lay_out
from evenly.nodes import join_nodes
from evenly.shards import Adafactor, join_shards
from evenly.shards.optim.optimizers import state_placement
from evenly.spec import Exchange, Outer, period_of
from tests.exchange.overlapped import Overlapped
from tests.nodes.test_exactness import OPTIMIZERS, SEEDING, batches
from tests.ranks import RankError, cluster_of, run_ranks
from tests.reference import Reference

MODELS = {  # the shares of each replica of each node; None is a rank with the whole network
    "3|2": [[[70, 25, 5]], [[1, 2]]],
    "2+2": [[[1, 1], [1, 1]]],
    "3+2": [[[70, 25, 5], [1, 2]]],
    "2+2|3": [[[1, 1], [3, 1]], [[2, 3, 4]]],
    "2|whole": [[[1, 2]], [None]],
    "left out|2": [[[2, 0, 1]], [[1, 1]]],
    "2+1|2|1+2": [[[1, 2], [1]], [[3, 1]], [None, [1, 1]]],
}


@pytest.fixture(autouse=True)
def _one_thread_for_each_rank():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def network(seed: int = 0) -> nn.Module:
    with SEEDING:
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 5, 3, padding=1, bias=False),
            nn.BatchNorm2d(5),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(5 * 16, 7),
            nn.Tanh(),
            nn.Linear(7, 3),
        ).double()


@cache
def followed(build, seed):
    """Returns a traced network; replicas and tests take copies of it."""
    return trace_module(build(seed), torch.zeros(4, 2, 4, 4).double())


@dataclass
class World:
    """Replicas dealt out over ranks 0, 1, ... in order: their ranks, nodes, shares and traced networks."""

    shares: list
    build: object = network

    def __post_init__(self):
        flat = [shares for node in self.shares for shares in node]
        ranks = iter(range(sum(len(shares or [1]) for shares in flat)))
        self.replicas = [[next(ranks) for _ in shares or [1]] for shares in flat]
        numbers = iter(range(len(flat)))
        self.nodes_of_replicas = [[next(numbers) for _ in node] for node in self.shares]
        self.nodes = [[r for k in node for r in self.replicas[k]] for node in self.nodes_of_replicas]
        self.size = sum(map(len, self.nodes))
        self.flat = flat
        self.traced = [followed(self.build, seed) for seed in range(len(flat))]

    def replica_of(self, rank):
        return next(k for k, ranks in enumerate(self.replicas) if rank in ranks)

    @contextmanager
    def module(self, rank_group):
        number = self.replica_of(rank_group.rank)
        traced, shares = self.traced[number], self.flat[number]
        if shares is None:
            yield copy.deepcopy(traced.model)
            return
        layout = lay_out(traced.graph, [float(share) for share in shares])
        sharded = join_shards(
            traced, layout, rank_group=rank_group.among(self.replicas[number], f"replica{number}"), timeout_s=30
        )
        try:
            yield sharded
        finally:
            sharded.close()
            sharded.shard_group.group = sharded._all_ranks_group.group = (
                None  # now, in this thread: a rank may wait there for another
            )

    @contextmanager
    def joined(self, rank_group, make_optimizer, every=2, **settings):
        with self.module(rank_group) as module:
            optimizer = make_optimizer(module)
            synchronized = join_nodes(
                module,
                optimizer,
                rank_group=rank_group,
                cluster=cluster_of(self.nodes),
                period=period_of(every),
                exchange=Exchange(**{"timeout_s": 30.0, **settings}),
                state_placement=state_placement,
            )
            try:
                yield synchronized, optimizer
            finally:
                synchronized.close()


def tensors(module):
    return [*module.parameters(), *module.buffers()]


def full_state(module, *, has_share=True):
    """Returns all parameters and buffers in full; the ranks of a replica meet here."""
    found = [(t, local_shard_of(t)) for t in tensors(module)]
    if not has_share:
        return None
    return [t.detach().clone() if p is None else p.full(t).clone() for t, p in found]


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.05)


def step(synchronized, optimizer, x, y):
    optimizer.zero_grad()
    nn.functional.cross_entropy(synchronized(x), y).backward()
    optimizer.step()


def train(rank_group, world, make_optimizer, every, data, settings):
    number = world.replica_of(rank_group.rank)
    has_share = not world.flat[number] or world.flat[number][world.replicas[number].index(rank_group.rank)] > 0
    sent = []
    with world.joined(rank_group, make_optimizer, every, **settings) as (synchronized, optimizer):
        synchronized.on_exchange.append(lambda done: sent.append(done.sent_bytes))
        trace = [full_state(synchronized.module, has_share=has_share)]
        for row in data:
            step(synchronized, optimizer, *row[number])
            trace.append(full_state(synchronized.module, has_share=has_share))
        synchronized.finish()
        trace.append(full_state(synchronized.module, has_share=has_share))
        local = {
            name: t.detach().clone()
            for name, t in synchronized.module.named_parameters()
            if (p := local_shard_of(t)) is None or not p.is_cut
        }
    return trace, local, sent


def expected(world, make_optimizer, every, data, *, average_state=False):
    reference = Reference(network(), make_optimizer, world.nodes_of_replicas, average_state=average_state)
    states = lambda: [[t.detach().clone() for t in tensors(r)] for r in reference.replicas]  # noqa: E731
    trace = [states()]
    for number, row in enumerate(data, start=1):
        reference.step(row, nn.functional.cross_entropy)
        if number % every == 0:
            reference.exchange()
        trace.append(states())
    if len(data) % every:
        reference.exchange()
    return [*trace, states()]


def compare(world, results, reference, tolerance=1e-10):
    for moment, row in enumerate(reference):
        for number, wanted in enumerate(row):
            for rank in world.replicas[number]:
                got = results[rank][0][moment]
                for a, b in zip(got or wanted, wanted, strict=True):
                    note = f"moment {moment} rank {rank}: "
                    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * 1e-2, msg=note.__add__)
    for ranks, shares in zip(world.replicas, world.flat, strict=True):
        holders = [rank for rank, share in zip(ranks, shares or [1], strict=True) if share]
        for rank in holders:
            for name, tensor in results[rank][1].items():
                assert torch.equal(tensor, results[holders[0]][1][name]), name


def check(shape, optimizer, every, steps=5, average_state=False):
    world = World(MODELS[shape])
    data = batches(len(world.flat), steps)
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    settings = {"optimizer_state": "average"} if average_state else {}
    results = run_ranks(world.size, train, world, make, every, data, settings)
    compare(world, results, expected(world, make, every, data, average_state=average_state))
    return world, results


@pytest.mark.parametrize(("optimizer", "every"), [("momentum", 1), ("momentum", 2), ("adam", 2), ("adam", 5)])
def test_two_nodes_with_different_splits(optimizer, every):
    world, results = check("3|2", optimizer, every)
    assert len(results[0][1]) > 0  # some parameters are on all ranks
    model = network()
    floats = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    once = sum(tensor.nbytes for tensor in floats)
    for ranks in world.nodes:
        for sent in zip(*(results[rank][2] for rank in ranks), strict=True):
            assert sum(sent) == once


@pytest.mark.parametrize(
    ("shape", "optimizer", "every"),
    [("2+2", "adam", 2), ("3+2", "momentum", 2), ("2+2|3", "momentum", 1), ("2+2|3", "adam", 5)],
)
def test_several_replicas_in_a_node(shape, optimizer, every):
    check(shape, optimizer, every)


@pytest.mark.parametrize("shape", ["2|whole", "left out|2", "2+1|2|1+2"])
def test_whole_networks_ranks_without_a_share_and_three_nodes(shape):
    world, results = check(shape, "momentum", 2)
    sent = [sum(results[rank][2][0] for rank in ranks) for ranks in world.nodes]
    assert max(sent) - min(sent) < 10 * len(world.nodes)  # the same from every node, up to rounding by rank


def test_optimizer_state_is_averaged_in_global_coordinates():
    check("2+2|3", "adam", 2, steps=4, average_state=True)


@pytest.mark.parametrize(
    "exchange",
    [
        Exchange(overlap=1),
        Exchange(overlap=2, fragments=2, optimizer_state="average"),
        Exchange(outer=Outer(), overlap=1, optimizer_state={"exp_avg": "reset"}),
    ],
)
@pytest.mark.parametrize("shape", ["3|2", "2+2|3", "2|whole"])
def test_exchanges_of_cut_networks_beside_the_training(shape, exchange):
    world, make, period = World(MODELS[shape]), OPTIMIZERS["adam"], period_of(2)
    data = batches(len(world.flat), 6)
    results = run_ranks(world.size, train, world, make, 2, data, exchange.model_dump())
    reference = Overlapped(network(), make, world.nodes_of_replicas, period, exchange, rows=False)
    states = lambda: [[t.detach().clone() for t in tensors(r)] for r in reference.replicas]  # noqa: E731
    trace = [states()]
    for row in data:
        reference.train(row)
        trace.append(states())
    reference.finish()
    compare(world, results, [*trace, states()])


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_codes_of_cut_networks_end_in_the_same_values_everywhere(codec):
    world = World(MODELS["2+2|3"])
    data = batches(len(world.flat), 4)
    results = run_ranks(world.size, train, world, OPTIMIZERS["momentum"], 2, data, {"codec": codec})
    exact = expected(world, OPTIMIZERS["momentum"], 2, data)
    for trace, _, _ in results:
        for moment in (2, 4):
            for value, first, want in zip(trace[moment], results[0][0][moment], exact[moment][0], strict=True):
                assert torch.equal(value, first)
                torch.testing.assert_close(value, want, rtol=0.05, atol=0.05)


def test_state_that_is_not_cut_like_its_parameter_stays_local():
    world = World(MODELS["3|2"])

    def act(rank_group):
        with world.joined(rank_group, lambda m: Adafactor(m.parameters()), 1, optimizer_state="average") as (
            s,
            optimizer,
        ):
            step(s, optimizer, *data[0][world.replica_of(rank_group.rank)])
            return full_state(s.module)

    data = batches(2, 1)
    results = run_ranks(world.size, act)
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


def test_global_mode_averages_gradients_over_all_replicas():
    world, data = World(MODELS["2+2|3"]), batches(3, 3)
    results = run_ranks(world.size, train, world, OPTIMIZERS["momentum"], "global", data, {})
    reference = Reference(network(), OPTIMIZERS["momentum"], [[0, 1, 2]])
    for row in data:
        reference.step(row, nn.functional.cross_entropy)
    for result in results:
        for got, wanted in zip(result[0][-1], reference.replicas[0].parameters(), strict=False):
            torch.testing.assert_close(got, wanted.detach(), rtol=1e-10, atol=1e-12)


def test_gradients_accumulate_between_replicas():
    world, data = World(MODELS["2+2"]), batches(2, 2)

    def act(rank_group):
        number = world.replica_of(rank_group.rank)
        with world.joined(rank_group, sgd) as (synchronized, _):
            with synchronized.no_sync():
                nn.functional.cross_entropy(synchronized(data[0][number][0]), data[0][number][1]).backward()
            nn.functional.cross_entropy(synchronized(data[1][number][0]), data[1][number][1]).backward()
            return [local_shard_of(p).full(p.grad) for p in synchronized.module.parameters()]

    totals = []
    for number in range(2):
        plain = network()
        for row in data:
            nn.functional.cross_entropy(plain(row[number][0]), row[number][1]).backward()
        totals.append((sum(len(row[number][0]) for row in data), [p.grad for p in plain.parameters()]))
    samples = sum(count for count, _ in totals)
    for result in run_ranks(world.size, act):
        for place, got in enumerate(result):
            wanted = sum(count * gradients[place] for count, gradients in totals) / samples
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_evaluation_sees_the_average_and_gives_the_own_state_back():
    world, data = World(MODELS["3|2"]), batches(2, 3)

    def act(rank_group):
        with world.joined(rank_group, sgd, 100) as (synchronized, optimizer):
            for row in data:
                step(synchronized, optimizer, *row[world.replica_of(rank_group.rank)])
            before = full_state(synchronized.module)
            with synchronized.agreed():
                inside = full_state(synchronized.module)
            after = full_state(synchronized.module)
            return before, inside, after

    results = run_ranks(world.size, act)
    wanted = expected(world, sgd, 100, data)[-1][0]
    for before, inside, after in results:
        torch.testing.assert_close(inside, wanted, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(after, before, rtol=0, atol=0)


def failing(count, act, *args):
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(count, act, *args, limit_s=30.0)
    assert all(caught.value.errors), f"some rank did not notice: {caught.value.errors}"
    assert time.monotonic() - began < 20, "the ranks learned it too late"
    return caught.value.errors


def test_another_network_in_one_replica_is_named_before_the_first_step():
    def build(seed):
        model = network(seed)
        if seed == 1:
            model[7], model[9] = nn.Linear(5 * 16, 6).double(), nn.Linear(6, 3).double()
        return model

    world = World(MODELS["3|2"], build)

    def act(rank_group):
        with world.joined(rank_group, sgd):
            pass

    for error in failing(world.size, act):
        assert isinstance(error, MismatchError)
        assert "'7.weight': float64 [7, 80]" in str(error)
        assert "ranks [0, 1, 2]" in str(error)
        assert "ranks [3, 4]" in str(error)


def test_a_replica_across_nodes_is_refused():
    world = World(MODELS["3|2"])
    world.nodes = [[0, 1], [2, 3, 4]]

    def act(rank_group):
        with world.joined(rank_group, sgd):
            pass

    for error in failing(world.size, act):
        assert isinstance(error, SpecError)
        assert "[0, 1, 2]" in str(error)


@pytest.mark.parametrize("place", ["forward", "loop"])
def test_an_error_on_one_rank_reaches_all(place):
    world, data = World(MODELS["2+2|3"]), batches(3, 1)

    def act(rank_group):
        with world.joined(rank_group, sgd, 50) as (synchronized, optimizer):
            try:
                for _ in range(300):
                    x, y = data[0][world.replica_of(rank_group.rank)]
                    if rank_group.rank == 5 and synchronized.schedule.step == 2:
                        if place == "loop":
                            raise KeyError("a broken sample")
                        x = x[:, :1]
                    step(synchronized, optimizer, x, y)
                    time.sleep(0.02)
            except Exception as error:
                synchronized.report(error)
                raise

    errors = failing(world.size, act)
    for rank, error in enumerate(errors):
        if rank != 5:
            assert isinstance(error, PeerError if place == "loop" else SpecError)
            assert ("a broken sample" if place == "loop" else "an input is (2, 1, 4, 4), in the example it was") in str(
                error
            )


@pytest.mark.parametrize("shape", ["3|2", "2+2"])
def test_nan_in_one_part_stops_all(shape):
    world, data = World(MODELS[shape]), batches(2, 1)

    def act(rank_group):
        with world.joined(rank_group, sgd, 50) as (synchronized, optimizer):
            for number in range(1, 200):
                optimizer.zero_grad()
                x, y = data[0][world.replica_of(rank_group.rank)]
                loss = nn.functional.cross_entropy(synchronized(x), y)
                if number == 3 and rank_group.rank == 1:
                    first = next(p for p in synchronized.module.parameters() if p.numel())
                    first.register_hook(lambda g: g * float("nan"))
                loss.backward()
                optimizer.step()
                time.sleep(0.02)

    for error in failing(world.size, act):
        assert isinstance(error, NonFiniteError)
        assert "[1]" in str(error)
        assert "step 3" in str(error)


def test_nan_in_one_part_skips_the_step_on_the_whole_node():
    world, data = World(MODELS["2+2|3"]), batches(3, 4)

    def act(rank_group):
        with world.joined(rank_group, sgd, 50, nonfinite="skip") as (synchronized, optimizer):
            moved = []
            for number, row in enumerate(data):
                before = full_state(synchronized.module)[:1]
                hook = None
                if number == 2 and rank_group.rank == 1:
                    first = next(p for p in synchronized.module.parameters() if p.numel())
                    hook = first.register_hook(lambda g: g * float("inf"))
                step(synchronized, optimizer, *row[world.replica_of(rank_group.rank)])
                if hook is not None:
                    hook.remove()
                moved.append(not torch.equal(full_state(synchronized.module)[0], before[0]))
            synchronized.finish()
            return moved, full_state(synchronized.module), synchronized.schedule.step

    results = run_ranks(world.size, act)
    for rank, (moved, state, made) in enumerate(results):
        assert moved == [True, True, rank > 3, True]
        assert made == 4
        torch.testing.assert_close(state, results[0][1], rtol=0, atol=0)


@pytest.mark.parametrize("late", [0, 4])
def test_unequal_numbers_of_steps_are_told(late):
    world, data = World(MODELS["2+2|3"]), batches(3, 4)

    def act(rank_group):
        with world.joined(rank_group, sgd, 50) as (synchronized, optimizer):
            for row in data[: 3 if rank_group.rank == late else 4]:
                step(synchronized, optimizer, *row[world.replica_of(rank_group.rank)])
            synchronized.finish()

    for error in failing(world.size, act):
        assert isinstance(error, LockstepError)


def test_batches_of_unequal_sizes_in_one_replica_are_told():
    world, data = World(MODELS["2+2"]), batches(2, 1)

    def act(rank_group):
        with world.module(rank_group) as module:
            optimizer = sgd(module)
            synchronized = join_nodes(
                module,
                optimizer,
                rank_group=rank_group,
                cluster=cluster_of(world.nodes),
                period=period_of(2),
                count=lambda x: 7.0 if rank_group.rank == 1 else float(len(x)),
            )
            try:
                step(synchronized, optimizer, *data[0][world.replica_of(rank_group.rank)])
            finally:
                synchronized.close()

    for error in failing(world.size, act):
        assert isinstance(error, MismatchError)
        assert "rank 1: 7" in str(error)


def test_the_optimizer_of_the_uncut_network_is_refused():
    world = World(MODELS["3+2"])

    def act(rank_group):
        with world.joined(rank_group, lambda _: torch.optim.Adam(network().parameters())):
            pass

    with pytest.raises(RankError) as caught:
        run_ranks(5, act)
    told = str(caught.value.errors[0])
    assert "shapes [8, 2, 3, 3], [8], [8] and 7 more that are not parameters of the model" in told
    assert told.endswith("make the optimizer after evenly.shard, over model.parameters().")


def freeze_first(module):
    for name, parameter in module.named_parameters():
        if name.startswith(("0.", "1.")):
            parameter.requires_grad_(False)


def freeze_middle(module):
    for name, parameter in module.named_parameters():
        if name.startswith(("3.", "7.")):
            parameter.requires_grad_(False)


def unfreeze_all(module):
    module.requires_grad_(True)


CHANGES = {0: freeze_first, 3: unfreeze_all, 5: freeze_middle, 8: unfreeze_all}


def train_with_changes(rank_group, world, make_optimizer, every, data, settings):
    number = world.replica_of(rank_group.rank)
    has_share = not world.flat[number] or world.flat[number][world.replicas[number].index(rank_group.rank)] > 0
    trace = []
    with world.joined(rank_group, make_optimizer, every, **settings) as (synchronized, optimizer):
        for moment, row in enumerate(data):
            CHANGES.get(moment, id)(synchronized.module)
            step(synchronized, optimizer, *row[number])
            trace.append(full_state(synchronized.module, has_share=has_share))
        synchronized.finish()
        trace.append(full_state(synchronized.module, has_share=has_share))
    return trace, {}, []


@pytest.mark.parametrize("shares", ["3|2", "2+2|3", "2|whole"])
def test_layers_of_cut_networks_are_frozen_and_unfrozen(shares):
    world, every = World(MODELS[shares]), 3
    data = batches(len(world.replicas), 10)
    momentum = OPTIMIZERS["momentum"]
    reference, trace = Reference(network(), momentum, world.nodes_of_replicas), []
    for moment, row in enumerate(data):
        for replica in reference.replicas:
            CHANGES.get(moment, id)(replica)
        reference.step(row, nn.functional.cross_entropy)
        if (moment + 1) % every == 0:
            reference.exchange()
        trace.append([[t.detach().clone() for t in tensors(r)] for r in reference.replicas])
    reference.exchange()
    trace.append([[t.detach().clone() for t in tensors(r)] for r in reference.replicas])
    ranks = sum(map(len, world.replicas))
    compare(world, run_ranks(ranks, train_with_changes, world, momentum, every, data, {}), trace)


@pytest.mark.parametrize("settings", [{"outer": "nesterov", "overlap": 1}, {"codec": "int8", "fragments": 2}])
def test_cut_networks_that_were_frozen_end_with_the_same_values(settings):
    world = World(MODELS["3|2"])
    data = batches(len(world.replicas), 10)
    results = run_ranks(5, train_with_changes, world, OPTIMIZERS["momentum"], 3, data, settings)
    parameters = len(list(network().parameters()))
    for trace, *_ in results[1:]:
        for one, other in zip(trace[-1][:parameters], results[0][0][-1][:parameters], strict=True):
            assert torch.equal(one, other)
