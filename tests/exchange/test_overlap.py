"""Exchanges beside the training, in fragments, with an outer optimizer: each step equals a reference in one process."""

import threading
import time

import pytest
import torch
from torch import nn

from evenly.errors import SpecError
from evenly.nodes import join_nodes
from evenly.spec import EveryEpoch, EverySteps, Exchange, Outer, period_of
from tests.exchange.overlapped import Overlapped
from tests.nodes.test_exactness import CLUSTERS, OPTIMIZERS, batches, compare, network, state_of
from tests.ranks import RankError, cluster_of, ragged, run_ranks


def trained(rank_group, nodes, make_optimizer, period, exchange, data):
    model = network(seed=rank_group.rank)
    optimizer = make_optimizer(model)
    settings = {"period": period, "exchange": exchange}
    synchronized = join_nodes(model, optimizer, rank_group=rank_group, cluster=cluster_of(nodes), **settings)
    told = []
    synchronized.on_exchange.append(told.append)
    trace = [state_of(model)]
    for row in data:
        x, y = row[rank_group.rank]
        optimizer.zero_grad()
        nn.functional.cross_entropy(synchronized(x), y).backward()
        optimizer.step()
        trace.append(state_of(model))
    synchronized.finish()
    trace.append(state_of(model))
    synchronized.close()
    return trace, told


def played(nodes, make_optimizer, period, exchange, data):
    reference = Overlapped(network(), make_optimizer, nodes, period, exchange)
    trace = [[state_of(replica) for replica in reference.replicas]]
    for row in data:
        reference.train(row)
        trace.append([state_of(replica) for replica in reference.replicas])
    reference.finish()
    trace.append([state_of(replica) for replica in reference.replicas])
    return trace


def check(shape, optimizer, period, exchange, steps=9):
    nodes = CLUSTERS[shape]
    ranks = sum(map(len, nodes))
    data, make = batches(ranks, steps), OPTIMIZERS[optimizer]
    results = run_ranks(ranks, trained, nodes, make, period_of(period), exchange, data)
    compare([trace for trace, _ in results], played(nodes, make, period_of(period), exchange, data))
    return [told for _, told in results]


@pytest.mark.parametrize("overlap", [1, 2, 4])
@pytest.mark.parametrize("shape", ["2x2", "3+1", "1+1+2"])
def test_overlap(shape, overlap):
    told = check(shape, "momentum", 4, Exchange(overlap=overlap))[0]
    assert [(done.step, done.merged) for done in told][:2] == [(4, 4 + overlap), (8, min(8 + overlap, 9))]
    assert all(done.drift > 0 for done in told)


@pytest.mark.parametrize("fragments", [2, 3])
@pytest.mark.parametrize("overlap", [0, 1, 3])
@pytest.mark.parametrize("shape", ["2x2", "3+1"])
def test_fragments(shape, overlap, fragments):
    told = check(shape, "adam", 3, Exchange(overlap=overlap, fragments=fragments))[0]
    assert {done.fragments for done in told} >= {(fragment,) for fragment in range(fragments)}


def test_a_warm_up_waits_for_every_exchange():
    told = check("2x2", "sgd", EverySteps(3, warmup=2), Exchange(overlap=2, fragments=2))[0]
    assert [(done.step, done.merged, done.fragments) for done in told][:3] == [
        (1, 1, (0, 1)),
        (2, 2, (0, 1)),
        (4, 6, (0,)),
    ]


@pytest.mark.parametrize("outer", [Outer(), Outer("Adam", settings={"lr": 0.05})])
@pytest.mark.parametrize("overlap", [0, 2])
def test_outer_optimizer(outer, overlap):
    check("3+1", "momentum", 3, Exchange(overlap=overlap, outer=outer))


