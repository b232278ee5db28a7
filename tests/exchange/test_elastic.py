"""Nodes that are started separately: equal to the reference, and nodes that are lost, come late or return."""

import copy
import threading
import time

import pytest
import torch
from torch import nn

from evenly.coordination import Coordinator, RoundSettings
from evenly.errors import CoordinatorLostError, MismatchError, NonFiniteError, PeerError
from evenly.exchange.elastic import ElasticMembership
from evenly.nodes.composition import compose_synchronized
from evenly.spec import EverySteps, Exchange
from tests.exchange.elastic_nodes import NodeThreads, batch_of, coordinator, network
from tests.ranks import cluster_of, ragged, run_ranks
from tests.reference import Reference

TOLERANCE = 1e-12


@pytest.fixture
def meet():
    """Returns a function that starts a coordinator, which ends with the test."""
    started = []

    def start(expected_nodes, **settings):
        started.append(coordinator(expected_nodes, **settings))
        return started[-1]

    yield start
    for one in started:
        one.close()


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Played(Reference):
    """Plays the nodes in one process; nodes may be left out, and join with the state of another one."""

    def __init__(self, nodes):
        self.names, self.sizes = list(nodes), list(nodes.values())
        super().__init__(network(), momentum, ragged(*map(len, self.sizes)))
        self.made = dict.fromkeys(self.names, 0)

    def train(self, *names, steps=1):
        for _ in range(steps):
            for index, name in enumerate(self.names):
                if name in names:
                    self.made[name] += 1
                    self._step(index, name)

    def _step(self, index, name):
        ranks = self.nodes[index]
        for local_rank, rank in enumerate(ranks):
            replica = self.replicas[rank]
            replica.zero_grad()
            x, y = batch_of(name, local_rank, self.made[name], self.sizes[index][local_rank])
            nn.functional.cross_entropy(replica(x), y).backward()
            self.samples[rank] += len(x)
        self.average_gradients(ranks, self.sizes[index])
        for rank in ranks:
            self.optimizers[rank].step()

    def meet(self, *names):
        """Averages these nodes; the others keep what they have."""
        nodes, samples = self.nodes, list(self.samples)
        self.nodes = [nodes[self.names.index(name)] for name in names]
        kept = {r: copy.deepcopy(self.replicas[r].state_dict()) for r in range(len(self.replicas))}
        self.exchange()
        self.nodes = nodes
        taken = {rank for name in names for rank in nodes[self.names.index(name)]}
        for rank, replica in enumerate(self.replicas):
            if rank not in taken:
                replica.load_state_dict(kept[rank])
                self.samples[rank] = samples[rank]

    def heal(self, name, giver):
        source = self.nodes[self.names.index(giver)][0]
        for rank in self.nodes[self.names.index(name)]:
            self.replicas[rank].load_state_dict(copy.deepcopy(self.replicas[source].state_dict()))
            self.optimizers[rank].load_state_dict(copy.deepcopy(self.optimizers[source].state_dict()))
            self.samples[rank] = 0.0

    def values(self, name):
        return list(self.replicas[self.nodes[self.names.index(name)][0]].state_dict().values())


def require_equal(values, wanted):
    for value, other in zip(values, wanted, strict=True):
        torch.testing.assert_close(value.double(), other.double(), rtol=0, atol=TOLERANCE)


def require_identical(*rows):
    for values in rows[1:]:
        different = [n for n, (a, b) in enumerate(zip(values, rows[0], strict=True)) if not torch.equal(a, b)]
        assert not different


@pytest.mark.parametrize("sizes", [[[4], [3]], [[4, 2], [3]], [[2, 3, 4], [5, 2], [3]]])
def test_nodes_train_as_in_one_world(meet, sizes):
    nodes = {f"node{i}": size for i, size in enumerate(sizes)}
    address = meet(len(sizes)).address

    def act(rank):
        rank.train(6)
        rank.model.finish()
        return rank.values()

    started = [NodeThreads(n, s, address, act, seed=i).begin() for i, (n, s) in enumerate(nodes.items())]
    results = [values for node in started for values in node.join()]
    played = Played(nodes)
    for _ in range(3):
        played.train(*nodes, steps=2)
        played.meet(*nodes)
    require_identical(*results)
    require_equal(results[0], played.values("node0"))


