"""What forwards return: a backward through it is weighted by its batch, in whatever it is wrapped, or refused."""

import collections
import gc
import pickle
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn

from evenly.errors import PeerError, SpecError
from evenly.gradients.outputs import Outputs
from tests.gradients.test_not_averaged import assert_same, batch, expected_gradients, loss_of, network
from tests.nodes.test_corners import errors_of, join
from tests.ranks import ragged, run_ranks


class Named(NamedTuple):
    y: torch.Tensor


class Slots:
    __slots__ = ("__hidden", "other")

    def __init__(self, y):
        self.__hidden = y

    @property
    def y(self):
        return self.__hidden


class Plain:
    def __init__(self, y):
        self.inner, self.itself = Slots(y), self  # a cycle

    @property
    def y(self):
        return self.inner.y


@dataclass
class ModelOutput(collections.OrderedDict):
    """Like that of transformers: a mapping and a dataclass at once."""

    y: torch.Tensor = None

    def __post_init__(self):
        self["y"] = self.y

    def __hash__(self):
        return id(self)


class Store:
    def __init__(self, y):
        self._mapping = {"y": y}

    def __getattr__(self, name):
        if name == "_mapping":
            raise AttributeError(name)
        return self._mapping[name]


class Graph:
    """Like that of torch_geometric: attributes come from a store, by a method."""

    def __init__(self, y):
        self.__dict__["_store"] = Store(y)

    def __getattr__(self, name):
        return getattr(self.__dict__["_store"], name)


