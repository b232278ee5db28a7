"""Periods in seconds: each node makes the steps it can, and counts by its samples."""

import time
from itertools import pairwise

import pytest
import torch
from torch import nn

from evenly.errors import SpecError
from evenly.nodes import join_nodes
from evenly.spec import EverySeconds, Exchange, misfit, period_of
from tests.nodes.test_exactness import batches, network, state_of
from tests.ranks import cluster_of, ragged, run_ranks
from tests.reference import Reference

NODES = ragged(2, 1)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def trained(rank_group, exchange, counts, naps):
    model = network(seed=rank_group.rank)
    optimizer = sgd(model)
    cluster, own = cluster_of(NODES), 0 if rank_group.rank < 2 else 1
    settings = {"period": EverySeconds(0.4), "exchange": exchange}
    synchronized = join_nodes(model, optimizer, rank_group=rank_group, cluster=cluster, **settings)
    told, started = [], state_of(model)
    synchronized.on_exchange.append(told.append)
    for row in batches(3, max(counts))[: counts[own]]:
        x, y = row[rank_group.rank]
        optimizer.zero_grad()
        nn.functional.cross_entropy(synchronized(x), y).backward()
        optimizer.step()
        time.sleep(naps[own])
    synchronized.finish()
    ended = state_of(model)
    with synchronized.agreed():
        assert all(torch.equal(a, b) for a, b in zip(state_of(model), ended, strict=True))
    synchronized.close()
    return started, ended, told


def played(counts, told):
    """Plays what the nodes have told: how many steps each made before each exchange."""
    reference = Reference(network(), sgd, NODES)
    data, made = batches(3, max(counts)), [0, 0]
    for place in range(len(told[0])):
        reference.samples = [0.0] * 3
        for node, ranks in enumerate(NODES):
            alone = Reference(network(), sgd, [ranks])
            alone.replicas = [reference.replicas[rank] for rank in ranks]
            alone.optimizers = [reference.optimizers[rank] for rank in ranks]
            alone.nodes = [list(range(len(ranks)))]
            alone.samples = [0.0] * len(ranks)
            for step in range(made[node], told[node][place].step):
                alone.step([data[step][rank] for rank in ranks], nn.functional.cross_entropy)
            made[node] = told[node][place].step
            for rank, samples in zip(ranks, alone.samples, strict=True):
                reference.samples[rank] = samples
        reference.exchange()
    return [state_of(replica) for replica in reference.replicas]


def test_a_node_twice_as_fast_makes_more_steps_and_weighs_more():
    counts = [60, 12]
    results = run_ranks(3, trained, Exchange(), counts, [0.02, 0.1])
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[2][1], strict=True))
    told = [results[0][2], results[2][2]]
    assert [done.weights for done in told[0]] == [done.weights for done in told[1]]
    assert [done.step for done in told[0]] == [done.step for done in results[1][2]]
    assert (told[0][-1].step, told[1][-1].step) == tuple(counts)
    made = [[b.step - a.step for a, b in pairwise(of)] for of in told]
    middle = range(len(made[0]) // 2)  # after these some node has no batches left
    assert all(made[0][place] > made[1][place] for place in middle)
    assert all(told[0][place + 1].weights[0] > 0.6 for place in middle)
    assert len(middle)
    for (_, ended, _), wanted in zip(results, played(counts, told), strict=True):
        torch.testing.assert_close(ended, wanted, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("exchange", [Exchange(overlap=2), Exchange(overlap=1, codec="int8")])
def test_exchanges_beside_the_training(exchange):
    results = run_ranks(3, trained, exchange, [50, 11], [0.02, 0.1])
    for _, ended, _ in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0][1], ended, strict=True))


def test_a_node_without_batches_waits_for_the_others():
    results = run_ranks(3, trained, Exchange(), [12, 0], [0.02, 0.0])
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[2][1], strict=True))
    assert all(done.weights == (1.0, 0.0) for done in results[2][2])


def test_periods_in_seconds_in_words():
    assert period_of("30s") == EverySeconds(30)
    assert period_of(" 0.5 s") == EverySeconds(0.5)
    assert "not in seconds" in misfit(EverySeconds(1), Exchange(fragments=2))
    assert "keep or reset" in misfit(EverySeconds(1), Exchange(optimizer_state="average"))
    assert "gives up after 60" in misfit(EverySeconds(60), Exchange(timeout_s=60))
    for wish in ("0s", "-3s", "s", "3d", "0%", "100%", "%"):
        with pytest.raises(SpecError):
            period_of(wish)