def test_a_node_that_is_lost_costs_the_others_nothing_but_its_work(meet):
    nodes = {"a": [4, 2], "b": [3], "c": [5, 2]}
    address = meet(3).address
    gone = threading.Event()

    def stays(rank):
        rank.train(5)  # two exchanges of all
        gone.wait(30)
        began = time.monotonic()
        rank.train(1)
        seconds = time.monotonic() - began
        rank.train(2)
        return rank.values(), seconds

    def dies(rank):
        rank.train(5)
        rank.client.close()

    started = [NodeThreads(n, nodes[n], address, stays).begin() for n in "ab"]
    lost = NodeThreads("c", nodes["c"], address, dies).begin()
    lost.join()
    gone.set()
    results = [result for node in started for result in node.join()]
    played = Played(nodes)
    for _ in range(2):
        played.train(*nodes, steps=2)
        played.meet(*nodes)
    for _ in range(2):
        played.train("a", "b", steps=2)
        played.meet("a", "b")
    require_identical(*(values for values, _ in results))
    require_equal(results[0][0], played.values("a"))
    assert max(seconds for _, seconds in results) < 2


def test_a_node_that_is_lost_inside_a_round_is_left_out_of_it(meet, monkeypatch):
    nodes = {"a": [4], "b": [3], "c": [5]}
    address = meet(3).address

    def stays(rank):
        rank.train(4)
        return rank.values()

    def dies(rank):
        rank.train(3)
        conclude = ElasticMembership.conclude

        def end(self, *arguments):
            if self._client is rank.client:
                rank.client.close()
                raise SystemExit
            return conclude(self, *arguments)

        monkeypatch.setattr(ElasticMembership, "conclude", end)  # all have averaged, none has voted
        with pytest.raises(SystemExit):
            rank.train(1)

    started = [NodeThreads(n, nodes[n], address, stays).begin() for n in "ab"]
    lost = NodeThreads("c", nodes["c"], address, dies).begin()
    results = [result for node in started for result in node.join()]
    lost.join()
    played = Played(nodes)
    played.train(*nodes, steps=2)
    played.meet(*nodes)
    played.train("a", "b", steps=2)
    played.meet("a", "b")
    require_identical(*results)
    require_equal(results[0], played.values("a"))


@pytest.mark.parametrize(
    "settings", [{}, {"codec": "int8"}, {"outer": "nesterov"}, {"codec": "bf16", "outer": "nesterov"}]
)
def test_a_node_that_comes_late_has_the_same_bits_after_its_first_exchange(meet, settings):
    nodes = {"a": [4, 2], "b": [3], "c": [5, 3, 2]}
    address = meet(2).address
    about_to_come, here = threading.Event(), threading.Event()
    rows = {}

    def stays(rank):
        rank.train(4)
        about_to_come.set()
        here.wait(30)
        time.sleep(0.3)  # the late one proposes first
        rank.train(2)
        rows[rank.node.name, rank.rank] = [*rank.values(), *state_of(rank.optimizer)]
        rank.train(2)
        return rank.values()

    def comes(rank):
        rows[rank.node.name, rank.rank] = [*rank.values(), *state_of(rank.optimizer)]
        assert rank.model.schedule.step == 6
        rank.train(2)
        return rank.values()

    started = [NodeThreads(n, nodes[n], address, stays, settings=settings).begin() for n in "ab"]
    about_to_come.wait(30)
    late = NodeThreads("c", nodes["c"], address, comes, seed=7, settings=settings).begin()
    here.set()
    results = [result for node in [*started, late] for result in node.join()]
    require_identical(rows["a", 0], rows["a", 1], *(rows["c", rank] for rank in range(3)))
    require_identical(*results)


@pytest.mark.parametrize(
    "settings",
    [
        {"overlap": 1},
        {"overlap": 1, "codec": "int8", "outer": "nesterov"},
    ],
)
def test_a_node_joins_exchanges_beside_training_at_one_that_training_waits_for(meet, settings):
    nodes = {"a": [4, 2], "b": [3], "c": [5, 3, 2]}
    address = meet(2).address
    about_to_come, here = threading.Event(), threading.Event()
    rows = {}

    def stays(rank):
        rank.train(4)
        about_to_come.set()
        here.wait(30)
        time.sleep(0.3)  # the late one proposes first
        while len(rank.model._groups.nodes) < 3:
            rank.train(1)
        rows[rank.node.name, rank.rank] = [*rank.values(), *state_of(rank.optimizer)], rank.model.schedule.step
        rank.train(8)
        rank.model.finish()
        return rank.values()

    def comes(rank):
        rows[rank.node.name, rank.rank] = [*rank.values(), *state_of(rank.optimizer)], rank.model.schedule.step
        rank.train(8)
        rank.model.finish()
        return rank.values()

    started = [NodeThreads(n, nodes[n], address, stays, settings=settings, every=4).begin() for n in "ab"]
    about_to_come.wait(30)
    late = NodeThreads("c", nodes["c"], address, comes, seed=7, settings=settings, every=4).begin()
    here.set()
    results = [result for node in [*started, late] for result in node.join()]
    require_identical(*(rows[name][0] for name in [("a", 0), ("a", 1), ("c", 0), ("c", 1), ("c", 2)]))
    assert rows["c", 0][1] == rows["a", 0][1]
    require_identical(*results)


