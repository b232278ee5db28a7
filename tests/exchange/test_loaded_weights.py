"""Weights that load_state_dict puts in between two exchanges are gone on from, whatever was remembered before."""

import copy
import io
import pickle
from contextlib import closing

import pytest
import torch
from torch import nn

from evenly.errors import LockstepError, MismatchError, PeerError, SpecError
from evenly.exchange.loaded_weights import LoadedWeights
from evenly.nodes import join_nodes
from evenly.shards import load_full_state_dict
from evenly.spec import Exchange, Outer, period_of
from tests.exchange.overlapped import Overlapped
from tests.nodes import test_shards
from tests.nodes.test_corners import errors_of, join, linear
from tests.nodes.test_exactness import CLUSTERS, OPTIMIZERS, batches, network, state_of
from tests.nodes.test_odd_models import train
from tests.ranks import cluster_of, ragged, run_ranks

SETTINGS = {
    "plain": {},
    "overlap": {"overlap": 2},
    "outer": {"outer": Outer()},
    "outer beside": {"outer": Outer(), "overlap": 2},
    "fragments": {"outer": Outer(), "overlap": 1, "fragments": 2},
}


def other_weights():
    return network(seed=99).state_dict()


def run_with_load(rank_group, nodes, make, exchange, data, place, act):
    """Trains, and calls `act(synchronized, optimizer, rank)` after the step `place`."""
    model = network(seed=rank_group.rank)
    optimizer = make(model)
    settings = {"period": period_of(3), "exchange": exchange}
    synchronized = join_nodes(model, optimizer, rank_group=rank_group, cluster=cluster_of(nodes), **settings)
    trace = []
    with closing(synchronized):
        for number, row in enumerate(data, start=1):
            x, y = row[rank_group.rank]
            optimizer.zero_grad()
            nn.functional.cross_entropy(synchronized(x), y).backward()
            optimizer.step()
            if number == place:
                act(synchronized, optimizer, rank_group.rank)
            trace.append(state_of(model))
        synchronized.finish()
        trace.append(state_of(model))
    return trace


def play_with_load(nodes, make, exchange, data, place, act):
    reference = Overlapped(network(), make, nodes, period_of(3), exchange)
    trace = []
    for number, row in enumerate(data, start=1):
        reference.train(row)
        if number == place:
            act(reference)
        trace.append([state_of(replica) for replica in reference.replicas])
    reference.finish()
    return [*trace, [state_of(replica) for replica in reference.replicas]]


def check(exchange, place, act, play, *, shape="3+1", optimizer="momentum", steps=8):
    nodes = CLUSTERS[shape]
    data, make = batches(sum(map(len, nodes)), steps), OPTIMIZERS[optimizer]
    settings = Exchange(timeout_s=30.0, **exchange)
    results = run_ranks(sum(map(len, nodes)), run_with_load, nodes, make, settings, data, place, act)
    for moment, row in enumerate(play_with_load(nodes, make, settings, data, place, play)):
        for rank, wanted in enumerate(row):
            note = f"moment {moment} rank {rank}: "
            torch.testing.assert_close(results[rank][moment], wanted, rtol=1e-9, atol=1e-10, msg=note.__add__)


@pytest.mark.parametrize(
    ("settings", "place"),
    [("plain", 4), ("overlap", 3), ("overlap", 5), ("outer", 3), ("outer", 4), ("outer beside", 4), ("fragments", 5)],
)
def test_all_ranks_load_the_same(settings, place):
    check(
        SETTINGS[settings],
        place,
        lambda synchronized, optimizer, rank: synchronized.module.load_state_dict(other_weights()),
        lambda reference: reference.load(other_weights()),
    )


@pytest.mark.parametrize("settings", ["outer beside", "fragments"])
def test_weights_written_by_hand_are_accepted_when_the_user_says_so(settings):
    def act(synchronized, optimizer, rank):
        weights = other_weights()
        with torch.no_grad():
            for name, tensor in synchronized.module.state_dict().items():
                tensor.copy_(weights[name])
        synchronized.accept_weights()

    check(SETTINGS[settings], 4, act, lambda reference: reference.load(other_weights()))


