"""A rank that is alone in its node: its gradients are those of the plain network, and what is refused stays refused."""

import re
from contextlib import closing

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from evenly._torch.foreach import FinitenessOnHost, largest_magnitude
from evenly.errors import NonFiniteError, SpecError
from tests.gradients.test_not_averaged import batch, loss_of, network
from tests.nodes.test_corners import SEEDING, errors_of, join
from tests.ranks import ragged, run_ranks

ALONE = ragged(1, 1)


def in_steps(loop, *, model=network, nodes=ALONE, steps=3, **settings):
    """Returns what a rank does: to call `loop` in each step, and return what it returned."""

    def act(rank_group):
        plain = model()
        synchronized, optimizer = join(rank_group, nodes, plain, **{"every": 50, **settings})
        found = []
        with closing(synchronized):
            for _ in range(steps):
                found.append(loop(synchronized, optimizer, rank_group.rank))
                optimizer.step()
                optimizer.zero_grad()
        return found

    return act


def run_alone(loop, **settings):
    """Returns what `loop` returned in each step, on two ranks that are alone in their nodes."""
    return run_ranks(2, in_steps(loop, **settings))


def refused(loop, match):
    errors = errors_of(2, in_steps(loop, steps=1))
    assert any(isinstance(error, SpecError) and re.search(match, str(error)) for error in errors), errors


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex128])
def test_parameters_are_those_of_the_plain_network_bit_for_bit(dtype):
    def make():
        with SEEDING:
            torch.manual_seed(1)
            return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).to(dtype)

    def loss(model, rank, number):
        return model(batch(rank, number).to(dtype)).abs().square().mean()

    def act(rank_group):
        synchronized, optimizer = join(rank_group, ALONE, make(), every=50)
        with closing(synchronized):
            for number in range(4):
                loss(synchronized, rank_group.rank, number).backward()
                optimizer.step()
                optimizer.zero_grad()
            return [parameter.detach().clone() for parameter in synchronized.module.parameters()]

    for rank, found in enumerate(run_ranks(2, act)):
        plain = make()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for number in range(4):
            loss(plain, rank, number).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(map(torch.equal, found, plain.parameters()))


def test_no_ddp_is_made_and_the_hooks_go():
    def act(rank_group):
        model = network()
        synchronized, _ = join(rank_group, ALONE, model, every=50)
        kinds = {type(module).__name__ for module in synchronized.modules()}
        synchronized.close()
        hooks = [len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters()]
        return kinds, hooks

    for kinds, hooks in run_ranks(2, act):
        assert kinds == {"Synchronized", "Sequential", "Linear", "Tanh"}
        assert set(hooks) == {0}


@pytest.mark.parametrize("order", ["before", "after", "alone", "penalty before"])
def test_a_backward_of_the_plain_module_is_refused(order):
    def loop(model, optimizer, rank):
        if order == "before":
            loss_of(model.module(batch(rank, 1))).backward()
        if order == "penalty before":  # of one parameter, which the next backward reaches, too
            next(model.parameters()).square().sum().backward()
        if order != "alone":
            loss_of(model(batch(rank, 0))).backward()
        if order in ("after", "alone"):
            loss_of(model.module(batch(rank, 1))).backward()

    refused(loop, "did not come from what a forward of the synchronized model returned")


def test_a_backward_whose_gradients_were_reset_is_forgotten():
    def loop(model, optimizer, rank):
        loss_of(model.module(batch(rank, 1))).backward()
        optimizer.zero_grad()
        loss_of(model(batch(rank, 0))).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    for rank, (found,) in enumerate(run_alone(loop, steps=1)):
        model = network()
        loss_of(model(batch(rank, 0))).backward()
        assert all(torch.equal(one, p.grad) for one, p in zip(found, model.parameters(), strict=True))


def test_a_step_on_gradients_of_no_sync_is_refused():
    def loop(model, optimizer, rank):
        with model.no_sync():
            loss_of(model(batch(rank, 0))).backward()

    refused(loop, r"inside no_sync\(\)")


def test_a_penalty_in_the_loss_belongs_to_its_backward():
    def loop(model, optimizer, rank):
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        (loss_of(model(batch(rank, 0))) + penalty).backward()

    run_alone(loop)


def test_parameters_that_a_loss_leaves_out_have_no_gradient():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 2).double(), nn.Linear(4, 2).double()

        def forward(self, x):
            return self.first(x), self.second(x)

    def loop(model, optimizer, rank):
        loss_of(model(batch(rank, 0))[0]).backward()
        return [parameter.grad is None for parameter in model.module.second.parameters()]

    assert run_alone(loop, model=Heads) == [[[True, True]] * 3] * 2