def state_of(optimizer):
    return [v.clone() for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]


def test_training_goes_on_without_the_coordinator_and_nodes_merge_when_it_is_back(meet):
    nodes = {"a": [4, 2], "b": [3]}
    first = meet(2)
    is_gone, is_back = threading.Barrier(4), threading.Barrier(4)

    def act(rank):
        rank.train(2)
        is_gone.wait(30)
        is_gone.wait(30)
        began = time.monotonic()
        rank.train(2)  # no exchange
        seconds, apart = time.monotonic() - began, rank.values()
        is_back.wait(30)
        is_back.wait(30)
        rank.train(2)
        return rank.values(), apart, seconds

    started = [NodeThreads(n, s, first.address, act).begin() for n, s in nodes.items()]
    is_gone.wait(30)
    first.close()
    is_gone.wait(30)
    is_back.wait(30)
    second = Coordinator(first.address, settings=RoundSettings(expected_nodes=2)).start()
    try:
        while not all(rank.client.is_connected for node in started for rank in node.ranks):
            time.sleep(0.02)
        is_back.wait(30)
        results = [result for node in started for result in node.join()]
    finally:
        second.close()
    played = Played(nodes)
    played.train(*nodes, steps=2)
    played.meet(*nodes)
    played.train(*nodes, steps=4)
    played.meet(*nodes)
    require_identical(*(values for values, *_ in results))
    require_equal(results[0][0], played.values("a"))
    assert max(seconds for *_, seconds in results) < 2.0
    assert not torch.equal(results[0][1][0], results[2][1][0])


def test_a_node_whose_parameters_became_nan_takes_over_those_of_the_others(meet):
    nodes = {"a": [4, 2], "b": [3]}
    address = meet(2).address

    def healthy(rank):
        rank.train(6)
        return [*rank.values(), *state_of(rank.optimizer)]

    def ill(rank):
        rank.train(3)
        with torch.no_grad():
            rank.model.module[0].weight.fill_(torch.nan)
        rank.train(1)
        values = [*rank.values(), *state_of(rank.optimizer)]
        rank.train(2)
        return values, rank.values()

    other = NodeThreads("b", nodes["b"], address, ill).begin()
    one = NodeThreads("a", nodes["a"], address, healthy).begin()
    rows = one.join()
    [(mended, last)] = other.join()
    assert all(bool(value.isfinite().all()) for value in mended)
    require_identical(rows[0][: len(last)], last)
    played = Played({"a": [4, 2], "b": [3]})
    played.train("a", "b", steps=2)
    played.meet("a", "b")
    played.train("a", steps=2)
    played.made["b"] += 2
    played.meet("a")
    played.heal("b", "a")
    played.train("a", "b", steps=2)
    played.meet("a", "b")
    require_equal(rows[0][: len(last)], played.values("a"))


def test_nodes_without_a_finite_step_end_with_an_error(meet):
    nodes = {"a": [4, 2], "b": [3]}
    address = meet(2).address

    def act(rank):
        rank.train(2)
        for _ in range(20):
            loss = rank.model(batch_of("x", 0, 1, 4)[0]).sum() * torch.nan
            loss.backward()
            rank.optimizer.step()

    started = [NodeThreads(n, s, address, act).begin() for n, s in nodes.items()]
    for node in started:
        with pytest.raises((NonFiniteError, PeerError)):
            node.join()
    assert any(isinstance(rank.error, NonFiniteError) for node in started for rank in node.ranks)


def test_a_slow_node_is_left_out_and_merged_at_the_next_exchange(meet):
    nodes = {"a": [4, 2], "b": [3], "c": [5]}
    address = meet(3, straggler_wait_s=0.3).address
    is_slow, is_back = threading.Event(), threading.Event()

    def stays(rank):
        rank.train(3)
        is_slow.wait(30)
        rank.train(1)
        is_back.set()
        time.sleep(0.3)  # the slow one proposes first
        rank.train(2)
        return rank.values()

    def slow(rank):
        rank.train(3)
        is_slow.set()
        is_back.wait(30)
        rank.train(1)
        return rank.values()

    started = [NodeThreads(n, nodes[n], address, stays).begin() for n in "ab"]
    started.append(NodeThreads("c", nodes["c"], address, slow).begin())
    results = [result for node in started for result in node.join()]
    played = Played(nodes)
    played.train(*nodes, steps=2)
    played.meet(*nodes)
    played.train(*nodes, steps=2)
    played.meet("a", "b")
    played.train("a", "b", steps=2)
    played.meet(*nodes)
    require_identical(*results)
    require_equal(results[0][:4], played.values("a")[:4])