class Wrapped(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.body, self.wrap = network(), wrap

    def forward(self, x):
        return self.wrap(self.body(x))


KINDS = [Named, Slots, Plain, ModelOutput, Graph]


@pytest.mark.parametrize("kind", KINDS)
def test_forwards_are_weighted_in_whatever_their_output_is_wrapped(kind):
    """Two forwards of unequal sizes, of which the first one's backward comes last."""

    def act(rank_group):
        model = Wrapped(kind)
        synchronized, optimizer = join(rank_group, ragged(2), model, every=50)
        with closing(synchronized):
            sizes = (2 + rank_group.rank, 5 - rank_group.rank)
            losses = [loss_of(synchronized(batch(rank_group.rank, n, size)).y) for n, size in enumerate(sizes)]
            for loss in reversed(losses):
                loss.backward()
            optimizer.step()
            return [parameter.grad.clone() for parameter in model.parameters()]

    assert_same(run_ranks(2, act), expected_gradients([[2, 3], [5, 4]]))


def test_an_output_may_be_left_out_of_the_loss_on_a_rank_without_samples():
    def act(rank_group):
        model = Wrapped(lambda y: y.split(2, dim=1))
        synchronized, optimizer = join(rank_group, ragged(2), model, every=50)
        with closing(synchronized):
            x = batch(0, 0, 3) if rank_group.rank == 0 else batch(0, 0, 3)[:0]
            synchronized(x)[0].square().sum().backward()
            optimizer.step()
            return [parameter.grad.clone() for parameter in model.parameters()]

    found = run_ranks(2, act)
    model = network()
    model(batch(0, 0, 3))[:, :2].square().sum().backward()
    assert_same(found, [parameter.grad for parameter in model.parameters()])


def test_what_is_found_in_outputs():
    y = torch.ones(2, requires_grad=True) * 2
    for kind in KINDS:
        found = Outputs(kind(y))
        assert [id(tensor) for tensor in found.tensors] == [id(y)]
        assert not found.unseen
    assert Outputs(tensor for tensor in [y]).unseen == "generator"
    assert Outputs({"f": lambda: y}).unseen == "function"
    assert Outputs(nn.Linear(1, 1)).unseen == "Linear"
    assert "of more than" in Outputs([[number] for number in range(20_000)]).unseen
    normal = torch.distributions.Normal(y, y.exp())
    assert any(tensor is y for tensor in Outputs(normal).tensors)


def by_generator(model, rank):
    for part in model(batch(rank, 0)):
        loss_of(part).backward()


def by_function(model, rank):
    loss_of(model(batch(rank, 0))()).backward()


@pytest.mark.parametrize(
    ("wrap", "fill", "name"),
    [
        (lambda y: (part for part in [y]), by_generator, "generator"),
        (lambda y: lambda: y, by_function, "function"),
    ],
)
def test_outputs_that_cannot_be_looked_into_are_refused_by_name(wrap, fill, name):
    def act(rank_group):
        synchronized, optimizer = join(rank_group, ragged(2), Wrapped(wrap), every=50)
        with closing(synchronized):
            fill(synchronized, rank_group.rank)
            optimizer.step()

    errors = errors_of(2, act)
    assert any(isinstance(error, SpecError) and name in str(error) for error in errors)
    assert all(isinstance(error, SpecError | PeerError) for error in errors)


class Auxiliary(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = network()
        self.inner = nn.Identity()
        self.aux_loss, self.kept = None, []

    def forward(self, x):
        hidden = self.body(x)
        self.aux_loss = hidden.abs().mean()
        self.inner.losses = {"z": hidden.exp().mean()}
        self.kept.append(self.aux_loss)
        return hidden.tanh()  # not on the way to the others


def reference_gradients(parts, weights):
    """Returns the mean over ranks, by these weights, of the gradients of losses of a plain model."""
    expected = [0.0] * 4
    for part, weight in zip(parts, weights, strict=True):
        model = Auxiliary()
        part(model)
        expected = [e + weight / sum(weights) * p.grad for e, p in zip(expected, model.parameters(), strict=True)]
    return expected


def outputs_and_auxiliary(model, module, rank):
    y = model(batch(rank, 0, 2 + 3 * rank))
    (loss_of(y) + module.aux_loss + module.inner.losses["z"]).backward()
    return 2 + 3 * rank


def auxiliary_alone(model, module, rank):
    model(batch(rank, 0, 2 + 3 * rank))
    module.inner.losses["z"].backward()
    return 2 + 3 * rank


def auxiliary_of_another_forward(model, module, rank):
    model(batch(rank, 0, 2 + 3 * rank))
    first = module.aux_loss
    (loss_of(model(batch(rank, 1, 4))) + first).backward()
    return 6 + 3 * rank


def auxiliary_of_the_first_of_two(model, module, rank):
    model(batch(rank, 0, 2 + 3 * rank))
    model(batch(rank, 1, 4))
    module.kept[0].backward()
    return 2 + 3 * rank


@pytest.mark.parametrize(
    "fill",
    [outputs_and_auxiliary, auxiliary_alone, auxiliary_of_another_forward, auxiliary_of_the_first_of_two],
)
def test_losses_that_the_module_keeps_are_weighted_by_their_batch(fill):
    def act(rank_group):
        model = Auxiliary()
        synchronized, optimizer = join(rank_group, ragged(2), model, every=50)
        with closing(synchronized):
            for _ in range(3):
                optimizer.zero_grad()
                model.kept.clear()
                fill(synchronized, model, rank_group.rank)
            found = [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.step()
        return found

    weights = [fill(model, model, rank) for rank, model in enumerate([Auxiliary(), Auxiliary()])]
    parts = [lambda model, rank=rank: fill(model, model, rank) for rank in range(2)]
    assert_same(run_ranks(2, act), reference_gradients(parts, weights))


WIDTH = 1009  # no tensor of another test has as many elements


def test_copies_of_gradients_are_freed_at_the_end_of_backward():
    both_done = threading.Barrier(2)

    def has_copies():
        gc.collect()
        return any(
            type(tensor) is torch.Tensor and tensor.numel() == 3 * WIDTH and tensor.dtype == torch.float32
            for tensor in gc.get_objects()
        )

    def act(rank_group):
        model = nn.Linear(WIDTH, 3, bias=False).bfloat16()
        synchronized, _ = join(rank_group, ragged(2), model, every=50)
        with closing(synchronized):
            synchronized(torch.ones(2 + rank_group.rank, WIDTH, dtype=torch.bfloat16)).float().mean().backward()
            both_done.wait(timeout=30)  # objects of all threads are looked at
            until = time.monotonic() + 10.0  # a thread of gloo may hold what it has just sent
            while (is_any := has_copies()) and time.monotonic() < until:
                time.sleep(0.05)
            return is_any

    assert run_ranks(2, act) == [False, False]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_scalers_are_what_they_were_after_close(order):
    def act(rank_group):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        both = [join(rank_group, ragged(1), network(), scaler=scaler) for _ in range(2)]
        for number in order:
            for synchronized, optimizer in both:
                if not synchronized._closed:
                    before = synchronized.schedule.step
                    scaler.scale(loss_of(synchronized(batch(0, 0))) * torch.inf).backward()
                    scaler.step(optimizer)
                    assert synchronized.schedule.step == before + 1
            scaler.update()
            both[number][0].close()
        assert "step" not in vars(scaler)
        pickle.dumps(scaler)

    run_ranks(1, act)


def test_the_plain_network_trains_on_after_close():
    def act(rank_group):
        model = network()
        synchronized, _ = join(rank_group, ragged(2), model)
        loss_of(synchronized(batch(rank_group.rank, 0))).backward()
        synchronized.close()
        model.zero_grad()
        for _ in range(2):  # with a part of it
            model[0](batch(rank_group.rank, 1)).sum().backward()
        synchronized.close()
        return [parameter.grad for parameter in model.parameters()]

    for rank, gradients in enumerate(run_ranks(2, act)):
        plain = network()
        (2 * plain[0](batch(rank, 1)).sum()).backward()
        for ours, theirs in zip(gradients, plain.parameters(), strict=True):
            assert (ours is None) == (theirs.grad is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs.grad)