@pytest.mark.parametrize("nodes", [ALONE, ragged(2)])
def test_gradients_that_are_only_asked_for_count_no_samples(nodes):
    samples = [[], []]

    def loop(model, optimizer, rank):
        x = batch(rank, 0).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (loss_of(model(batch(rank, 1, 7))) + slope.square().mean()).backward()
        samples[rank].append(model.samples)

    run_alone(loop, nodes=nodes)
    assert samples == [[0, 7, 14], [0, 7, 14]]


def test_a_batch_without_samples_adds_nothing():
    def loop(model, optimizer, rank):
        loss_of(model(batch(rank, 0))).backward()
        before = [parameter.grad.clone() for parameter in model.parameters()]
        penalty = next(model.parameters()).square().sum()
        (loss_of(model(batch(rank, 1)[:0])) + 0 * penalty).backward()
        return all(torch.equal(p.grad, one) for p, one in zip(model.parameters(), before, strict=True))

    assert run_alone(loop, steps=2) == [[True, True]] * 2


def test_segments_that_share_a_parameter_are_recomputed_in_a_backward():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4).double()

        def forward(self, x):
            x = x.requires_grad_()
            for _ in range(2):
                x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True)
            return x

    run_alone(lambda model, optimizer, rank: loss_of(model(batch(rank, 0))).backward(), model=Twice)


def test_what_a_failed_backward_left_is_refused_unless_it_is_reset():
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("out of memory, say")

    def loop(model, optimizer, rank, *, resets):
        middle = model.module[0](batch(rank, 0))
        with pytest.raises(ValueError, match="out of memory"):
            (loss_of(model.module[2](Failing.apply(middle))) + model(batch(rank, 0)).sum()).backward()
        if resets:
            optimizer.zero_grad()
        loss_of(model(batch(rank, 1))).backward()

    run_alone(lambda *args: loop(*args, resets=True))
    refused(lambda *args: loop(*args, resets=False), "did not come from")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_stop_all_at_their_step(value):
    def loop(model, optimizer, rank):
        loss = loss_of(model(batch(rank, 0)))
        (loss * value if rank == 1 else loss).backward()

    errors = errors_of(2, in_steps(loop, steps=1))
    assert isinstance(errors[1], NonFiniteError)
    assert "ranks [1]" in str(errors[1])
    assert "at step 1" in str(errors[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf"), float("-inf")])
def test_one_element_is_found_and_none_is_changed(dtype, value):
    tensors = [torch.zeros(3, dtype=dtype), torch.zeros(0, dtype=dtype), torch.full((2, 3), -0.0, dtype=dtype).t()]
    tensors[0][1], tensors[2][1, 1] = torch.finfo(dtype).tiny / 2, value
    before = [tensor.clone() for tensor in tensors]
    is_finite = value == 1.0
    assert FinitenessOnHost()(tensors) == is_finite
    assert bool(torch.isfinite(largest_magnitude(tensors))) == is_finite
    for tensor, was in zip(tensors, before, strict=True):
        parts, parts_before = (torch.view_as_real(t) if t.is_complex() else t for t in (tensor, was))
        assert torch.equal(parts.nan_to_num(7.0), parts_before.nan_to_num(7.0))
        assert torch.equal(torch.signbit(parts), torch.signbit(parts_before))


def test_gradients_of_several_dtypes_and_sparse_ones_are_looked_at():
    indices = torch.tensor([[0, 2, 2]])
    sparse = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 3e38, 3e38]), (4,), check_invariants=True)
    assert FinitenessOnHost()([torch.ones(2, dtype=torch.float64), torch.ones(2)])
    assert not FinitenessOnHost()([torch.ones(2, dtype=torch.float64), sparse])  # 3e38 + 3e38
    assert largest_magnitude([torch.full((2,), -5.0, dtype=torch.float64), torch.ones(2)]) == 5.0
    assert not torch.isfinite(largest_magnitude([torch.ones(2, dtype=torch.float64), sparse]))
    assert largest_magnitude([torch.full((2,), 1e300, dtype=torch.float64), torch.ones(2)]) == 1e300


def test_what_was_found_before_an_operation_failed_is_forgotten():
    is_finite = FinitenessOnHost()
    assert not is_finite([torch.full((2,), float("nan")), torch.ones(2, dtype=torch.complex64)])
    assert is_finite([torch.ones(2)])