def test_a_node_with_another_network_is_refused_and_the_others_go_on(meet):
    address = meet(1).address
    is_there, is_refused = threading.Event(), threading.Event()

    def stays(rank):
        is_there.set()
        while not is_refused.is_set():
            rank.train(2)
            time.sleep(0.01)
        return rank.model.schedule.exchanges

    one = NodeThreads("a", [4], address, stays).begin()
    is_there.wait(30)
    other = NodeThreads("b", [3], address, lambda rank: None, lr=0.5).begin()
    with pytest.raises(MismatchError, match="signature"):
        other.join()
    is_refused.set()
    assert one.join()[0] > 1


def test_samples_of_a_round_whose_end_a_node_did_not_learn_count_once(meet):
    nodes = {"a": [4], "b": [3]}
    address = meet(2).address

    def informed(rank):
        rank.train(4)
        return rank.values()

    def uninformed(rank):
        rank.train(1)
        vote = rank.client.vote

        def vote_without_an_answer(*arguments, **settings):
            assert vote(*arguments, **settings).is_committed
            rank.client.vote = vote
            raise CoordinatorLostError("the answer is lost")

        rank.client.vote = vote_without_an_answer
        rank.train(3)
        return rank.values()

    started = [NodeThreads("a", nodes["a"], address, informed).begin()]
    started.append(NodeThreads("b", nodes["b"], address, uninformed).begin())
    results = [result for node in started for result in node.join()]
    played = Played(nodes)
    played.train(*nodes, steps=2)
    behind = copy.deepcopy(played.replicas[1].state_dict())
    played.meet(*nodes)
    played.replicas[1].load_state_dict(behind)
    played.train(*nodes, steps=2)
    played.meet(*nodes)
    require_identical(*results)
    require_equal(results[0][:4], played.values("a")[:4])


