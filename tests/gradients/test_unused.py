"""find_unused_parameters: any part of the network may be used by any rank in any micro-batch, as on one device."""

import os
import random
import subprocess
import sys
from contextlib import closing, nullcontext

import pytest
import torch
from torch import nn

from evenly.errors import PeerError, SpecError
from evenly.nodes import join_nodes
from evenly.spec import Exchange, period_of
from tests.gradients.test_not_averaged import assert_same, batch, loss_of, network
from tests.nodes.test_corners import SEEDING, errors_of, join
from tests.ranks import cluster_of, ragged, run_ranks


class Heads(nn.Module):
    """A trunk and three heads, of which forward uses those that are named."""

    def __init__(self):
        super().__init__()
        with SEEDING:
            torch.manual_seed(0)
            self.trunk = nn.Linear(4, 4).double()
            self.heads = nn.ModuleList(nn.Linear(4, 2).double() for _ in range(3))

    def forward(self, x, used):
        shared = torch.tanh(self.trunk(x)) if "t" in used else x
        return [head(shared) for number, head in enumerate(self.heads) if str(number) in used]


def heads_loss(outputs):
    return sum(loss_of(output) for output in outputs)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def join_unused(rank_group, nodes, model, *, every=50, **settings):
    optimizer = optimizer_of(model)
    arguments = {"rank_group": rank_group, "cluster": cluster_of(nodes), "period": period_of(every), **settings}
    exchange = Exchange(timeout_s=20.0)
    return join_nodes(model, optimizer, exchange=exchange, find_unused_parameters=True, **arguments), optimizer


def reference(steps):
    """Returns the parameters after `steps`: for each step and rank its micro-batches, as (heads used, samples)."""
    model = Heads()
    optimizer = optimizer_of(model)
    for step, by_rank in enumerate(steps):
        sums = [None] * len(list(model.parameters()))
        for rank, micro in enumerate(by_rank):
            model.zero_grad()
            for number, (used, size) in enumerate(micro):
                if size:
                    heads_loss(model(batch(rank, 10 * step + number, size), used)).backward()
            weight = sum(size for _, size in micro)
            for place, parameter in enumerate(model.parameters()):
                if parameter.grad is not None:
                    so_far = 0.0 if sums[place] is None else sums[place]
                    sums[place] = so_far + weight * parameter.grad
        total = sum(size for micro in by_rank for _, size in micro)
        for parameter, gradient in zip(model.parameters(), sums, strict=True):
            parameter.grad = None if gradient is None else gradient / total
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def train(steps, *, nodes=None, to_none=True, count=None, limit_s=40.0):
    ranks = len(steps[0])

    def act(rank_group):
        model = Heads()
        synchronized, optimizer = join_unused(rank_group, nodes or ragged(ranks), model, count=count)
        with closing(synchronized):
            for step, by_rank in enumerate(steps):
                micro = by_rank[rank_group.rank]
                for number, (used, size) in enumerate(micro):
                    x = batch(rank_group.rank, 10 * step + number, size or 7)
                    with nullcontext() if number == len(micro) - 1 else synchronized.no_sync():
                        heads_loss(synchronized(x, used)).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
        return [parameter.detach().clone() for parameter in model.parameters()]

    return run_ranks(ranks, act, limit_s=limit_s)


STEPS = {
    "unequal numbers of micro-batches": [
        [[("t01", 2), ("t0", 3), ("t1", 1)], [("t1", 4)]],
        [[("t0", 2)], [("t1", 1), ("t0", 2), ("t1", 5)]],
    ],
    "used inside no_sync only": [
        [[("t2", 2), ("t0", 3)], [("t0", 1), ("t0", 2)]],
        [[("t0", 2)], [("t1", 3), ("t2", 3), ("t0", 1)]],
    ],
    "used by one rank only": [[[("t0", 2)], [("t1", 5)]], [[("t01", 2)], [("t1", 5)]]],
    "a head nobody uses": [[[("t0", 2)], [("t0", 5)]]] * 3,
    "the last micro-batch has another head": [[[("t0", 2), ("1", 3)], [("t0", 4), ("2", 1)]]] * 2,
    "three ranks": [
        [[("t0", 2), ("t1", 2)], [("t2", 5)], [("0", 1), ("0", 1), ("t0", 2)]],
        [[("t0", 2)], [("t0", 5), ("t0", 1), ("1", 1)], [("t2", 1)]],
    ],
}


