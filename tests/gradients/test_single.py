"""A run of one rank trains like the plain loop, with no hook on anything, and still stops at what is not finite."""

from contextlib import closing

import pytest
import torch
from torch import nn

from evenly.errors import NonFiniteError
from tests.gradients.test_not_averaged import batch, loss_of, network
from tests.nodes.test_corners import join
from tests.ranks import RankError, ragged, run_ranks


def in_one_rank(act, **settings):
    """Returns what `act(synchronized, optimizer)` returns in a run of one rank."""

    def run(rank_group):
        synchronized, optimizer = join(rank_group, ragged(1), network(), **{"every": 3, **settings})
        with closing(synchronized):
            return act(synchronized, optimizer)

    return run_ranks(1, run)[0]


def step(model, optimizer, number, *, factor=1.0):
    (factor * loss_of(model(batch(0, number)))).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_parameters_are_those_of_the_plain_network_bit_for_bit():
    def train(model, optimizer):
        for number in range(7):
            step(model, optimizer, number)
        return [parameter.detach().clone() for parameter in model.parameters()]

    plain = network()
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    assert all(map(torch.equal, in_one_rank(train), expected))


def test_nothing_has_a_hook():
    def act(model, optimizer):
        output = model(batch(0, 0))
        step(model, optimizer, 0)
        return [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()], output._backward_hooks

    assert in_one_rank(act) == ([0] * 4, None)


def test_samples_of_all_forwards_of_a_step_count():
    def act(model, optimizer):
        counted = []
        model.on_step.append(lambda number, samples: counted.append(samples))
        for size in (2, 5):
            loss_of(model(batch(0, 0, size))).backward()
        optimizer.step()
        step(model, optimizer, 1)
        return counted

    assert in_one_rank(act) == [7, 2]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_stop_the_step_that_would_use_them(value):
    before = []

    def act(model, optimizer):
        step(model, optimizer, 0)
        before.extend(parameter.detach().clone() for parameter in model.parameters())
        try:
            step(model, optimizer, 1, factor=value)
        finally:
            assert all(map(torch.equal, before, model.parameters()))

    with pytest.raises(RankError) as caught:
        in_one_rank(act)
    assert isinstance(caught.value.errors[0], NonFiniteError)
    assert "at step 2" in str(caught.value.errors[0])


def test_steps_that_are_not_finite_are_skipped_where_that_is_asked_for():
    def act(model, optimizer):
        step(model, optimizer, 0)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        step(model, optimizer, 1, factor=float("nan"))
        unchanged = all(map(torch.equal, before, model.parameters()))
        step(model, optimizer, 2)
        return unchanged, all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())

    assert in_one_rank(act, nonfinite="skip") == (True, True)


def test_a_closure_is_looked_at_after_its_step():
    def act(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model(batch(0, 0))) * float("inf")
            loss.backward()
            return loss

        optimizer.step(closure)

    with pytest.raises(RankError, match="became NaN or infinite at step 1"):
        in_one_rank(act)


def test_a_batch_without_samples_gives_no_gradients():
    def act(model, optimizer):
        loss_of(model(batch(0, 0))).backward()
        before = [parameter.grad.clone() for parameter in model.parameters()]
        loss_of(model(batch(0, 1)[:0])).backward()
        return all(torch.equal(p.grad, one) for p, one in zip(model.parameters(), before, strict=True))

    assert in_one_rank(act)


def test_layers_may_be_frozen_and_unfrozen():
    def act(model, optimizer):
        step(model, optimizer, 0)
        first = model.module[0]
        first.requires_grad_(False)
        before = first.weight.detach().clone()
        step(model, optimizer, 1)
        stayed = torch.equal(before, first.weight)
        first.requires_grad_(True)
        step(model, optimizer, 2)
        return stayed, torch.equal(before, first.weight)

    assert in_one_rank(act) == (True, False)


def test_a_network_of_ones_own_type_of_parameters_is_looked_at():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 3, sparse=True)

        def forward(self, x):
            return self.table(x)

    def run(rank_group):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        synchronized, _ = join(rank_group, ragged(1), model, optimizer=optimizer, every=3)
        with closing(synchronized):
            loss_of(synchronized(torch.tensor([1, 1, 4]))).backward()
            optimizer.step()
            return model.table.weight.grad.is_sparse

    assert run_ranks(1, run) == [True]