@pytest.mark.parametrize("settings", ["overlap", "outer beside"])
def test_weights_that_were_swapped_in_for_a_while_change_nothing(settings):
    def swap(synchronized, optimizer, rank):
        if rank == 0:
            own = copy.deepcopy(synchronized.module.state_dict())
            synchronized.module.load_state_dict(other_weights())
            synchronized.module.load_state_dict(own)

    def look(synchronized, optimizer, rank):
        with synchronized.agreed():
            synchronized.module.load_state_dict(other_weights())

    for act in (swap, look):
        check(SETTINGS[settings], 4, act, lambda reference: None)


def test_a_part_that_is_loaded_keeps_its_values_while_the_rest_is_merged():
    part = "0.weight"

    def play(reference):
        def put(replica):
            replica.load_state_dict({part: other_weights()[part]}, strict=False)

        for replica in reference.replicas:
            put(replica)
        due, reference.due = reference.due, []
        for step, act in due:
            reference.due.append((step, keeping(reference, act)))

    def keeping(reference, act):
        def merged():
            before = [r.get_parameter(part).detach().clone() for r in reference.replicas]
            act()
            for replica, value in zip(reference.replicas, before, strict=True):
                replica.get_parameter(part).data.copy_(value)

        return merged

    def act(synchronized, optimizer, rank):
        synchronized.module.load_state_dict({part: other_weights()[part]}, strict=False)

    check(SETTINGS["overlap"], 4, act, play)
    nodes, data = CLUSTERS["3+1"], batches(4, 6)
    arguments = (nodes, OPTIMIZERS["sgd"], Exchange(outer=Outer(), timeout_s=30.0), data, 4, act)
    for error in errors_of(4, lambda rank_group: run_with_load(rank_group, *arguments)):
        assert isinstance(error, SpecError)
        assert "'0.weight'" in str(error)


def test_state_of_the_optimizer_that_was_loaded_is_not_changed_by_an_exchange_under_way():
    exchange = {"overlap": 2, "optimizer_state": "average"}
    found = {}

    def loaded(states):
        return {k: {slot: torch.full_like(v, 0.25) for slot, v in s.items()} for k, s in states.items()}

    def act(synchronized, optimizer, rank):
        state = optimizer.state_dict()
        optimizer.load_state_dict({**state, "state": loaded(state["state"])})

    def play(reference):
        snapshots = reference.due
        found["due"] = len(snapshots)
        for optimizer in reference.optimizers:
            state = optimizer.state_dict()
            optimizer.load_state_dict({**state, "state": loaded(state["state"])})  # new tensors: old ones are merged

    check(exchange, 4, act, play)
    assert found["due"]


@pytest.mark.parametrize("settings", [{"outer": "nesterov"}, {"codec": "bf16"}, {"codec": "bf16", "overlap": 1}])
def test_nodes_that_load_different_weights_or_only_some_of_them_are_told(settings):
    def act(rank_group, chosen):
        model = linear()
        synchronized, optimizer = join(rank_group, ragged(2, 1), model, every=2, **settings)
        with closing(synchronized):
            train(synchronized, optimizer, 3, rank_group.rank)
            if rank_group.rank in chosen:
                model.load_state_dict(
                    {"weight": torch.full((1, 4), float(chosen[rank_group.rank])), "bias": torch.ones(1)}
                )
            train(synchronized, optimizer, 5, rank_group.rank)

    different = errors_of(3, lambda rank_group: act(rank_group, {0: 1, 1: 1, 2: 2}))
    assert all(isinstance(error, MismatchError | PeerError) for error in different)
    assert any(isinstance(error, MismatchError) and "nodes [1]" in str(error) for error in different)
    some = errors_of(3, lambda rank_group: act(rank_group, {2: 2}))
    assert all(isinstance(error, PeerError) for error in some)
    assert any(isinstance(error, LockstepError) and "loaded weights" in str(error) for error in some)


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_a_run_with_codes_goes_on_as_a_new_one_would(codec):
    def act(rank_group, first):
        model = linear()
        synchronized, optimizer = join(rank_group, ragged(2, 1), model, every=2, codec=codec)
        with closing(synchronized):
            train(synchronized, optimizer, first, rank_group.rank)
            model.load_state_dict({"weight": torch.arange(4.0)[None], "bias": torch.ones(1)})
            train(synchronized, optimizer, 4, rank_group.rank)
        return torch.cat([model.weight.detach()[0], model.bias.detach()])

    for used, new in zip(run_ranks(3, act, 4), run_ranks(3, act, 0), strict=True):
        assert torch.equal(used, new)