@pytest.mark.parametrize("case", STEPS)
def test_any_use_of_heads_is_that_of_one_device(case):
    assert_same(train(STEPS[case]), reference(STEPS[case]))


def test_a_batch_without_samples_uses_nothing():
    steps = [
        [[("t0", 2)], [("t1", 0)]],
        [[("t0", 2), ("t2", 0)], [("t1", 3), ("t0", 0)]],
        [[("t01", 2)], [("t0", 0), ("t0", 3)]],
        [[("012", 0), ("0", 4)], [("t012", 0), ("t2", 1)]],
    ]
    found = train(steps, count=lambda x, used: 0 if len(x) == 7 else len(x))
    assert_same(found, reference(steps))


def random_steps(seed):
    draw = random.Random(seed)
    ranks = draw.choice([2, 3])

    def micro_batch():
        used = "".join(sorted(draw.sample("012", draw.randint(1, 3))))
        return draw.choice(["t", ""]) + used, draw.randint(0, 5)

    steps = [
        [[micro_batch() for _ in range(draw.randint(1, 4))] for _ in range(ranks)] for _ in range(draw.randint(1, 3))
    ]
    for by_rank in steps:
        by_rank[0].append(("t0", 2))  # somebody has samples
    return steps


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(100, 400), marks=pytest.mark.slow)])
def test_random_uses_of_heads(seeds):
    for seed in seeds:
        steps = random_steps(seed)
        found = train(steps, count=lambda x, used: 0 if len(x) == 7 else len(x))
        assert_same(found, reference(steps))


def test_ranks_that_are_nodes_of_their_own_leave_unused_gradients_none():
    def act(rank_group):
        model = Heads()
        synchronized, _ = join_unused(rank_group, ragged(1, 1), model)
        with closing(synchronized):
            heads_loss(synchronized(batch(rank_group.rank, 0), "t0")).backward()
            return [name for name, p in model.named_parameters() if p.grad is None]

    unused = [f"heads.{number}.{kind}" for number in (1, 2) for kind in ("weight", "bias")]
    assert run_ranks(2, act) == [unused, unused]


def test_several_forwards_and_backwards_with_other_heads():
    """Two forwards before two backwards, a second backward of one graph, and a penalty that only the loss knows."""

    def act(rank_group):
        model = Heads()
        synchronized, _ = join_unused(rank_group, ragged(2), model)
        with closing(synchronized):
            first = heads_loss(synchronized(batch(rank_group.rank, 0, 2), "t0"))
            second = heads_loss(synchronized(batch(rank_group.rank, 1, 2 + rank_group.rank), "1"))
            first.backward(retain_graph=True)
            second.backward()
            (first + model.heads[2].weight.square().sum()).backward()
            return [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]

    expected = [0.0] * 8
    for number, used, sizes in ((0, "t0", (2, 2)), (1, "1", (2, 3)), (0, "t0", (2, 2))):
        for rank, size in enumerate(sizes):
            model = Heads()
            heads_loss(model(batch(rank, number, size), used)).backward()
            expected = [
                e if p.grad is None else e + size / sum(sizes) * p.grad
                for e, p in zip(expected, model.parameters(), strict=True)
            ]
    expected[6] = expected[6] + 2 * Heads().heads[2].weight.detach()
    expected[7] = torch.zeros(())
    assert_same(run_ranks(2, act), expected)


def foreign_part(model, rank):
    heads_loss(model(batch(rank, 0), "t0")).backward()
    heads_loss(model.module(batch(rank, 1), "1")).backward()


def foreign_part_before(model, rank):
    heads_loss(model.module(batch(rank, 1), "1")).backward()
    heads_loss(model(batch(rank, 0), "t0")).backward()


def foreign_part_between(model, rank):
    loss = heads_loss(model(batch(rank, 0), "t0"))
    heads_loss(model.module(batch(rank, 1), "1")).backward()
    loss.backward()


def inside_no_sync(model, rank):
    with model.no_sync():
        heads_loss(model(batch(rank, 0), "t0")).backward()


