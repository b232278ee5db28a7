"""Mistakes that were seen in other implementations of infrequent averaging, each shown not to be made here.

Elsewhere in this folder: steps skipped by a GradScaler, an exchange after step 1, two optimizers, tied, frozen and
unused parameters, closures and hooks (test_loops.py); buffers (test_exactness.py); everything of a period in the
checkpoint (tests/session/test_resume.py); errors that reach all ranks at once (test_faults.py).
"""

import copy

import pytest
import torch
from torch import nn

import evenly.comm.blocks.reducer as waits_for_ranks
import evenly.exchange.anchors as points
from evenly.nodes import join_nodes
from evenly.spec import EverySteps, Exchange
from tests.ranks import cluster_of, ragged, run_ranks

FORMS = {
    "waited for": {},
    "overlapped": {"overlap": 2},
    "int8": {"codec": "int8", "overlap": 2},
    "outer": {"outer": "nesterov", "codec": "bf16"},
    "fragments": {"fragments": 2, "overlap": 1},
}


def step(model, optimizer, seed, width=6):
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def joined(rank_group, model, optimizer, every=4, nodes=None, **exchange):
    cluster = cluster_of(nodes or ragged(1, 1))
    settings = {"period": EverySteps(every), "exchange": Exchange(**exchange)}
    return join_nodes(model, optimizer, rank_group=rank_group, cluster=cluster, **settings)


def network():
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 5)
    return model


@pytest.mark.parametrize("form", FORMS)
def test_a_learning_rate_of_0_changes_nothing(form):
    """Slow momentum by the learning rate divides by 0 in a warm-up."""

    def act(rank_group):
        model = network()
        before = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        synchronized = joined(rank_group, model, optimizer, **FORMS[form])
        for number in range(9):
            step(synchronized, optimizer, 10 * number + rank_group.rank)
        synchronized.finish()
        synchronized.close()
        pairs = zip(model.parameters(), before.parameters(), strict=True)
        return [float((a - b).detach().abs().max()) for a, b in pairs]

    for differences in run_ranks(2, act):
        assert max(differences) < 1e-7


@pytest.mark.parametrize("form", FORMS)
def test_parameters_stay_where_they_are(form):
    """Rebinding to a flat buffer loses channels_last, pointers and views, and a saved bias writes the whole buffer."""

    def act(rank_group):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 2)).to(memory_format=torch.channels_last)
        view = model[0].weight.detach()[2:4]
        kept = [(p.data_ptr(), p.stride(), p.untyped_storage().nbytes()) for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        synchronized = joined(rank_group, model, optimizer, **FORMS[form])
        for number in range(9):
            x = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(number * 2 + rank_group.rank))
            synchronized(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        synchronized.finish()
        synchronized.close()
        assert [(p.data_ptr(), p.stride(), p.untyped_storage().nbytes()) for p in model.parameters()] == kept
        assert torch.equal(view, model[0].weight.detach()[2:4])
        return [p.detach().clone() for p in model.parameters()]

    first, second = run_ranks(2, act)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_codes_are_of_differences_and_the_model_keeps_its_precision(codec):
    """Casting parameters to 16 bits makes the final model one of 16 bits."""

    def act(rank_group):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        synchronized = joined(rank_group, model, optimizer, codec=codec)
        sizes = []
        synchronized.on_exchange.append(lambda done: sizes.append(done.sent_bytes))
        for number in range(8):
            step(synchronized, optimizer, 10 * number + rank_group.rank)
        weight = model[2].weight.detach().clone()
        synchronized.close()
        return weight, sizes

    (weight, sizes), (other, _) = run_ranks(2, act)
    assert torch.equal(weight, other)
    assert not torch.equal(weight, weight.bfloat16().float())
    full = 4 * sum(p.numel() for p in network().parameters())
    assert max(sizes) < {"bf16": 0.55, "int8": 0.3, "int4": 0.2}[codec] * full, "a code that is asked for is used"


def test_an_exchange_takes_few_messages(monkeypatch):
    """One collective for each tensor makes the latency of the wire count as often."""
    counted = []

    def count(tensor, group, **kwargs):
        counted.append(group.size())
        return plain(tensor, group, **kwargs)

    plain = points.all_reduce
    monkeypatch.setattr(points, "all_reduce", count)
    monkeypatch.setattr(waits_for_ranks, "all_reduce", count)

    def act(rank_group):
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(20)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        synchronized = joined(rank_group, model, optimizer)
        for number in range(4):
            step(synchronized, optimizer, number)
        synchronized.close()

    run_ranks(2, act)
    assert counted == [2, 2]  # one on each rank, for 40 tensors


@pytest.mark.parametrize("form", FORMS)
def test_the_optimizer_stays_a_plain_one(form):
    """Wrappers of optimizers break copies, state dicts and schedulers."""

    def act(rank_group):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        synchronized = joined(rank_group, model, optimizer, **FORMS[form])
        for number in range(6):
            step(synchronized, optimizer, number)
            schedule.step()
        synchronized.finish()
        synchronized.close()
        saved = optimizer.state_dict()
        again = torch.optim.Adam(model.parameters(), lr=0.01)
        again.load_state_dict(saved)
        assert type(optimizer) is torch.optim.Adam
        return optimizer.param_groups[0]["lr"]

    assert run_ranks(2, act) == [0.0025, 0.0025]


def test_pretrained_weights_survive():
    """A wrapper that makes its modules anew starts from chance."""

    def act(rank_group):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        synchronized = joined(rank_group, model, optimizer, codec="int8", outer="nesterov", overlap=1)
        found = [p.detach().clone() for p in model.parameters()]
        synchronized.close()
        return found

    for found in run_ranks(2, act):
        assert all(torch.equal(a, b) for a, b in zip(found, network().parameters(), strict=True))
