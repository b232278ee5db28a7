"""Steps whose gradients were not averaged inside the node: refused at that step, or averaged exactly."""

import itertools
import re
import time
from contextlib import closing, nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from evenly.errors import MismatchError, PeerError, SpecError
from evenly.exchange.agreement import Agreement
from evenly.exchange.tensors.fingerprint import fingerprint
from evenly.nodes import join_nodes
from evenly.spec import period_of
from tests.nodes.test_corners import SEEDING, errors_of, join
from tests.ranks import cluster_of, ragged, run_ranks


def network(seed=0):
    with SEEDING:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(rank, number, size=None):
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(size or rank + 2, 4, generator=generator, dtype=torch.float64)


def gradients_of(model, x, factor=1.0):
    model.zero_grad()
    (factor * model(x).square().mean()).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def mean_gradients(sizes, parts):
    """Returns the mean over ranks of each parameter's gradient, weighted by samples."""
    total = sum(sizes)
    return [
        sum(size * g for size, g in zip(sizes, gradients, strict=True)) / total
        for gradients in zip(*parts, strict=True)
    ]


def expected_gradients(sizes_by_backward):
    """Returns the sum over backwards of the weighted mean gradient, for ranks with batches of these sizes."""
    model = network()
    found = None
    for number, sizes in enumerate(sizes_by_backward):
        parts = [gradients_of(model, batch(rank, number, size)) for rank, size in enumerate(sizes)]
        mean = mean_gradients(sizes, parts)
        found = mean if found is None else [a + b for a, b in zip(found, mean, strict=True)]
    return found


def loss_of(output):
    return output.square().mean()


def run_steps(loop, *, nodes=None, every=50, steps=1, **settings):
    """Returns the gradients that each rank steps with, after `loop` has filled them."""

    def act(rank_group):
        model = network()
        synchronized, optimizer = join(rank_group, nodes or ragged(2), model, every=every, **settings)
        with closing(synchronized):
            for _ in range(steps):
                loop(synchronized, optimizer, rank_group.rank)
                found = [parameter.grad.clone() for parameter in model.parameters()]
                optimizer.step()
                optimizer.zero_grad()
        return found

    return run_ranks(sum(map(len, nodes or ragged(2))), act)