def test_outer_sgd_with_rate_1_is_plain_averaging():
    nodes, data = CLUSTERS["2x2"], batches(4, 6)
    plain = Outer("SGD", settings={"lr": 1.0})
    with_outer = run_ranks(4, trained, nodes, OPTIMIZERS["sgd"], EverySteps(2), Exchange(outer=plain), data)
    without = run_ranks(4, trained, nodes, OPTIMIZERS["sgd"], EverySteps(2), Exchange(), data)
    for (a, _), (b, _) in zip(with_outer, without, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize(
    "policy", ["average", "reset", {"exp_avg": "average"}, {"exp_avg_sq": "average", "exp_avg": "reset"}]
)
def test_optimizer_state(policy, overlap):
    check("2x2", "adam", 3, Exchange(optimizer_state=policy, overlap=overlap), steps=8)


@pytest.mark.parametrize("policy", ["reset", {"exp_avg": "reset", "exp_avg_sq": "average"}])
def test_state_of_fragments(policy):
    check("2x2", "adam", 4, Exchange(optimizer_state=policy, fragments=3, overlap=1), steps=9)


def test_optimizer_state_with_its_own_period():
    check("2x2", "adam", 2, Exchange(optimizer_state="average", state_every=2), steps=9)


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("shape", ["2x2", "3+1", "1+1+2"])
def test_codes_leave_all_nodes_with_the_same_bits(shape, codec):
    nodes = CLUSTERS[shape]
    ranks = sum(map(len, nodes))
    data = batches(ranks, 8)
    settings = Exchange(codec=codec, outer=Outer())
    results = run_ranks(ranks, trained, nodes, OPTIMIZERS["momentum"], EverySteps(2), settings, data)
    exact = played(nodes, OPTIMIZERS["momentum"], EverySteps(2), Exchange(outer=Outer()), data)
    tolerance = {"bf16": 2e-3, "int8": 5e-3, "int4": 5e-2}[codec]
    for step in (2, 4, 6, 8):
        for trace, _ in results:
            for value, first, want in zip(trace[step], results[0][0][step], exact[step][0], strict=True):
                assert torch.equal(value, first)
                torch.testing.assert_close(value, want, rtol=tolerance, atol=tolerance)


def test_what_a_code_loses_is_sent_later():
    """With a node that stands still and one that has moved once, the agreed point gets to the true average."""
    nodes = ragged(1, 1)

    def act(rank_group):
        torch.manual_seed(0)
        model = nn.Linear(40, 30, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        settings = {"period": EverySteps(1), "exchange": Exchange(codec="int4")}
        synchronized = join_nodes(model, optimizer, rank_group=rank_group, cluster=cluster_of(nodes), **settings)
        start = model.weight.detach().clone()
        move = torch.randn(30, 40, generator=torch.Generator().manual_seed(rank_group.rank))
        distances = []
        for step in range(12):
            synchronized(torch.ones(2, 40)).sum().backward()
            if step == 0:
                with torch.no_grad():
                    model.weight += move
            optimizer.step()
            optimizer.zero_grad()
            distances.append(model.weight.detach().clone())
        synchronized.close()
        return start, move, distances

    (start, first, seen), (_, second, _) = run_ranks(2, act)
    truth = start + (first + second) / 2
    errors = [float((weight - truth).abs().max()) for weight in seen]
    assert errors[0] > 0.01
    assert errors[-1] < errors[0] / 50


@pytest.mark.parametrize(
    ("period", "exchange", "words"),
    [
        (EverySteps(4), {"overlap": 5}, "overlap with 5 steps"),
        (EveryEpoch(), {"fragments": 2}, "or of an epoch"),
        (EverySteps(2), {"fragments": 3}, "period of 2 steps"),
        (period_of("global"), {"overlap": 1}, "at every step"),
        (EverySteps(4), {"codec": "fp7"}, "fp32, bf16, int8, int4"),
        (EverySteps(4), {"outer": {"name": "LBFGS", "settings": {}}}, "elementwise"),
        (EverySteps(4), {"outer": {"name": "Nothing", "settings": {}}}, "no class of torch.optim"),
        (EverySteps(4), {"outer": {"name": "SGD", "settings": {"rate": 1.0}}}, "cannot be made with"),
    ],
)
def test_bad_settings_are_refused(period, exchange, words):
    def join(rank_group):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings = {"period": period, "exchange": Exchange(**exchange)}
        return join_nodes(model, optimizer, rank_group=rank_group, cluster=cluster_of(ragged(1)), **settings)

    with pytest.raises(AssertionError, match=words) as caught:
        run_ranks(1, join)
    assert isinstance(caught.value.errors[0], SpecError)


def test_bad_numbers_are_refused():
    for wish in ({"overlap": -1}, {"fragments": 0}, {"state_every": 0}, {"optimizer_state": "halve"}):
        with pytest.raises(SpecError, match=next(iter(wish))):
            Exchange(**wish)


def test_an_exchange_under_way_ends_with_the_rank_that_failed():
    """The others hear of it before they come to the exchange, so that nobody would ever answer the one under way."""

    def act(rank_group):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings = {"period": EverySteps(1), "exchange": Exchange(overlap=1, timeout_s=30.0)}
        synchronized = join_nodes(model, optimizer, rank_group=rank_group, cluster=cluster_of(ragged(1, 1)), **settings)
        x, y = batches(2, 1)[0][rank_group.rank]
        try:
            for _ in range(2):
                if rank_group.rank == 1:
                    wait_for(lambda: synchronized._monitor.has_error)
                nn.functional.cross_entropy(synchronized(x), y).backward()
                optimizer.step()
                optimizer.step()  # refused: these gradients were used
        finally:
            synchronized.close()

    with pytest.raises(RankError) as raised:
        run_ranks(2, act)
    assert all(isinstance(error, SpecError) for error in raised.value.errors)
    wait_for(lambda: not [t for t in threading.enumerate() if t.name == "evenly-exchange"])


def wait_for(is_so, limit_s=5.0):
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)
