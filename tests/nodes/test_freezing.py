"""Layers are frozen and unfrozen, groups are added and batches change their shape within one run."""

import copy
import re
import threading
from contextlib import closing
from functools import partial

import pytest
import torch
from torch import nn

from evenly.errors import EvenlyError, MismatchError, PeerError, SpecError
from evenly.nodes import join_nodes
from evenly.spec import Exchange, period_of
from tests.nodes.test_corners import errors_of
from tests.ranks import cluster_of, ragged, run_ranks
from tests.reference import Reference

SEEDING = threading.Lock()
STEPS = 14
BACKBONE = slice(0, 2)  # of the layers


def network() -> nn.Sequential:
    with SEEDING:
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(2, 5, 3, padding=1, bias=False),
            nn.BatchNorm2d(5),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(20, 7),
            nn.Tanh(),
            nn.Linear(7, 3),
        ).double()


def batch(rank: int, step: int, pixels: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    samples = 2 + (rank + step) % 3
    x = torch.randn(samples, 2, pixels, pixels, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (samples,), generator=generator)


def freeze(model, optimizer):
    model[BACKBONE].requires_grad_(False)


def unfreeze(model, optimizer):
    model[BACKBONE].requires_grad_(True)


def unfreeze_and_add(model, optimizer):
    model[BACKBONE].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[BACKBONE].parameters()), "lr": 0.01})


