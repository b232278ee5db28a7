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