def assert_same(found, expected):
    for of_rank in found:
        for one, other in zip(of_rank, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_two_backwards_of_one_forward():
    def loop(model, optimizer, rank):
        loss = loss_of(model(batch(rank, 0)))
        loss.backward(retain_graph=True)
        loss.backward()

    once = expected_gradients([[2, 3]])
    assert_same(run_steps(loop), [2 * gradient for gradient in once])


@pytest.mark.parametrize("turned", [False, True])
def test_two_forwards_then_two_backwards(turned):
    def loop(model, optimizer, rank):
        losses = [loss_of(model(batch(rank, number, rank + 2 + number * (3 - 2 * rank)))) for number in range(2)]
        for loss in reversed(losses) if turned else losses:
            loss.backward()

    assert_same(run_steps(loop), expected_gradients([[2, 3], [5, 4]]))


def test_two_forwards_and_one_backward_count_all_samples():
    def loop(model, optimizer, rank):
        (loss_of(model(batch(rank, 0, 2))) + loss_of(model(batch(rank, 1, 2 + 4 * rank)))).backward()

    model = network()
    parts = []
    for rank in range(2):
        first, second = (gradients_of(model, batch(rank, n, s)) for n, s in ((0, 2), (1, 2 + 4 * rank)))
        parts.append([a + b for a, b in zip(first, second, strict=True)])
    assert_same(run_steps(loop), mean_gradients([4, 8], parts))


def test_forwards_that_train_different_layers_share_one_backward():
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = network(), network(1)

        def forward(self, x, head):
            return getattr(self, head)(x)

    def act(rank_group):
        model = TwoHeads()
        synchronized, _ = join(rank_group, ragged(2), model, every=50)
        with closing(synchronized):
            small, large = batch(rank_group.rank, 0, 2), batch(rank_group.rank, 1, 2 + 4 * rank_group.rank)
            (loss_of(synchronized(small, "first")) + loss_of(synchronized(large, "second"))).backward()
            return [parameter.grad.clone() for parameter in model.parameters()]

    def part(rank):
        first, second = network(), network(1)
        return [*gradients_of(first, batch(rank, 0, 2)), *gradients_of(second, batch(rank, 1, 2 + 4 * rank))]

    assert_same(run_ranks(2, act), mean_gradients([4, 8], [part(0), part(1)]))


def test_a_forward_whose_output_is_not_used_counts_no_samples():
    def loop(model, optimizer, rank):
        model(batch(rank, 7, 9 * rank + 1))
        with model.no_sync():
            model(batch(rank, 8, 9 * rank + 1))
        loss_of(model(batch(rank, 0))).backward()
        model(batch(rank, 7, 9 * rank + 1))

    assert_same(run_steps(loop), expected_gradients([[2, 3]]))


def test_a_forward_after_which_nothing_was_trained_does_not_end_accumulation():
    def loop(model, optimizer, rank):
        model(batch(rank, 7, 1))  # with gradients, and without a backward
        with model.no_sync():
            (loss_of(model(batch(rank, 0, 2))) / 2).backward()
        (loss_of(model(batch(rank, 1, 2 + 4 * rank))) / 2).backward()

    model = network()
    parts = []
    for rank in range(2):
        first, second = (gradients_of(model, batch(rank, n, s), 0.5) for n, s in ((0, 2), (1, 2 + 4 * rank)))
        parts.append([a + b for a, b in zip(first, second, strict=True)])
    assert_same(run_steps(loop), mean_gradients([4, 8], parts))


def test_abandoned_gradients_count_no_samples():
    def loop(model, optimizer, rank):
        with model.no_sync():
            loss_of(model(batch(rank, 7, 9 * rank + 1))).backward()
        optimizer.zero_grad()
        loss_of(model(batch(rank, 0))).backward()

    assert_same(run_steps(loop), expected_gradients([[2, 3]]))


def test_gradients_of_inputs_and_penalties_on_them():
    def loop(model, optimizer, rank):
        x = batch(rank, 0).requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (loss_of(output) + slope.square().mean()).backward()

    def part(rank):
        model, x = network(), batch(rank, 0).requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (loss_of(output) + slope.square().mean()).backward()
        return [parameter.grad for parameter in model.parameters()]

    assert_same(run_steps(loop), mean_gradients([2, 3], [part(0), part(1)]))


def test_a_parameter_that_only_the_loss_uses():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.scale = network(), nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x):
            return self.body(x)

    def act(rank_group):
        model = Scaled()
        synchronized, optimizer = join(rank_group, ragged(2), model, every=50)
        with closing(synchronized):
            loss = loss_of(synchronized(batch(rank_group.rank, 0))) * model.scale
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            return [parameter.tolist() for parameter in model.parameters()]

    first, second = run_ranks(2, act)
    assert first == second


def by_autograd_grad(model, rank):
    loss = loss_of(model(batch(rank, 0)))
    for parameter, gradient in zip(
        model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
    ):
        parameter.grad = gradient


def by_plain_module(model, rank):
    loss_of(model.module(batch(rank, 0))).backward()


def by_plain_module_too(model, rank):
    loss_of(model(batch(rank, 0))).backward()
    loss_of(model.module(batch(rank, 1))).backward()


def by_a_layer(model, rank):
    loss_of(model(batch(rank, 0))).backward()
    model.module[0](batch(rank, 1)).sum().backward()


def in_no_sync(model, rank):
    with model.no_sync():
        loss_of(model(batch(rank, 0))).backward()


def after_no_sync(model, rank):
    loss_of(model(batch(rank, 0))).backward()
    in_no_sync(model, rank)


def of_one_layer(model, rank):
    model(batch(rank, 0))
    model.module[0](batch(rank, 1)).sum().backward()


