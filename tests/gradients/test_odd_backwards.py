"""Unusual backwards: each gives the gradients of one device, or is refused on all ranks."""

import re
from contextlib import closing

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from evenly.errors import EvenlyError, MismatchError, PeerError, SpecError
from tests.gradients.test_not_averaged import assert_same, batch, loss_of, mean_gradients, network
from tests.gradients.test_unused import join_unused
from tests.nodes.test_corners import SEEDING, errors_of, join
from tests.ranks import ragged, run_ranks

SIZES = [2, 5]


def x_of(rank, number=0):
    return batch(rank, number, SIZES[rank])


def both_ways(fill, make=network, *, steps=1, unused=False):
    """Compares the gradients that `fill` gives on two ranks of a node with the mean of those of plain networks."""

    def act(rank_group):
        model = make()
        start = join_unused if unused else join
        synchronized, optimizer = start(rank_group, ragged(2), model, every=50)
        with closing(synchronized):
            for _ in range(steps):
                optimizer.zero_grad()
                fill(synchronized, model, rank_group.rank)
            found = [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.step()
        return found

    parts = []
    for rank in range(2):
        model = make()
        for _ in range(steps):
            model.zero_grad()
            fill(model, model, rank)
        parts.append([parameter.grad.clone() for parameter in model.parameters()])
    assert_same(run_ranks(2, act), mean_gradients(SIZES, parts))


def with_inputs(model, module, rank):
    loss_of(model(x_of(rank))).backward(inputs=list(module.parameters()))


def penalty_on_gradients(model, module, rank):
    loss = loss_of(model(x_of(rank)))
    gradients = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
    (loss + sum(gradient.square().sum() for gradient in gradients)).backward()


def checkpointed_outside(model, module, rank):
    output = torch.utils.checkpoint.checkpoint(model, x_of(rank), use_reentrant=False)
    loss_of(output).backward()


def checkpointed_outside_reentrant(model, module, rank):
    output = torch.utils.checkpoint.checkpoint(model, x_of(rank).requires_grad_(), use_reentrant=True)
    loss_of(output).backward()


def output_changed_in_place(model, module, rank):
    output = model(x_of(rank))
    output.mul_(3.0)
    output[:, 0].zero_()
    loss_of(output).backward()


def hook_that_scales(model, module, rank):
    handle = module[0].weight.register_hook(lambda gradient: 3 * gradient)
    loss_of(model(x_of(rank))).backward()
    handle.remove()


def zeros_between(model, module, rank):
    loss_of(model(x_of(rank, 1))).backward()
    module.zero_grad(set_to_none=False)
    loss_of(model(x_of(rank))).backward()


def failed_before(model, module, rank):
    """A backward that fails before it has reached a parameter is made again."""

    def fail(gradient):
        raise ValueError("once")

    output = model(x_of(rank))
    handle = output.register_hook(fail)
    with pytest.raises(ValueError, match="once"):
        loss_of(output).backward()
    handle.remove()
    loss_of(model(x_of(rank))).backward()


def penalty_first(model, module, rank):
    """The last parameter is ready before the outputs are reached: its bucket comes first."""
    (loss_of(model(x_of(rank))) + module[-1].bias.abs().sum()).backward()


@pytest.mark.parametrize(
    "fill",
    [
        with_inputs,
        penalty_on_gradients,
        checkpointed_outside,
        checkpointed_outside_reentrant,
        output_changed_in_place,
        hook_that_scales,
        zeros_between,
        failed_before,
        penalty_first,
    ],
)
@pytest.mark.parametrize("unused", [False, True])
def test_backwards_that_are_exact(fill, unused):
    both_ways(fill, steps=2, unused=unused)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        with SEEDING:
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def test_parameters_that_two_modules_share():
    both_ways(lambda model, module, rank: loss_of(model(x_of(rank))).backward(), Tied)


class LossOnly(nn.Module):
    """The last parameter is used by the loss alone and large enough for a bucket of its own, which is the first."""

    def __init__(self):
        super().__init__()
        self.body = network()
        self.large = nn.Parameter(torch.full((500, 700), 0.5, dtype=torch.float64))

    def forward(self, x):
        return self.body(x)


def test_a_bucket_that_is_ready_before_the_outputs_are_reached():
    def fill(model, module, rank):
        (loss_of(model(x_of(rank))) + (rank + 1) * module.large.square().mean()).backward()

    both_ways(fill, LossOnly, steps=2)
    both_ways(fill, LossOnly, steps=2, unused=True)


class Recurrent(nn.Module):
    """Returns the state that it was given as well."""

    def __init__(self):
        super().__init__()
        self.body = network()

    def forward(self, x, before=None):
        return self.body(x), before


def test_tensors_that_pass_through_belong_to_the_forward_that_made_them():
    def fill(model, module, rank):
        first, _ = model(x_of(rank))
        _, passed = model(batch(rank, 1, 9 - 8 * rank), first)
        loss_of(passed).backward()

    both_ways(fill, Recurrent)


class Switched(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = network(1), network(2)

    def forward(self, x, side):
        return getattr(self, side)(x)


@pytest.mark.parametrize("sizes", [(3, 3), (2, 6)])
def test_backwards_of_two_forwards_complete_each_other_if_they_weigh_the_same(sizes):
    def act(rank_group):
        synchronized, optimizer = join(rank_group, ragged(2), Switched(), every=50)
        with closing(synchronized):
            losses = [
                loss_of(synchronized(batch(rank_group.rank, number, size if rank_group.rank else 4), side))
                for number, (side, size) in enumerate(zip(("left", "right"), sizes, strict=True))
            ]
            for loss in losses:
                loss.backward()
            found = [parameter.grad.clone() for parameter in synchronized.parameters()]
            optimizer.step()
        return found

    if sizes[0] != sizes[1]:
        errors = errors_of(2, act)
        assert any(isinstance(error, SpecError) and "add up the losses" in str(error) for error in errors)
        assert all(isinstance(error, EvenlyError) for error in errors)
        return
    parts = []
    for rank, size in enumerate((4, 3)):
        model = Switched()
        for number, side in enumerate(("left", "right")):
            loss_of(model(batch(rank, number, size), side)).backward()
        parts.append([parameter.grad for parameter in model.parameters()])
    assert_same(run_ranks(2, act), mean_gradients((4, 3), parts))


def by_functional_call(model, module, rank):
    output = torch.func.functional_call(module, dict(module.named_parameters()), (x_of(rank),))
    loss_of(output).backward()


def by_functional_gradients(model, module, rank):
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def loss(values):
        return loss_of(torch.func.functional_call(module, values, (x_of(rank),)))

    for name, gradient in torch.func.grad(loss)(parameters).items():
        module.get_parameter(name).grad = gradient


def with_some_inputs(model, module, rank):
    loss_of(model(x_of(rank))).backward(inputs=list(module[0].parameters()))


def failed_in_the_middle(model, module, rank):
    def fail(gradient):
        raise ValueError("once")

    handle = module[0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="once"):
        loss_of(model(x_of(rank))).backward()
    handle.remove()
    loss_of(model(x_of(rank))).backward()


def added_by_hand(model, module, rank):
    loss_of(model(x_of(rank))).backward()
    loss_of(module(x_of(rank, 1))).backward(inputs=[module[0].weight])


@pytest.mark.parametrize(
    "fill", [by_functional_call, by_functional_gradients, with_some_inputs, failed_in_the_middle, added_by_hand]
)
def test_backwards_that_are_refused(fill):
    def act(rank_group):
        model = network()
        synchronized, optimizer = join(rank_group, ragged(2), model, every=50)
        with closing(synchronized):
            fill(synchronized, model, rank_group.rank)
            optimizer.step()

    errors = errors_of(2, act)
    assert any(isinstance(error, SpecError) for error in errors)
    for error in errors:
        assert isinstance(error, SpecError | PeerError)
        assert re.search("not averaged", str(error)), error


def test_optimizers_that_step_inside_backward_are_noticed():
    def act(rank_group):
        model = network()
        synchronized, optimizer = join(rank_group, ragged(2), model, every=2)
        for parameter in model.parameters():
            own = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
        with closing(synchronized):
            for number in range(4):
                loss_of(synchronized(x_of(rank_group.rank, number))).backward()
                optimizer.step()
                optimizer.zero_grad()
            synchronized.finish()

    assert any(isinstance(error, MismatchError) for error in errors_of(2, act))


def test_sparse_gradients_of_any_layer_are_refused():
    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(5, 3))

        def forward(self, x):
            return nn.functional.embedding(x.long().abs().clamp(max=4), self.table, sparse=True)

    def act(rank_group):
        synchronized, optimizer = join(rank_group, ragged(2), Lookup(), every=50)
        with closing(synchronized):
            synchronized(x_of(rank_group.rank)).square().mean().backward()
            optimizer.step()

    for error in errors_of(2, act):
        assert isinstance(error, EvenlyError | RuntimeError)
