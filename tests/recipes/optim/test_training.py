"""Every optimizer by its name trains through exchanges, on whole and cut networks, and resumes bit for bit."""

import functools

import pytest
import torch
from torch import nn

from evenly.checkpoints import Checkpoints, KeptCheckpoints, TrainedModel, apply
from evenly.checkpoints.resuming import load_tracked
from evenly.recipes.optim import OPTIMIZERS, build_optimizer, build_schedule
from evenly.spec import Exchange, period_of
from tests.checkpoints.trained_runs import gatherer_of
from tests.exchange.overlapped import Overlapped
from tests.nodes import test_exactness as whole
from tests.nodes import test_shards as cut
from tests.ranks import ragged, run_ranks

NODES = ragged(2, 1)
CUT = [[[1, 2]], [None]]  # a network cut over two ranks, and a whole one on the other node
SLOW = pytest.mark.slow
NAMES = [pytest.param(name, marks=SLOW if info.extra else ()) for name, info in OPTIMIZERS.items()]
ANGULAR = ["angulargrad-cos", pytest.param("angulargrad-tan", marks=SLOW)]
RESUMED = {"adafactor-whole", "angulargrad-cos-cut"}  # by `make test`
RATES = {"sgd": 0.05, "rmsprop": 0.01, "adafactor": 0.05}


def make(name, module):
    return build_optimizer(name, module.parameters(), lr=RATES.get(name, 0.02), weight_decay=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_an_exchange_at_every_step_averages_what_nodes_would_do_alone(name):
    data = whole.batches(3, 4)
    traces = run_ranks(3, whole.train, NODES, functools.partial(make, name), 1, data)
    whole.compare(traces, whole.expected(NODES, functools.partial(make, name), 1, data))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_with_an_exchange_at_every_step_is_global_data_parallelism(momentum):
    """Gradients and steps of SGD are linear: the mean of steps is the step of the mean."""

    def build(module):
        return build_optimizer("sgd", module.parameters(), lr=0.05, momentum=momentum)

    rows = whole.batches(2, 5, uneven=False)  # the node of two ranks divides the batch that the other has
    data = [[(x[:2], y[:2]), (x[2:], y[2:]), other] for (x, y), other in rows]
    node_based, everybody = (run_ranks(3, whole.train, NODES, build, every, data) for every in (1, "global"))
    count = len(list(whole.network().parameters()))
    for ours, theirs in zip(node_based, everybody, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a[:count], b[:count], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ANGULAR)
@pytest.mark.parametrize(
    "exchange",
    [
        Exchange(optimizer_state="average"),
        Exchange(optimizer_state="reset"),
        pytest.param(Exchange(optimizer_state={"previous_complement": "reset", "exp_avg": "average"}), marks=SLOW),
        pytest.param(Exchange(overlap=1, fragments=2, optimizer_state="average"), marks=SLOW),
    ],
)
def test_states_of_cut_networks_are_averaged_and_reset(name, exchange):
    world, data = cut.World(CUT), whole.batches(2, 5)
    build = functools.partial(make, name)
    results = run_ranks(world.size, cut.train, world, build, 2, data, exchange.model_dump())
    reference = Overlapped(cut.network(), build, world.nodes_of_replicas, period_of(2), exchange, rows=False)

    def states():
        return [[t.detach().clone() for t in cut.tensors(replica)] for replica in reference.replicas]

    trace = [states()]
    for row in data:
        reference.train(row)
        trace.append(states())
    reference.finish()
    cut.compare(world, results, [*trace, states()])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["diffgrad", "adabelief"])
def test_a_count_of_steps_in_the_group_is_reset_with_the_state(name):
    """After an exchange that resets, an optimizer steps as a new one would."""

    def act(rank_group):
        data = whole.batches(3, 3)
        network = whole.network()
        optimizer = make(name, network)
        synchronized = whole.join_nodes(
            network, optimizer, rank_group=rank_group, cluster=whole.cluster_of(NODES), period=period_of(2),
            exchange=Exchange(optimizer_state="reset"),
        )  # fmt: skip
        counts = []
        for row in data:
            optimizer.zero_grad()
            x, y = row[rank_group.rank]
            nn.functional.cross_entropy(synchronized(x), y).backward()
            optimizer.step()
            counts.append(optimizer.param_groups[0]["step"])
        synchronized.close()
        return counts

    assert run_ranks(3, act) == [[1, 0, 1]] * 3


def trained(rank_group, name, root, *, shares, stops=(), steps=5):
    """Trains, starting anew from a checkpoint after each of the steps `stops`; returns parameters and state."""
    world, data = cut.World(shares), whole.batches(3, steps)
    begin = 0
    for end in (*stops, steps):
        with (
            world.joined(rank_group, functools.partial(make, name), 2) as (synchronized, optimizer),
            gatherer_of(rank_group) as gatherer,
        ):
            schedule = build_schedule("one-cycle", optimizer, steps=steps, steps_per_epoch=steps)
            checkpoints = Checkpoints(root, gatherer, rank=rank_group.rank, nodes=world.nodes)
            trained_model = TrainedModel("model", synchronized, optimizer, None)
            if begin:
                restored = checkpoints.load_newest()
                apply(restored, trained_model)
                load_tracked(restored, {"schedule": schedule})
            for row in data[begin:end]:
                cut.step(synchronized, optimizer, *row[world.replica_of(rank_group.rank)])
                schedule.step()
            begin = end
            tracked = {"schedule": schedule}
            checkpoints.save(end, [trained_model], tracked, epoch=0, keep=KeptCheckpoints(2))
            state = [v.detach().clone() for s in optimizer.state.values() for v in s.values()]
            group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
            found = [t.detach().clone() for t in cut.tensors(synchronized.module)], state, group
    return found


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        pytest.param(name, shares, id=f"{name}-{kind}", marks=() if f"{name}-{kind}" in RESUMED else SLOW)
        for name in OPTIMIZERS
        for kind, shares in (("whole", [[None, None], [None]]), ("cut", CUT))
    ],
)
def test_a_resumed_run_ends_bit_for_bit_as_one_without_a_stop(name, shares, tmp_path):
    straight = run_ranks(3, functools.partial(trained, name=name, root=tmp_path / "a", shares=shares))
    resumed = run_ranks(3, functools.partial(trained, name=name, root=tmp_path / "b", shares=shares, stops=(3,)))
    for (tensors, state, group), (other_tensors, other_state, other_group) in zip(straight, resumed, strict=True):
        assert all(map(torch.equal, tensors, other_tensors))
        assert len(state) == len(other_state)
        assert all(map(torch.equal, state, other_state))
        assert group == other_group