@pytest.mark.parametrize(
    "fill",
    [by_autograd_grad, by_plain_module, by_plain_module_too, by_a_layer, in_no_sync, after_no_sync, of_one_layer],
)
@pytest.mark.parametrize("every", [50, "global"])
def test_a_step_with_gradients_that_were_not_averaged_is_refused(fill, every):
    def act(rank_group):
        synchronized, optimizer = join(rank_group, ragged(2, 1), network(), every=every)
        before = [parameter.detach().clone() for parameter in synchronized.parameters()]
        with closing(synchronized):
            fill(synchronized, rank_group.rank)
            try:
                optimizer.step()
            finally:
                after = list(synchronized.parameters())
                assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))

    errors = errors_of(3, act)
    assert any(isinstance(error, SpecError) for error in errors)
    for error in errors:
        assert isinstance(error, SpecError | PeerError)
        assert re.search(r"not averaged|no gradient", str(error)), error


@pytest.mark.parametrize("every", [50, "global", 1])
@pytest.mark.parametrize("change", ["added", "outside"])
@pytest.mark.parametrize("nodes", [ragged(2), ragged(1, 1)])
def test_parameters_that_came_later_are_refused_at_the_step(change, every, nodes):
    def act(rank_group):
        model = network()
        synchronized, optimizer = join(rank_group, nodes, model, every=every)
        with closing(synchronized):
            extra = nn.Linear(3, 3).double()
            if change == "added":
                model.append(extra)
            optimizer.add_param_group({"params": list(extra.parameters())})
            output = synchronized(batch(rank_group.rank, 0))
            loss_of(extra(output) if change == "outside" else output).backward()
            optimizer.step()

    for error in errors_of(2, act):
        assert isinstance(error, SpecError | PeerError)
        assert re.search(r"parameter", str(error)), error


def rate_differs(model, optimizer, rank):
    optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * rank


def momentum_differs(model, optimizer, rank):
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, float(rank))


def values_differ(model, optimizer, rank):
    model.module[2].bias.data += rank


@pytest.mark.parametrize("change", [rate_differs, momentum_differs, values_differ])
@pytest.mark.parametrize(("every", "overlap"), [(3, 0), (3, 2), ("global", 0)])
@pytest.mark.parametrize("nodes", [ragged(2), ragged(2, 1)])
def test_ranks_of_a_node_that_hold_different_parameters_are_named(change, every, overlap, nodes):

    def act(rank_group):
        model = network()
        own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        synchronized, optimizer = join(rank_group, nodes, model, every=every, optimizer=own, overlap=overlap)
        with closing(synchronized):
            for step in range(7):
                if step == 1:
                    change(synchronized, optimizer, rank_group.rank)
                loss_of(synchronized(batch(rank_group.rank, step))).backward()
                optimizer.step()
                optimizer.zero_grad()
            synchronized.finish()

    errors = errors_of(sum(map(len, nodes)), act)
    named = [error for error in errors if isinstance(error, MismatchError)]
    assert named
    first = "'2.bias'" if change is values_differ else "'0.weight'"
    for error in named:
        assert first in str(error)
        assert "step" in str(error)
        assert re.search(r"ranks? \[?0", str(error))
    if change is rate_differs:
        assert any("'lr'" in str(error) for error in named)