def freeze_last(model, optimizer):
    model[7].requires_grad_(False)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def adam_of_trained(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


STORIES = {
    "unfrozen later": ({0: freeze, 5: unfreeze}, momentum),
    "frozen later": ({4: freeze}, momentum),
    "there and back": ({0: freeze, 3: unfreeze, 7: freeze, 11: unfreeze}, momentum),
    "another part": ({2: freeze, 5: freeze_last, 9: unfreeze}, momentum),
    "group added": ({0: freeze, 5: unfreeze_and_add, 9: freeze}, adam_of_trained),
    "group added at once": ({0: freeze, 1: unfreeze_and_add}, adam_of_trained),
}


def run_reference(story, nodes, every, *, average_state=False, overlap=0, set_to_none=True, pixels=None):
    changes, make_optimizer = STORIES[story]
    model = network()
    if 0 in changes:
        changes[0](model, None)
    reference = Reference(model, make_optimizer, nodes, average_state=average_state)
    seen = []
    for step in range(STEPS):
        if step and step in changes:
            for replica, optimizer in zip(reference.replicas, reference.optimizers, strict=True):
                changes[step](replica, optimizer)
        size = (pixels or {}).get(step, 4)
        rows = [batch(rank, step, size) for rank in range(len(reference.replicas))]
        reference.step(rows, nn.functional.cross_entropy, set_to_none=set_to_none)
        if every and (step + 1) % every == 0:
            reference.exchange()
        seen.append([[t.detach().clone() for t in (*r.parameters(), *r.buffers())] for r in reference.replicas])
    if not every or STEPS % every:
        reference.exchange()
    seen.append([[t.detach().clone() for t in (*r.parameters(), *r.buffers())] for r in reference.replicas])
    return seen, [copy.deepcopy(optimizer.state_dict()) for optimizer in reference.optimizers]


def train(rank_group, story, nodes, every, *, find_unused=False, set_to_none=True, pixels=None, **exchange):
    changes, make_optimizer = STORIES[story]
    model = network()
    if 0 in changes:
        changes[0](model, None)
    optimizer = make_optimizer(model)
    synchronized = join_nodes(
        model,
        optimizer,
        rank_group=rank_group,
        cluster=cluster_of(nodes),
        period=period_of(every),
        exchange=Exchange(timeout_s=60.0, **exchange),
        find_unused_parameters=find_unused,
    )
    seen = []
    with closing(synchronized):
        for step in range(STEPS):
            if step and step in changes:
                changes[step](model, optimizer)
            x, y = batch(rank_group.rank, step, (pixels or {}).get(step, 4))
            optimizer.zero_grad(set_to_none=set_to_none)
            nn.functional.cross_entropy(synchronized(x), y).backward()
            optimizer.step()
            seen.append([t.detach().clone() for t in (*model.parameters(), *model.buffers())])
        synchronized.finish()
        seen.append([t.detach().clone() for t in (*model.parameters(), *model.buffers())])
    return seen, optimizer.state_dict()


def assert_equal_runs(found, expected, *, state=True):
    seen, states = expected
    for rank, (ours, own_state) in enumerate(found):
        for step, tensors in enumerate(ours):
            for number, (one, other) in enumerate(zip(tensors, seen[step][rank], strict=True)):
                torch.testing.assert_close(
                    one, other, rtol=1e-11, atol=1e-12, msg=lambda m, w=(rank, step, number): f"{w}: {m}"
                )
        if state:
            assert own_state["param_groups"] == states[rank]["param_groups"]
            torch.testing.assert_close(own_state["state"], states[rank]["state"], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("every", [3, "global"])
@pytest.mark.parametrize("story", STORIES)
def test_every_step_equals_the_reference(story, every):
    nodes = ragged(2, 1)
    groups, period = (ragged(3), None) if every == "global" else (nodes, every)
    expected = run_reference(story, groups, period)
    assert_equal_runs(run_ranks(3, train, story, nodes, every), expected, state=True)


EXCHANGES = {
    "overlap": {"overlap": 1},
    "codec": {"codec": "int8"},
    "outer": {"outer": "nesterov"},
    "adam outside": {"outer": {"name": "Adam", "settings": {"lr": 0.01}}, "overlap": 2},
    "fragments": {"fragments": 2, "overlap": 1, "codec": "bf16"},
    "averaged": {"optimizer_state": "average", "overlap": 1},
    "reset": {"optimizer_state": "reset", "fragments": 2, "outer": "nesterov", "codec": "int8"},
}


@pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)
@pytest.mark.parametrize("story", ["there and back", "group added"])
def test_all_nodes_end_with_the_same_bits(story, exchange):
    runs = run_ranks(3, partial(train, **exchange), story, ragged(2, 1), 3)
    for seen, _ in runs[1:]:
        assert all(map(torch.equal, seen[-1][:6], runs[0][0][-1][:6]))


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_frozen_layer_is_averaged_and_then_stays_but_for_rounding(overlap, codec):
    error = 1e-14 if codec == "fp32" else 1e-3  # what a code had left out is sent later
    for seen, _ in run_ranks(3, partial(train, overlap=overlap, codec=codec), "frozen later", ragged(2, 1), 3):
        backbone = [tensors[:3] for tensors in seen]
        assert not all(map(torch.equal, backbone[4], backbone[8]))  # nodes differed at step 4, and exchanged after it
        for later in backbone[9:-1]:
            assert all(map(partial(torch.allclose, rtol=0.0, atol=error), later, backbone[9]))


def small():
    with SEEDING:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 64), nn.Linear(64, 8))


