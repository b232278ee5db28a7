"""Buffers: each is averaged, taken from one rank, kept or agreed on by its extremes, as its module or the user says."""

from contextlib import closing

import pytest
import torch
from torch import nn
from torch.ao.quantization.observer import HistogramObserver, MinMaxObserver, MovingAverageMinMaxObserver

from evenly.comm import local_shard_of
from evenly.errors import NonFiniteError, PeerError, SpecError
from evenly.exchange.tensors.buffer_policies import policies_of
from evenly.spec import Exchange
from tests.nodes import test_shards
from tests.nodes.test_corners import errors_of, join, linear
from tests.nodes.test_exactness import batches
from tests.nodes.test_odd_models import train
from tests.ranks import ragged, run_ranks
from tests.reference import Reference

INF = float("inf")


def buffers_after(shape, build, change, *, steps=2, overlap=0, **exchange):
    """Returns the buffers of each rank after steps in which `change(model, rank, step)` changed them."""

    def act(rank_group):
        model = build()
        synchronized, optimizer = join(rank_group, ragged(*shape), model, every=2, overlap=overlap, **exchange)
        with closing(synchronized):
            for step in range(steps):
                change(model, rank_group.rank, step)
                train(synchronized, optimizer, 1, rank_group.rank)
            if overlap:
                synchronized.finish()
            return {name: buffer.clone() for name, buffer in model.named_buffers()}

    return run_ranks(sum(shape), act)


def observed(kind):
    def build():
        model = linear()
        model.observer = kind()
        return model

    return build


def observe(model, rank, step):
    model.observer(torch.tensor([-1.0 - rank, 2.0 * rank - step]))


@pytest.mark.parametrize("overlap", [0, 1])
def test_extremes_of_observers_are_those_of_all_ranks(overlap):
    for found in buffers_after((2, 1), observed(MinMaxObserver), observe, steps=3, overlap=overlap):
        assert found["observer.min_val"] == -3.0
        assert found["observer.max_val"] == 4.0


def test_observers_that_have_seen_nothing_on_some_ranks_or_on_all():
    some = buffers_after((2, 1), observed(MinMaxObserver), lambda m, r, s: observe(m, r, s) if r == 1 else None)
    none = buffers_after((2, 1), observed(MinMaxObserver), lambda m, r, s: None)
    for found in some:
        assert (found["observer.min_val"], found["observer.max_val"]) == (-2.0, 2.0)
    for found in none:
        assert (found["observer.min_val"], found["observer.max_val"]) == (INF, -INF)


def test_moving_averages_that_begin_at_infinity_are_averaged():
    for found in buffers_after((2, 1), observed(MovingAverageMinMaxObserver), observe, steps=2):
        torch.testing.assert_close(found["observer.min_val"], torch.tensor(-2.0))
        assert found["observer.max_val"].isfinite()


def test_a_histogram_is_that_of_one_rank_with_its_range():
    found = buffers_after((1, 1), observed(HistogramObserver), observe)
    assert [row["observer.min_val"] for row in found] == [-1.0, -1.0]
    assert torch.equal(found[0]["observer.histogram"], found[1]["observer.histogram"])
    assert found[1]["observer.histogram"].sum() == 4


def unknown():
    model = linear()
    model.register_buffer("lowest", torch.tensor([INF, -INF, 0.0]))
    return model


@pytest.mark.parametrize("overlap", [0, 1])
def test_what_was_infinite_everywhere_is_averaged_once_it_is_finite(overlap):
    def change(model, rank, step):
        model.lowest[0] = 3.0 * rank
        model.lowest[2] += rank

    for found in buffers_after((2, 1), unknown, change, steps=2 + overlap, overlap=overlap):
        assert torch.equal(found["lowest"], torch.tensor([3.0, -INF, 2.0 + overlap]))


def test_what_is_infinite_on_some_ranks_only_is_named():
    def act(rank_group):
        model = unknown()
        synchronized, optimizer = join(rank_group, ragged(2, 1), model)
        with closing(synchronized):
            model.lowest[0] = 1.0 if rank_group.rank == 2 else INF
            train(synchronized, optimizer, 9, rank_group.rank)

    errors = errors_of(3, act)
    assert all(isinstance(error, NonFiniteError | PeerError) for error in errors)
    assert any("'lowest'" in str(error) and "buffers=" in str(error) for error in errors)