def test_parameters_trained_without_the_optimizer_are_noticed_at_the_end():
    def act(rank_group):
        synchronized, _ = join(rank_group, ragged(1, 1), network())
        with closing(synchronized):
            loss_of(synchronized(batch(rank_group.rank, 0))).backward()
            with torch.no_grad():
                for parameter in synchronized.parameters():
                    parameter -= 0.1 * parameter.grad
            synchronized.finish()

    for error in errors_of(2, act):
        assert isinstance(error, MismatchError | PeerError)
        assert "optimizer" in str(error)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_takes_the_same_way_on_all_ranks_of_a_node(search):
    def act(rank_group):
        model = network()
        own = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn=search)
        synchronized, optimizer = join(rank_group, ragged(2), model, every=2, optimizer=own)
        with closing(synchronized):
            for number in range(3):

                def closure(number=number):
                    optimizer.zero_grad()
                    loss = loss_of(synchronized(batch(rank_group.rank, number)))
                    loss.backward()
                    return loss

                optimizer.step(closure)
            synchronized.finish()
        return [parameter.detach().clone() for parameter in model.parameters()]

    found = run_ranks(2, act)
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn=search)
    for number in range(3):

        def closure(number=number):
            optimizer.zero_grad()
            loss = sum(len(x) * loss_of(model(x)) for x in (batch(0, number), batch(1, number))) / 5
            loss.backward()
            return loss

        optimizer.step(closure)
    for of_rank in found:
        for one, other in zip(of_rank, model.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


def test_an_optimizer_that_communicates_by_itself_is_refused():
    class ZeroRedundancyOptimizer(torch.optim.SGD):
        pass

    ZeroRedundancyOptimizer.__module__ = "torch.distributed.optim.zero_redundancy_optimizer"

    def act(rank_group):
        model = network()
        join(rank_group, ragged(2), model, optimizer=ZeroRedundancyOptimizer(model.parameters(), lr=0.1))

    for error in errors_of(2, act):
        assert "ZeroRedundancyOptimizer" in str(error)


@pytest.mark.parametrize("nodes", [ragged(1), ragged(2), ragged(2, 1)])
@pytest.mark.parametrize("paused", [False, True])
def test_a_borrowed_micro_batch_adds_nothing_to_those_before_it(nodes, paused):
    """A batch that counts no samples, in any place of an accumulation."""

    def count(x):
        return 0 if x.shape[0] == 7 else len(x)

    ranks = sum(map(len, nodes))

    def act(rank_group):
        model = network()
        synchronized, _ = join(rank_group, nodes, model, every="global", count=count)
        with closing(synchronized):
            pause = synchronized.no_sync if paused else nullcontext
            with pause():
                loss_of(synchronized(batch(rank_group.rank, 0))).backward()
                loss_of(synchronized(batch(rank_group.rank, 1, 7))).backward()
            loss_of(synchronized(batch(rank_group.rank, 2, 7))).backward()
            return [parameter.grad.clone() for parameter in model.parameters()]

    found = run_ranks(ranks, act)
    expected = expected_gradients([[rank + 2 for rank in range(ranks)]])
    assert_same(found, expected)


@pytest.mark.parametrize("scale", [1e-3, 0.25, 1e5])
def test_fractional_counts_weigh_and_do_not_scale(scale):
    def act(rank_group):
        model = network()
        synchronized, _ = join(rank_group, ragged(2), model, count=lambda x: scale * len(x))
        with closing(synchronized):
            loss_of(synchronized(batch(rank_group.rank, 0))).backward()
            return [parameter.grad.clone() for parameter in model.parameters()]

    assert_same(run_ranks(2, act), expected_gradients([[2, 3]]))


@pytest.mark.parametrize("count", [1e-30, 1e30])
def test_counts_that_gradients_cannot_be_multiplied_with_are_refused(count):
    def act(rank_group):
        synchronized, _ = join(rank_group, ragged(2), network(), count=lambda x: count)
        with closing(synchronized):
            synchronized(batch(rank_group.rank, 0))

    for error in errors_of(2, act):
        assert "count=" in str(error)


class TwoBranches(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = network(), network(1), network(2)

    def forward(self, x):
        shared = self.trunk(x).sum(1, keepdim=True)
        return self.left(x), self.right(x), shared


def test_backwards_that_train_different_layers_complete_each_other():
    def act(rank_group):
        model = TwoBranches()
        model.trunk.requires_grad_(False)
        synchronized, optimizer = join(rank_group, ragged(2), model, every=50)
        with closing(synchronized):
            left, right, _ = synchronized(batch(rank_group.rank, 0))
            loss_of(left).backward()
            loss_of(right).backward()
            optimizer.step()
            return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    parts = [[g for seed in (1, 2) for g in gradients_of(network(seed), batch(rank, 0))] for rank in range(2)]
    assert_same(run_ranks(2, act), mean_gradients([2, 3], parts))


def test_backwards_that_share_layers_and_leave_others_out_are_refused():
    def act(rank_group):
        synchronized, optimizer = join(rank_group, ragged(2), TwoBranches(), every=50)
        with closing(synchronized):
            left, right, shared = synchronized(batch(rank_group.rank, 0))
            (loss_of(left) + loss_of(shared)).backward(retain_graph=True)
            (loss_of(right) + loss_of(shared)).backward()
            optimizer.step()

    for error in errors_of(2, act):
        assert isinstance(error, SpecError)
        assert "add up the losses" in str(error)


def test_in_no_sync_a_loss_may_use_some_layers_only():
    def act(rank_group):
        model = TwoBranches()
        model.trunk.requires_grad_(False)
        synchronized, optimizer = join(rank_group, ragged(2), model, every=50)
        with closing(synchronized):
            with synchronized.no_sync():
                first, second = synchronized(batch(rank_group.rank, 1)), synchronized(batch(rank_group.rank, 2))
                loss_of(first[0]).backward(retain_graph=True)
                loss_of(second[0]).backward()
                loss_of(first[1]).backward()
            left, right, _ = synchronized(batch(rank_group.rank, 0))
            (loss_of(left) + loss_of(right)).backward()
            optimizer.step()
            return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def part(rank):
        left, right = network(1), network(2)
        of_left = [gradients_of(left, batch(rank, number)) for number in (0, 1, 2)]
        of_right = [gradients_of(right, batch(rank, number)) for number in (0, 1)]
        return [*(sum(g) for g in zip(*of_left, strict=True)), *(sum(g) for g in zip(*of_right, strict=True))]

    assert_same(run_ranks(2, act), mean_gradients([2, 3], [part(0), part(1)]))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network()

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=reentrant)

    def loop(model, optimizer, rank):
        for _ in range(2):
            loss_of(model(batch(rank, 0).requires_grad_())).backward()

    def act(rank_group):
        model = Checkpointed()
        synchronized, optimizer = join(rank_group, ragged(2), model, every=50)
        with closing(synchronized):
            loop(synchronized, optimizer, rank_group.rank)
            optimizer.step()
            return [parameter.grad.clone() for parameter in model.parameters()]

    assert_same(run_ranks(2, act), [2 * gradient for gradient in expected_gradients([[2, 3]])])


@pytest.mark.parametrize("kind", ["tuple", "mapping", "dataclass", "object"])
def test_outputs_of_any_kind(kind):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network()

        def forward(self, x):
            output = self.body(x)
            return {"tuple": (1, [output]), "mapping": {"y": output}, "dataclass": Output(output)}.get(
                kind, Box(output)
            )

    def opened(output):
        return {"tuple": lambda: output[1][0], "mapping": lambda: output["y"]}.get(kind, lambda: output.y)()

    def act(rank_group):
        model = Wrapped()
        synchronized, optimizer = join(rank_group, ragged(2), model, every=50)
        with closing(synchronized):
            for number in range(2):
                loss_of(opened(synchronized(batch(rank_group.rank, number)))).backward()
            optimizer.step()
            return [parameter.grad.clone() for parameter in model.parameters()]

    assert_same(run_ranks(2, act), expected_gradients([[2, 3], [2, 3]]))


@dataclass
class Output:
    y: torch.Tensor


class Box:
    def __init__(self, y):
        self.y = y


@pytest.mark.parametrize("loop", [by_plain_module, in_no_sync, by_autograd_grad])
def test_a_rank_alone_in_the_world_has_nobody_to_differ_from(loop):
    def act(rank_group):
        synchronized, optimizer = join(rank_group, ragged(1), network())
        with closing(synchronized):
            loop(synchronized, rank_group.rank)
            gradients = [parameter.grad.clone() for parameter in synchronized.module.parameters()]
            optimizer.step()
            synchronized.finish()
            return gradients, [parameter.detach() for parameter in synchronized.module.parameters()]

    ((gradients, trained),) = run_ranks(1, act)
    plain = network()
    assert_same([gradients], gradients_of(plain, batch(0, 0)))
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same([trained], [parameter.detach() for parameter in plain.parameters()])


def test_unused_parameters_with_several_backwards():
    def act(rank_group):
        model = TwoBranches()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings = {"rank_group": rank_group, "cluster": cluster_of(ragged(2)), "period": period_of(50)}
        synchronized = join_nodes(model, optimizer, find_unused_parameters=True, **settings)
        with closing(synchronized):
            for number in range(2):
                left, right, _ = synchronized(batch(rank_group.rank, number))
                loss_of(left if number else right).backward()
            optimizer.step()
            assert all(parameter.grad is None for parameter in model.trunk.parameters())
            return [p.grad.clone() for part in (model.left, model.right) for p in part.parameters()]

    parts = [
        [*gradients_of(network(1), batch(rank, 1)), *gradients_of(network(2), batch(rank, 0))] for rank in range(2)
    ]
    assert_same(run_ranks(2, act), mean_gradients([2, 3], parts))


def test_gradients_that_are_zero_are_not_taken_for_given_up():
    def loop(model, optimizer, rank):
        with model.no_sync():
            (0.0 * loss_of(model(batch(rank, 0, 2 + 4 * rank)))).backward()
        loss_of(model(batch(rank, 1, 2))).backward()
        model(batch(rank, 7, 1))

    parts = [gradients_of(network(), batch(rank, 1, 2)) for rank in range(2)]
    assert_same(run_steps(loop), mean_gradients([4, 8], parts))


def test_fingerprints_do_not_depend_on_autocast():
    tensors = {"weight": torch.randn(300, 40, generator=torch.Generator().manual_seed(0))}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fingerprint(tensors).read() == fingerprint(tensors).read()
        inside = fingerprint(tensors).read()
    assert inside == fingerprint(tensors).read()


@pytest.mark.parametrize("differ", [True, False])
def test_nodes_with_different_learning_rates_are_told_of(differ, caplog):
    def act(rank_group):
        synchronized, optimizer = join(rank_group, ragged(1, 1), network(), every=2)
        with closing(synchronized):
            for step in range(4):
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + step * (1 + differ * rank_group.rank))
                loss_of(synchronized(batch(rank_group.rank, step))).backward()
                optimizer.step()
                optimizer.zero_grad()
            synchronized.finish()

    run_ranks(2, act)
    told = [record.getMessage() for record in caplog.records if "learning rates" in record.getMessage()]
    assert len(told) == int(differ)
    if differ:
        assert "node 0: 0.05, node 1: 0.0333333" in told[0]