def train_small(rank_group, nodes, act, every, **exchange):
    """Trains 20 steps, of which `act(step, model, synchronized, x)` returns the loss."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with closing(
        join_nodes(
            model,
            optimizer,
            rank_group=rank_group,
            cluster=cluster_of(nodes),
            period=period_of(every),
            exchange=Exchange(**exchange),
        )
    ) as synchronized:
        for step in range(20):
            generator = torch.Generator().manual_seed(100 * rank_group.rank + step)
            act(step, model, synchronized, torch.randn(4, 8, generator=generator)).backward()
            optimizer.step()
            optimizer.zero_grad()
        synchronized.finish()
    return [parameter.detach() for parameter in model.parameters()]


def require_equal_ranks(ranks, *arguments, **exchange):
    first, *others = run_ranks(ranks, partial(train_small, **exchange), *arguments)
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.parametrize("unfrozen_at", [6, 7, 8])
def test_layers_that_move_to_another_fragment_are_averaged(unfrozen_at):
    def act(step, model, synchronized, x):
        model[1].requires_grad_(step < 5)
        model[2:].requires_grad_(step >= unfrozen_at)
        return synchronized(x).square().mean()

    require_equal_ranks(2, ragged(1, 1), act, 4, fragments=2)


def test_two_changes_before_one_step_are_compared_each():
    def act(step, model, synchronized, x):
        if step == 4:
            model[0].requires_grad_(False)
            synchronized(x)
            model[0].requires_grad_(True)
        return synchronized(x).square().mean()

    require_equal_ranks(2, ragged(1, 1), act, 50)


def test_a_layer_may_be_frozen_for_one_of_two_forwards():
    def act(step, model, synchronized, x):
        first = synchronized(x)
        model[0].requires_grad_(False)
        second = synchronized(x + 1)
        model[0].requires_grad_(True)
        return first.square().mean() + second.square().mean()

    require_equal_ranks(3, ragged(2, 1), act, 5)


def test_gradients_that_are_set_to_zero_let_the_optimizer_go_on_with_frozen_layers():
    expected = run_reference("frozen later", ragged(2, 1), 3, set_to_none=False)
    runs = run_ranks(3, partial(train, set_to_none=False), "frozen later", ragged(2, 1), 3)
    assert_equal_runs(runs, expected)
    assert not torch.equal(runs[0][0][-1][0], runs[0][0][10][0])  # momentum and weight decay move them, as in torch


def test_with_unused_parameters_and_batches_of_other_shapes():
    pixels = {2: 6, 3: 6, 4: 5, 8: 7, 9: 7, 13: 8}
    expected = run_reference("there and back", ragged(2, 1), 3, pixels=pixels)
    runs = run_ranks(3, partial(train, find_unused=True, pixels=pixels), "there and back", ragged(2, 1), 3)
    assert_equal_runs(runs, expected)


def test_optimizer_state_is_averaged_as_in_the_reference():
    expected = run_reference("there and back", ragged(2, 1), 3, average_state=True)
    runs = run_ranks(3, partial(train, optimizer_state="average"), "there and back", ragged(2, 1), 3)
    assert_equal_runs(runs, expected)


def test_the_outer_optimizer_steps_what_is_trained():
    """The anchor of a layer that is unfrozen is its value then; all others keep their momentum."""
    settings = {"name": "SGD", "settings": {"lr": 0.7, "momentum": 0.9, "nesterov": True}}
    runs = run_ranks(3, partial(train, outer=settings), "unfrozen later", ragged(2, 1), 3)
    expected = outer_reference("unfrozen later", ragged(2, 1), 3, settings["settings"])
    for rank, (seen, _) in enumerate(runs):
        for step, tensors in enumerate(seen[:-1]):
            for one, other in zip(tensors[:6], expected[step][rank], strict=False):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


def outer_reference(story, nodes, every, settings):
    changes, make_optimizer = STORIES[story]
    model = network()
    changes[0](model, None)
    reference = Reference(model, make_optimizer, nodes)
    anchors = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    outer = torch.optim.SGD(anchors, **settings)
    seen = []
    for step in range(STEPS):
        if step and step in changes:
            for replica, optimizer in zip(reference.replicas, reference.optimizers, strict=True):
                changes[step](replica, optimizer)
        rows = [batch(rank, step) for rank in range(len(reference.replicas))]
        reference.step(rows, nn.functional.cross_entropy)
        if (step + 1) % every == 0:
            reference.exchange()
            for anchor, average in zip(anchors, reference.replicas[0].parameters(), strict=True):
                anchor.grad = anchor.detach() - average.detach() if average.requires_grad else None
            outer.step()
            with torch.no_grad():
                for replica in reference.replicas:
                    for parameter, anchor in zip(replica.parameters(), anchors, strict=True):
                        if parameter.requires_grad:
                            parameter.copy_(anchor)
        seen.append([[p.detach().clone() for p in r.parameters()] for r in reference.replicas])
    return seen


def disagree(rank_group, wrong, *, every=50, nodes=None, ranks=(1,)):
    model = network()
    model[0].requires_grad_(False)
    optimizer = momentum(model)
    synchronized = join_nodes(
        model,
        optimizer,
        rank_group=rank_group,
        cluster=cluster_of(nodes or ragged(3)),
        period=period_of(every),
        exchange=Exchange(timeout_s=30.0),
    )
    with closing(synchronized):
        for step in range(8):
            if step == 3:
                wrong(model, optimizer, rank_group.rank in ranks)
            x, y = batch(rank_group.rank, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(synchronized(x), y).backward()
            optimizer.step()


def one_does_not_follow(model, optimizer, is_wrong):
    model[0].requires_grad_(not is_wrong)


def one_alone_freezes(model, optimizer, is_wrong):
    model[5].bias.requires_grad_(not is_wrong)


def others_are_frozen(model, optimizer, is_wrong):
    model[7 if is_wrong else 5].bias.requires_grad_(False)


def other_groups(model, optimizer, is_wrong):
    group = optimizer.param_groups[0]["params"]
    moved = [group.pop()]
    optimizer.add_param_group({"params": moved, "lr": 0.1 if is_wrong else 0.2})


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (one_does_not_follow, "'0.weight'"),
        (one_alone_freezes, "'5.bias'"),
        (others_are_frozen, "'5.bias'"),
        (other_groups, "group 1"),
    ],
)
@pytest.mark.parametrize("every", [50, "global"])
def test_ranks_that_do_not_train_the_same_are_named_at_that_step(wrong, word, every):
    nodes = ragged(2, 1) if every == "global" else ragged(3)
    for error in errors_of(3, partial(disagree, wrong=wrong, every=every, nodes=nodes)):
        assert isinstance(error, MismatchError)
        assert word in str(error)


def test_nodes_that_do_not_train_the_same_are_refused_before_anything_is_merged():
    act = partial(disagree, wrong=one_alone_freezes, every=5, nodes=ragged(2, 1), ranks=(2,))
    for error in errors_of(3, act):
        assert isinstance(error, EvenlyError)
        assert "'5.bias'" in str(error)


def refused(change, words):
    def act(rank_group):
        model = network()
        freeze(model, None)
        optimizer = adam_of_trained(model)
        synchronized = join_nodes(
            model,
            optimizer,
            rank_group=rank_group,
            cluster=cluster_of(ragged(2)),
            period=period_of(5),
            exchange=Exchange(timeout_s=30.0),
        )
        with closing(synchronized):
            for step in range(4):
                if step == 2:
                    change(model, optimizer, synchronized)
                x, y = batch(rank_group.rank, step)
                nn.functional.cross_entropy(synchronized(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    for error in errors_of(2, act):
        assert isinstance(error, SpecError | PeerError)
        assert re.search(words, str(error)), error


def test_what_cannot_be_followed_is_refused():
    def without_optimizer(model, optimizer, synchronized):
        model[0].requires_grad_(True)

    def new_layer(model, optimizer, synchronized):
        model[5] = nn.Sequential(model[5], nn.Linear(7, 7).double())
        optimizer.add_param_group({"params": list(model[5][1].parameters())})

    def inside_accumulation(model, optimizer, synchronized):
        x, y = batch(0, 0)
        with synchronized.no_sync():
            nn.functional.cross_entropy(synchronized(x), y).backward()
        model[7].bias.requires_grad_(False)

    refused(without_optimizer, "optimizer trains no '0.weight'")
    refused(new_layer, "the network got the parameter '5.0.weight'|the network got the parameter '5.1.weight'")
    refused(inside_accumulation, r"inside no_sync\(\)")


def test_a_scheduler_follows_the_groups_that_were_added():
    def act(rank_group):
        model = network()
        freeze(model, None)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.4)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        synchronized = join_nodes(
            model,
            optimizer,
            rank_group=rank_group,
            cluster=cluster_of(ragged(1, 1)),
            period=period_of(2),
            exchange=Exchange(timeout_s=30.0),
        )
        rates = []
        with closing(synchronized):
            for step in range(4):
                if step == 2:
                    model[BACKBONE].requires_grad_(True)
                    group = {"params": list(model[BACKBONE].parameters()), "lr": 0.8, "initial_lr": 0.8}
                    optimizer.add_param_group(group)
                    schedule.base_lrs.append(0.8)
                x, y = batch(rank_group.rank, step)
                nn.functional.cross_entropy(synchronized(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                rates.append([group["lr"] for group in optimizer.param_groups])
        return rates

    assert run_ranks(2, act) == [[[0.2], [0.1], [0.05, 0.4], [0.025, 0.2]]] * 2
