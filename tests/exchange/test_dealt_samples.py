"""In an elastic run every sample of an epoch is trained once, whatever nodes are lost, come or return."""

import collections
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.exchange.elastic_nodes import NodeThreads, coordinator

SIZE = 240


def data():
    random = torch.Generator().manual_seed(5)
    x, y = torch.randn(SIZE, 6, generator=random).double(), torch.randint(3, (SIZE,), generator=random)
    return TensorDataset(x, y, torch.arange(SIZE))


def network(seed):
    """Returns a network that takes a batch of one sample, too."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def count_of(rows):
    """Returns how often each sample was trained."""
    return collections.Counter(number for *_, numbers in rows for number in numbers)


@pytest.fixture
def meeting():
    one = coordinator(2)
    yield one
    one.close()


def train_epochs(rank, count, *, seen, slow_s=0.0, on_step=lambda step: None):
    """Trains `count` epochs; `seen` collects what each node trained between two exchanges that it took part in."""
    loader = rank.model.deal(data(), batch_size=rank.node.sizes, seed=3)
    step = 0
    for _ in range(count):
        epoch = loader.epoch
        for x, y, numbers in loader:
            nn.functional.cross_entropy(rank.model(x), y).backward()
            rank.optimizer.step()
            rank.optimizer.zero_grad()
            if loader.samples:
                seen.append((epoch, loader.ledger.number, numbers.tolist()))
            step += 1
            time.sleep(slow_s)
            on_step(step)
    return loader


def test_all_samples_are_trained_once_and_faster_nodes_train_more(meeting):
    nodes = {"a": [4, 4], "b": [8]}
    seen = {(name, rank): [] for name, sizes in nodes.items() for rank in range(len(sizes))}

    def act(rank):
        slow_s = 0.02 if rank.node.name == "b" else 0.002
        train_epochs(rank, 2, seen=seen[rank.node.name, rank.rank], slow_s=slow_s)
        rank.model.finish()
        return rank.values()

    started = [NodeThreads(n, s, meeting.address, act, make=network).begin() for n, s in nodes.items()]
    results = [values for node in started for values in node.join()]
    for epoch in range(2):
        counts = count_of(row for rows in seen.values() for row in rows if row[0] == epoch)
        assert sorted(counts) == list(range(SIZE))
        assert set(counts.values()) == {1}
    trained = {name: sum(count_of(rows).total() for key, rows in seen.items() if key[0] == name) for name in nodes}
    assert trained["a"] > 1.5 * trained["b"]
    for values in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(values, results[0], strict=True))


def test_samples_of_a_lost_node_are_dealt_to_the_others_and_a_late_node_gets_some(meeting):
    nodes = {"a": [4, 4], "b": [8], "c": [6]}
    seen = {(name, rank): [] for name, sizes in nodes.items() for rank in range(len(sizes))}
    may_come = threading.Event()

    def stays(rank):
        def come(step):
            if step == 4:
                may_come.set()

        loader = train_epochs(rank, 3, seen=seen["a", rank.rank], slow_s=0.01, on_step=come)
        rank.model.finish()
        return loader.ledger, rank.values()

    def dies(rank):
        def die(step):
            if step == 5:
                rank.client.close()
                raise SystemExit

        with pytest.raises(SystemExit):
            train_epochs(rank, 3, seen=seen["b", 0], slow_s=0.01, on_step=die)

    one = NodeThreads("a", nodes["a"], meeting.address, stays, make=network).begin()
    other = NodeThreads("b", nodes["b"], meeting.address, dies, make=network).begin()
    other.join()
    may_come.wait(30)
    late = NodeThreads(
        "c", nodes["c"], meeting.address, lambda rank: train_epochs_until(rank, 3, seen["c", 0]), make=network
    ).begin()
    [(ledger, values), _] = one.join()
    late_ledger, late_values = late.join()[0]
    assert ledger == late_ledger
    assert ledger.epoch == 3
    assert sum(len(numbers) for _, _, numbers in seen["c", 0]) > SIZE // 10
    assert all(torch.equal(a, b) for a, b in zip(values, late_values, strict=True))
    for epoch in range(3):
        counts = count_of(row for key, rows in seen.items() if key[0] != "b" for row in rows if row[0] == epoch)
        assert max(counts.values()) == 1  # what b trained and took part with is missing here, nothing else
        assert len(counts) >= SIZE - sum(len(numbers) for _, _, numbers in seen["b", 0])


def train_epochs_until(rank, last, seen):
    loader = rank.model.deal(data(), batch_size=rank.node.sizes, seed=3)
    while loader.epoch < last:
        epoch = loader.epoch
        for x, y, numbers in loader:
            nn.functional.cross_entropy(rank.model(x), y).backward()
            rank.optimizer.step()
            rank.optimizer.zero_grad()
            if loader.samples:
                seen.append((epoch, loader.ledger.number, numbers.tolist()))
            time.sleep(0.01)
    rank.model.finish()
    return loader.ledger, rank.values()