def test_a_scheduler_that_steps_while_an_exchange_runs_makes_no_difference_between_nodes(caplog, monkeypatch):
    reach, exchanges = Agreement.reach, itertools.count()

    def reach_late(agreement, *args, **options):
        time.sleep(0.05 * (next(exchanges) % 2))  # on one of both ranks the scheduler has stepped by then
        return reach(agreement, *args, **options)

    def act(rank_group):
        synchronized, optimizer = join(rank_group, ragged(1, 1), network(), every=2, overlap=1)
        with closing(synchronized):
            for step in range(12):
                loss_of(synchronized(batch(rank_group.rank, step))).backward()
                optimizer.step()
                time.sleep(0.01)
                optimizer.param_groups[0]["lr"] *= 0.9
                optimizer.zero_grad()
            synchronized.finish()

    monkeypatch.setattr(Agreement, "reach", reach_late)
    run_ranks(2, act)
    assert not [record for record in caplog.records if "learning rates" in record.getMessage()]


@pytest.mark.parametrize("finishes", [True, False])
def test_closing_without_finish_says_that_nodes_differ(finishes, caplog):
    def act(rank_group):
        synchronized, optimizer = join(rank_group, ragged(1, 1), network(), every=2)
        with closing(synchronized):
            for step in range(3):
                loss_of(synchronized(batch(rank_group.rank, step))).backward()
                optimizer.step()
                optimizer.zero_grad()
            if finishes:
                synchronized.finish()

    run_ranks(2, act)
    told = [record.getMessage() for record in caplog.records if "call finish() before close()" in record.getMessage()]
    assert told == [] if finishes else len(told) == 2