def normed(form):
    return lambda: form(linear(), "weight")


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("form", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_vectors_of_spectral_norm_stay_on_the_unit_sphere(form, overlap):
    found = buffers_after((2, 1), normed(form), lambda m, r, s: None, steps=5, overlap=overlap)
    for row in found:
        for name, vector in row.items():
            assert vector.norm() == pytest.approx(1.0, abs=1e-6), name
            assert torch.equal(vector, found[0][name]), name


def test_vectors_of_spectral_norm_are_those_of_rank_0():
    def change(model, rank, step):
        if step == 1:
            model.eval()
            model.weight_v.copy_(nn.functional.normalize(torch.tensor([1.0, rank, 0.0, 0.0]), dim=0))

    for found in buffers_after((1, 2), normed(nn.utils.spectral_norm), change):
        assert torch.equal(found["weight_v"], torch.tensor([1.0, 0.0, 0.0, 0.0]))


def counted():
    model = linear()
    model.register_buffer("seen", torch.zeros(2))
    model.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
    return model


def count(model, rank, step):
    model.seen.fill_(rank + 1.0)
    model.steps.fill_(5 - rank)


@pytest.mark.parametrize(
    ("policy", "seen", "steps"),
    [
        ("auto", [2.0] * 3, [5] * 3),
        ("keep", [1.0, 2.0, 3.0], [5, 4, 3]),
        ("first", [1.0] * 3, [5] * 3),
        ("max", [3.0] * 3, [5] * 3),
        ("min", [1.0] * 3, [3] * 3),
        ({"s?en": "max"}, [3.0] * 3, [5] * 3),
        ({"steps": "min", "*": "keep"}, [1.0, 2.0, 3.0], [3] * 3),
    ],
)
def test_the_user_chooses(policy, seen, steps):
    found = buffers_after((2, 1), counted, count, buffers=policy)
    assert [row["seen"][0].item() for row in found] == seen
    assert [row["steps"][0].item() for row in found] == steps


DTYPES = [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.uint8, torch.uint64, torch.bool]


@pytest.mark.parametrize("policy", ["first", "max", "min"])
def test_extremes_and_copies_of_all_types(policy):
    def values(rank, dtype):
        return torch.tensor([(1.0 if dtype.is_signed else 2.0) - rank, rank]).to(dtype)

    def build():
        model = linear()
        for place, dtype in enumerate(DTYPES):
            model.register_buffer(f"seen{place}", torch.zeros(2).to(dtype))
        return model

    def change(model, rank, step):
        for place, dtype in enumerate(DTYPES):
            model.get_buffer(f"seen{place}").copy_(values(rank, dtype))

    for found in buffers_after((2, 1), build, change, buffers=policy):
        for place, dtype in enumerate(DTYPES):
            rows = torch.stack([values(rank, dtype).double() for rank in range(3)])
            expected = {"first": rows[0], "max": rows.amax(0), "min": rows.amin(0)}[policy]
            assert found[f"seen{place}"].double().tolist() == expected.tolist(), dtype


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"stops": "max"}, "'stops'.*no buffer"),
        ({"steps": "average"}, "'steps'.*int64"),
        ({"wave": "max"}, "'wave'.*complex64"),
    ],
)
def test_policies_that_cannot_be_met_are_refused(policy, words):
    model = counted()
    model.register_buffer("wave", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(SpecError, match=words):
        policies_of(model, Exchange(buffers=policy))


class Overlapping(nn.Module):
    """A buffer under two names, one that is a view of another, and one that is a view of a parameter."""

    def __init__(self):
        super().__init__()
        self.layer = linear()
        memory = torch.zeros(6)
        self.register_buffer("part", memory[2:4])
        self.register_buffer("whole", memory)
        self.register_buffer("again", memory.view(2, 3))
        self.register_buffer("odd", memory[1::2])
        self.register_buffer("weight", self.layer.weight.data)

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("outer", [None, "nesterov"])
@pytest.mark.parametrize("overlap", [0, 1])
def test_buffers_that_share_memory_are_changed_once(overlap, outer):
    def act(rank_group, build):
        model = build()
        synchronized, optimizer = join(rank_group, ragged(2, 1), model, every=2, overlap=overlap, outer=outer)
        with closing(synchronized):
            for _ in range(4):
                model.get_buffer("whole").add_(rank_group.rank)
                train(synchronized, optimizer, 1, rank_group.rank)
            synchronized.finish()
        return model.whole.clone(), model.layer.weight.detach().clone()

    def apart():
        model = Overlapping()
        for name in ("part", "again", "odd", "weight"):
            delattr(model, name)
        return model

    for shared, plain in zip(run_ranks(3, act, Overlapping), run_ranks(3, act, apart), strict=True):
        torch.testing.assert_close(shared, plain, rtol=0, atol=0)


def test_parameters_that_are_views_of_each_other_are_changed_once():
    def act(rank_group):
        model = nn.ModuleDict({"a": nn.Linear(4, 3, bias=False), "b": nn.Linear(4, 1, bias=False)})
        model["b"].weight.data = model["a"].weight.data[1:2]
        model.forward = lambda x: model["a"](x).sum(1) + model["b"](x)[:, 0]
        synchronized, optimizer = join(rank_group, ragged(1, 1), model, every=2, overlap=1)
        began = model["a"].weight.detach().clone()
        with closing(synchronized):
            train(synchronized, optimizer, 3, rank_group.rank)
        return began - model["a"].weight.detach()

    for rank, moved in enumerate(run_ranks(2, act)):
        own, mean = rank + 1.0, 1.5  # the gradient of each weight
        rows = torch.tensor([1.0, 2.0, 1.0])  # two weights lie in the memory of the second
        torch.testing.assert_close(moved[:, 0], 0.1 * rows * (2 * mean + own))


def test_memory_that_is_shared_in_part_is_refused():
    def act(rank_group):
        model, memory = linear(), torch.zeros(6)
        model.register_buffer("low", memory[:4])
        model.register_buffer("high", memory[2:])
        join(rank_group, ragged(1, 1), model)

    for error in errors_of(2, act):
        assert isinstance(error, SpecError)
        assert "'high'" in str(error)
        assert "'low'" in str(error)


def normalised():
    return nn.Sequential(nn.BatchNorm1d(4), linear()).double()


def look(model, rank):
    """A forward in train mode without a step."""
    with torch.no_grad():
        model(torch.full((3, 4), float(rank)).double())


@pytest.mark.parametrize("every", [2, "30s", "global", "epoch"])
@pytest.mark.parametrize("how", ["finish", "agreed"])
def test_statistics_changed_after_the_last_exchange_are_averaged(how, every):
    def act(rank_group):
        model = normalised()
        synchronized, optimizer = join(rank_group, ragged(2, 1), model, every=every)
        with closing(synchronized):
            for _ in range(2):
                synchronized(torch.ones(2, 4).double()).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            synchronized.end_epoch()
            synchronized.finish()
            weights = model[1].weight.detach().clone()
            look(synchronized.module, rank_group.rank)
            own = model[0].running_mean.clone()
            if how == "finish":
                synchronized.finish()
                assert torch.equal(model[1].weight, weights)
                return own, model[0].running_mean.clone()
            with synchronized.agreed():
                assert torch.equal(model[1].weight, weights)
                shown = model[0].running_mean.clone()
            assert torch.equal(model[0].running_mean, own)
            return own, shown

    results = run_ranks(3, act)
    mean = torch.stack([own for own, _ in results]).mean(0)
    for _, ended in results:
        torch.testing.assert_close(ended, mean, rtol=1e-12, atol=0)
        assert torch.equal(ended, results[0][1])


CUT_POLICIES = {"1.running_mean": "first", "1.running_var": "max", "4.running_mean": "min", "*tracked": "first"}


@pytest.mark.parametrize("shape", ["2+2|3", "2|whole", "left out|2"])
def test_buffers_of_cut_networks(shape):
    world = test_shards.World(test_shards.MODELS[shape])
    data = batches(len(world.flat), 3)

    def act(rank_group):
        number = world.replica_of(rank_group.rank)
        shares = world.flat[number]
        has_share = not shares or shares[world.replicas[number].index(rank_group.rank)] > 0

        def full(module):
            named = list(module.named_buffers())
            if not has_share:
                return None
            return {n: b.clone() if (p := local_shard_of(b)) is None else p.full(b).clone() for n, b in named}

        found = []
        with world.joined(rank_group, test_shards.sgd, 2, buffers=CUT_POLICIES) as (synchronized, optimizer):
            for row in data[:2]:
                test_shards.step(synchronized, optimizer, *row[number])
            found.append(full(synchronized.module))
            with torch.no_grad():
                synchronized(data[2][number][0])  # in train mode
            synchronized.finish()
            found.append(full(synchronized.module))
        return found

    reference = Reference(test_shards.network(), test_shards.sgd, world.nodes_of_replicas)
    results = run_ranks(world.size, act)
    for moment in range(2):
        for row in data[:2] if moment == 0 else ():
            reference.step(row, nn.functional.cross_entropy)
        if moment:
            with torch.no_grad():
                for replica, (x, _) in zip(reference.replicas, data[2], strict=True):
                    replica(x)
        rows = [{name: b.clone() for name, b in replica.named_buffers()} for replica in reference.replicas]
        samples = [1.0] * len(rows) if moment else reference.samples
        expected = agreed_by_hand(rows, samples)
        if not moment:
            reference.exchange()  # of parameters
        for replica in reference.replicas:
            for name, buffer in replica.named_buffers():
                buffer.copy_(expected[name])
        for found in results:
            for name, value in (found[moment] or {}).items():
                torch.testing.assert_close(
                    value, expected[name], rtol=1e-10, atol=1e-12, msg=f"{moment} {name}".__add__
                )


def agreed_by_hand(rows, samples):
    found = {}
    for name, first in rows[0].items():
        values = [row[name] for row in rows]
        stacked = torch.stack(values)
        policy = "first" if name.endswith("tracked") else CUT_POLICIES.get(name)
        mean = sum(s * v for s, v in zip(samples, values, strict=True)) / sum(samples)
        found[name] = {"first": first, "max": stacked.amax(0), "min": stacked.amin(0), None: mean}[policy]
    return found