@pytest.mark.parametrize("fill", [foreign_part, foreign_part_before, foreign_part_between, inside_no_sync])
def test_a_step_on_what_was_not_averaged_is_refused(fill):
    def act(rank_group):
        synchronized, optimizer = join_unused(rank_group, ragged(2), Heads())
        with closing(synchronized):
            fill(synchronized, rank_group.rank)
            optimizer.step()

    for error in errors_of(2, act):
        assert isinstance(error, SpecError | PeerError)
        assert "not averaged" in str(error)


def test_abandoned_micro_batches_leave_no_trace():
    """What only an abandoned backward has used has no gradient, as if it had not been."""

    def act(rank_group):
        model = Heads()
        synchronized, optimizer = join_unused(rank_group, ragged(2), model)
        with closing(synchronized):
            with synchronized.no_sync():
                heads_loss(synchronized(batch(rank_group.rank, 5, 9 * rank_group.rank + 1), "t2")).backward()
            optimizer.zero_grad()
            heads_loss(synchronized(batch(rank_group.rank, 0, 2), "t0")).backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert_same(run_ranks(2, act), reference([[[("t0", 2)], [("t0", 2)]]]))


MANY = """
import torch
from torch import nn
from contextlib import closing
from evenly.errors import SpecError
from tests.nodes.test_corners import join
from tests.ranks import ragged, run_ranks

class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full((2,), 1.0 + i)) for i in range(300))
    def forward(self, x, start, stop):
        return sum(x * self.weights[number] for number in range(start, stop))

def completing(party):
    model = Many()
    synchronized, optimizer = join(party, ragged(2), model, every=50)
    with closing(synchronized):
        with synchronized.no_sync():
            synchronized(torch.ones(3 * party.rank + 1, 2), 0, 7).mean().backward()
        first, second = (synchronized(torch.ones(2, 2), *part) for part in ((0, 150), (150, 300)))
        first.mean().backward()
        second.mean().backward()
        optimizer.step()
        return [weight.grad.tolist() for weight in model.weights]

first, second = run_ranks(2, completing)
assert first == second, (first[:9], second[:9])
assert first[0] == [1.0, 1.0] and first[299] == [0.5, 0.5], (first[0], first[299])

def overlapping(party):
    synchronized, optimizer = join(party, ragged(2), Many(), every=50)
    with closing(synchronized):
        first, second = (synchronized(torch.ones(2, 2), *part) for part in ((0, 150), (149, 300)))
        first.mean().backward()
        try:
            second.mean().backward()
        except SpecError as error:
            return str(error)

for text in run_ranks(2, overlapping):
    assert "'weights.150', 'weights.151', 'weights.152' and 147 more" in text, text
"""


def test_parameters_left_out_are_known_of_300():
    exec(MANY, {})


@pytest.mark.slow
@pytest.mark.parametrize("level", ["INFO", "DETAIL"])
def test_parameters_left_out_are_known_whatever_torch_prints(level):
    environment = {**os.environ, "TORCH_DISTRIBUTED_DEBUG": level}
    done = subprocess.run([sys.executable, "-c", MANY], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]


def test_networks_without_unused_parameters_count_what_parts_of_them_gave_in_no_sync():
    """Micro-batches that use a part of the network only, unequally many on the ranks of a node."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = network(1), network(2)

        def forward(self, x):
            return self.left(x), self.right(x)

    def total(model, rank, pause=nullcontext):
        for number in range(1, 2 + 3 * rank):
            with pause():
                loss_of(model(batch(rank, number))[number % 2]).backward()
        sum(map(loss_of, model(batch(rank, 0)))).backward()

    def act(rank_group):
        model = Two()
        synchronized, _ = join(rank_group, ragged(2), model, every=50)
        with closing(synchronized):
            total(synchronized, rank_group.rank, synchronized.no_sync)
            return [parameter.grad.clone() for parameter in model.parameters()]

    expected = [0.0] * 8
    weights = [2 * 2, 5 * 3]
    for rank, weight in enumerate(weights):
        model = Two()
        total(model, rank)
        expected = [e + weight / sum(weights) * p.grad for e, p in zip(expected, model.parameters(), strict=True)]
    assert_same(run_ranks(2, act), expected)