@pytest.mark.parametrize("every", [2, "30s"])
def test_a_load_on_one_node_after_the_last_step_is_averaged_by_finish(every):
    def act(rank_group):
        model = linear()
        synchronized, optimizer = join(rank_group, ragged(1, 1), model, every=every)
        with closing(synchronized):
            train(synchronized, optimizer, 2, rank_group.rank)
            synchronized.finish()
            if rank_group.rank:
                model.load_state_dict({"weight": torch.ones(1, 4), "bias": torch.ones(1)})
            own = model.weight.detach().clone()
            with synchronized.agreed():
                shown = model.weight.detach().clone()
            assert every != 2 or torch.equal(model.weight, own)
            synchronized.finish()
        return own, shown, model.weight.detach().clone()

    results = run_ranks(2, act)
    mean = (results[0][0] + results[1][0]) / 2
    for _, shown, ended in results:
        torch.testing.assert_close(shown, mean)
        assert torch.equal(shown, ended)


def test_parameters_that_are_replaced_are_told():
    def act(rank_group):
        model = linear()
        synchronized, optimizer = join(rank_group, ragged(1, 1), model, every=2)
        with closing(synchronized):
            model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
            train(synchronized, optimizer, 1, rank_group.rank)

    for error in errors_of(2, act):
        assert isinstance(error, SpecError)


def test_copies_and_pickles_of_the_network_know_nothing_of_the_run():
    def act(rank_group):
        model = nn.Sequential(linear(), nn.BatchNorm1d(1))
        synchronized, optimizer = join(rank_group, ragged(1, 1), model, every=2, outer="nesterov")
        with closing(synchronized):
            train(synchronized, optimizer, 1, rank_group.rank)
            text = pickle.dumps(model)
            buffer = io.BytesIO()
            torch.save(model, buffer)
            buffer.seek(0)
            for other in (copy.deepcopy(model), pickle.loads(text), torch.load(buffer, weights_only=False)):
                other.load_state_dict(model.state_dict())
                other[0].load_state_dict(model[0].state_dict())
                copy.deepcopy(other)
            assert b"evenly" not in text
            assert not synchronized._exchanger._loaded_weights.any
        assert not any(part._load_state_dict_pre_hooks for part in model.modules())
        assert not any(part._load_state_dict_post_hooks for part in model.modules())

    run_ranks(2, act)


def test_cut_networks_load_too():
    world = test_shards.World(test_shards.MODELS["3|2"])
    data, exchange = batches(len(world.flat), 6), {"outer": Outer(), "overlap": 2}
    weights = test_shards.network(seed=99).state_dict()

    def act(rank_group):
        number, trace = world.replica_of(rank_group.rank), []
        with world.joined(rank_group, OPTIMIZERS["momentum"], 3, **exchange) as (synchronized, optimizer):
            for place, row in enumerate(data, start=1):
                test_shards.step(synchronized, optimizer, *row[number])
                if place == 4:
                    load_full_state_dict(synchronized.module, weights)
                trace.append(test_shards.full_state(synchronized.module))
        return trace

    reference = Overlapped(
        test_shards.network(),
        OPTIMIZERS["momentum"],
        world.nodes_of_replicas,
        period_of(3),
        Exchange(**exchange),
        rows=False,
    )
    results = run_ranks(world.size, act)
    for place, row in enumerate(data, start=1):
        reference.train(row)
        if place == 4:
            reference.load(weights)
        for rank in range(world.size):
            wanted = test_shards.tensors(reference.replicas[world.replica_of(rank)])
            for got, tensor in zip(results[rank][place - 1], wanted, strict=True):
                torch.testing.assert_close(got, tensor.detach(), rtol=1e-9, atol=1e-10)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("form", [torch.jit.script, torch.fx.symbolic_trace, nn.ModuleList])
def test_loads_of_any_kind_of_module_are_noticed(form):
    model = form(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))) if form != nn.ModuleList else form([linear()])
    loads = LoadedWeights(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})
    assert loads.changed() == set(model.state_dict())
    loads.close()