@pytest.mark.parametrize(
    "settings",
    [
        {"codec": "int8"},
        {"outer": "nesterov"},
        {"codec": "bf16", "outer": "nesterov"},
        {"overlap": 1, "codec": "int4"},
        {"optimizer_state": "reset"},
    ],
)
def test_exchanges_are_those_of_one_world(meet, settings):
    nodes = {"a": [4, 2], "b": [3]}
    address = meet(2).address

    def act(rank):
        rank.train(10)
        rank.model.finish()
        return rank.values()

    started = [NodeThreads(n, s, address, act, every=3, settings=settings).begin() for n, s in nodes.items()]
    results = [values for node in started for values in node.join()]
    networks = [network() for _ in range(3)]

    def static(rank_group):
        model = networks[rank_group.rank]
        optimizer = momentum(model)
        joined = compose_synchronized(
            model,
            optimizer,
            rank_group=rank_group,
            cluster=cluster_of([[0, 1], [2]]),
            period=EverySteps(3),
            exchange=Exchange(timeout_s=30, **settings),
        )
        name, local_rank = [("a", 0), ("a", 1), ("b", 0)][rank_group.rank]
        for step in range(1, 11):
            x, y = batch_of(name, local_rank, step, nodes[name][local_rank])
            nn.functional.cross_entropy(joined(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        joined.finish()
        joined.close()
        return [value.detach().clone() for value in model.state_dict().values()]

    expected = run_ranks(3, static)
    require_identical(*results)
    require_equal(results[0], expected[0])


@pytest.mark.parametrize("settings", [{}, {"codec": "int8"}, {"codec": "bf16"}, {"outer": "nesterov"}])
def test_nothing_changes_without_steps_that_do_something_whoever_is_there(meet, settings):
    address = meet(1).address
    is_alone, may_go, is_joined = threading.Event(), threading.Event(), threading.Event()

    def norms(rank):
        return [float(parameter.detach().norm()) for parameter in rank.plain.parameters()]

    def stays(rank):
        rows = [norms(rank)]
        rank.train(4)
        is_alone.set()
        while not is_joined.is_set():
            rank.train(2)
        for _ in range(3):
            rank.train(2)
            rows.append(norms(rank))
        may_go.wait(30)
        rank.train(4)
        return [*rows, norms(rank)]

    def comes(rank):
        is_joined.set()
        rank.train(6)
        rank.client.close()
        may_go.set()

    one = NodeThreads("a", [4], address, stays, lr=0.0, settings=settings).begin()
    is_alone.wait(30)
    other = NodeThreads("b", [3], address, comes, lr=0.0, seed=3, settings=settings).begin()
    [rows] = one.join()
    other.join()
    for row in rows:
        torch.testing.assert_close(torch.tensor(row), torch.tensor(rows[0]), rtol=1e-5, atol=1e-6)


def test_a_node_of_several_ranks_goes_on_when_it_is_left_alone(meet):
    address = meet(2).address

    def stays(rank):
        rank.train(10)
        rank.model.finish()
        return rank.values()

    def dies(rank):
        rank.train(4)
        rank.client.close()

    one = NodeThreads("a", [4, 2], address, stays).begin()
    other = NodeThreads("b", [3], address, dies).begin()
    other.join()
    require_identical(*one.join())


@pytest.mark.parametrize("settings", [{}, {"codec": "int8"}, {"outer": "nesterov"}])
def test_a_node_that_is_lost_while_it_joins_changes_nothing(meet, monkeypatch, settings):
    nodes = {"a": [4, 2], "b": [3], "c": [5, 3, 2]}
    address = meet(2).address
    is_gone, may_come, is_there = threading.Event(), threading.Event(), threading.Event()
    conclude = ElasticMembership.conclude

    def end(self, *arguments):
        if self.node == "c":
            self._client.close()
            is_gone.set()
            raise SystemExit
        return conclude(self, *arguments)

    monkeypatch.setattr(ElasticMembership, "conclude", end)

    def stays(rank):
        rank.train(4)
        may_come.set()
        is_there.wait(30)
        time.sleep(0.3)  # it proposes first
        rank.train(6)
        return rank.values()

    started = [NodeThreads(n, nodes[n], address, stays, settings=settings).begin() for n in "ab"]
    may_come.wait(30)
    late = NodeThreads("c", nodes["c"], address, lambda rank: None, seed=7, settings=settings).begin()
    while not all(hasattr(rank, "client") and rank.client.is_connected for rank in late.ranks):
        time.sleep(0.02)
    is_there.set()
    results = [result for node in started for result in node.join()]
    assert is_gone.is_set()
    require_identical(*results)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_node_whose_buffers_are_not_finite_takes_over_those_of_the_others(meet, value):
    nodes = {"a": [4, 2], "b": [3]}
    address = meet(2).address

    def healthy(rank):
        rank.train(6)
        return rank.values()

    def ill(rank):
        rank.train(3)
        with torch.no_grad():
            rank.model.module[1].running_mean[2] = value
        rank.train(3)
        return rank.values()

    started = [
        NodeThreads("a", nodes["a"], address, healthy).begin(),
        NodeThreads("b", nodes["b"], address, ill).begin(),
    ]
    results = [result for node in started for result in node.join()]
    require_identical(*results)
    assert all(bool(tensor.isfinite().all()) for tensor in results[0])


def test_finish_waits_for_the_coordinator(meet):
    nodes = {"a": [4, 2], "b": [3]}
    first = meet(2)
    is_there = threading.Barrier(4)

    def act(rank):
        rank.train(3)
        is_there.wait(30)
        is_there.wait(30)
        rank.model.finish()
        return rank.values()

    started = [NodeThreads(n, s, first.address, act).begin() for n, s in nodes.items()]
    is_there.wait(30)
    first.close()
    is_there.wait(30)
    time.sleep(0.8)
    second = Coordinator(first.address, settings=RoundSettings(expected_nodes=2)).start()
    try:
        results = [result for node in started for result in node.join()]
    finally:
        second.close()
    require_identical(*results)


def test_a_rank_that_loses_its_connection_does_not_leave_the_others_of_its_node_waiting(meet):
    nodes = {"a": [4, 2], "b": [3]}
    address = meet(2).address

    def act(rank):
        rank.train(3)
        if rank.node.name == "a" and rank.rank == 1:
            propose = rank.client.propose

            def lost(*arguments, **settings):
                rank.client.propose = propose
                raise CoordinatorLostError("the connection is lost")

            rank.client.propose = lost
        rank.train(5)
        return rank.values()

    started = [NodeThreads(n, s, address, act).begin() for n, s in nodes.items()]
    require_identical(*started[0].join(limit_s=25))
    started[1].join(limit_s=25)
