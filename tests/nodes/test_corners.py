"""Corners where node-based training could go wrong in silence."""

import threading
import time

import pytest
import torch
from torch import nn

from evenly.errors import LockstepError, MismatchError, NonFiniteError, SpecError
from evenly.nodes import join_nodes
from evenly.spec import Exchange, period_of
from tests.ranks import RankError, cluster_of, ragged, run_ranks

SEEDING = threading.Lock()


def join(rank_group, nodes, model, *, every=2, optimizer=None, scaler=None, count=None, **exchange):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    settings = Exchange(**{"timeout_s": 60.0, **exchange})
    arguments = {"rank_group": rank_group, "cluster": cluster_of(nodes), "period": period_of(every), "scaler": scaler}
    return join_nodes(model, optimizer, exchange=settings, count=count, **arguments), optimizer


def linear(width=4):
    with SEEDING:
        torch.manual_seed(0)
        return nn.Linear(width, 1)


def errors_of(count, act):
    with pytest.raises(RankError) as caught:
        run_ranks(count, act)
    return caught.value.errors


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = linear()
        self.register_buffer("mask", torch.triu(torch.full((64, 64), float("-inf")), 1))
        self.register_buffer("table", torch.rand(64, 64, generator=torch.Generator().manual_seed(0)))
        self.register_buffer("flags", torch.ones(64, 64, dtype=torch.bool))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.mean += 1.0
        return self.layer(x)


def test_constant_buffers_stay_and_do_not_travel():
    def act(rank_group):
        model = Masked()
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        synchronized, optimizer = join(rank_group, ragged(2, 1), model)
        sent = []
        synchronized.on_exchange.append(lambda done: sent.append(done.sent_bytes))
        for _ in range(4):
            synchronized(torch.ones(2, 4)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        synchronized.close()
        for name in ("mask", "table", "flags"):
            assert torch.equal(model.get_buffer(name), before[name]), name
        assert torch.equal(model.mean, torch.full((3,), 4.0))
        return sum(sent)

    sent = run_ranks(3, act)
    assert sum(sent) <= 2 * 2 * 4 * (5 + 3), "only parameters and the buffer that changed cross the wire"


@pytest.mark.parametrize("known", [True, False], ids=["scaler given", "scaler not given"])
@pytest.mark.parametrize("clearing", ["after the step", "before backward"])
def test_a_scaler_that_skips_under_accumulation_without_no_sync(known, clearing):
    """Never averages different iterations: it counts right, or says that the scaler must be passed."""

    def act(rank_group):
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        synchronized, _ = join(rank_group, ragged(1, 1), model, optimizer=optimizer, scaler=scaler if known else None)
        met = []
        synchronized.on_exchange.append(lambda done: met.append((done.step, iteration)))
        try:
            for iteration in range(1, 7):
                for part in range(2):
                    loss = synchronized(torch.ones(2, 4)).mean() / 2
                    if clearing == "before backward" and part == 0:
                        optimizer.zero_grad()
                    bad = rank_group.rank == 1 and iteration == 3 and part == 0
                    scaler.scale(loss * (float("inf") if bad else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
                if clearing == "after the step":
                    optimizer.zero_grad()
            synchronized.finish()
            return met
        finally:
            synchronized.close()

    if known:
        assert run_ranks(2, act) == [[(2, 2), (4, 4), (6, 6)]] * 2
    elif clearing == "after the step":
        for met in run_ranks(2, act):
            assert [step for step, _ in met] == [2, 4, 6]
    else:
        for error in errors_of(2, act):
            assert isinstance(error, LockstepError)
            assert "scaler=" in str(error)


def test_an_overflow_in_the_generators_step_does_not_shift_the_discriminator():
    def act(rank_group):
        maker, judge = linear(2), linear(1)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (maker, judge)]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        made, _ = join(rank_group, ragged(1, 1), maker, optimizer=optimizers[0], scaler=scaler)
        judged, _ = join(rank_group, ragged(1, 1), judge, optimizer=optimizers[1], scaler=scaler)
        for step in range(6):
            optimizers[1].zero_grad()
            scaler.scale(judged(made(torch.ones(3, 2)).detach()).mean()).backward()
            scaler.step(optimizers[1])
            optimizers[0].zero_grad()
            bad = rank_group.rank == 1 and step == 2
            scaler.scale(-judged(made(torch.ones(3, 2))).mean() * (float("inf") if bad else 1.0)).backward()
            scaler.step(optimizers[0])
            scaler.update()
        for model in (made, judged):
            model.finish()
            model.close()
        return [made.schedule.step, judged.schedule.step, *[p.detach().tolist() for p in judge.parameters()]]

    first, second = run_ranks(2, act)
    assert first == second
    assert first[:2] == [6, 6]


def test_a_closure_with_nan_stops_and_cannot_be_skipped():
    def act(rank_group, nonfinite):
        model = linear()
        synchronized, optimizer = join(rank_group, ragged(1), model, nonfinite=nonfinite)

        def closure():
            optimizer.zero_grad()
            loss = synchronized(torch.ones(2, 4)).mean() * float("nan")
            loss.backward()
            return loss

        try:
            optimizer.step(closure)
        finally:
            synchronized.close()

    with pytest.raises(RankError) as caught:
        run_ranks(1, act, "stop")
    assert isinstance(caught.value.errors[0], NonFiniteError)
    with pytest.raises(RankError) as caught:
        run_ranks(1, act, "skip")
    assert isinstance(caught.value.errors[0], SpecError)


def test_large_batches_do_not_overflow_half_precision_gradients():
    def act(rank_group):
        model = nn.Linear(1, 1, bias=False).half()
        synchronized, _ = join(rank_group, ragged(2), model)
        (synchronized(torch.ones(512, 1, dtype=torch.float16)) * 200.0).mean().backward()
        gradient = model.weight.grad.clone()
        synchronized.close()
        return gradient

    for gradient in run_ranks(2, act):
        torch.testing.assert_close(gradient, torch.full((1, 1), 200.0, dtype=torch.float16))


def test_other_settings_of_the_optimizer_are_noticed():
    def act(rank_group):
        model = linear()
        join(rank_group, ragged(2), model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1 + rank_group.rank))

    for error in errors_of(2, act):
        assert isinstance(error, MismatchError)
        assert "1.1" in str(error)


def test_parameters_that_no_optimizer_holds_are_named():
    def act(rank_group):
        model = linear()
        join(rank_group, ragged(1), model, optimizer=torch.optim.SGD([model.weight], lr=0.1))

    (error,) = errors_of(1, act)
    assert isinstance(error, SpecError)
    assert "'bias'" in str(error)


def test_unequal_steps_are_told_also_when_a_step_takes_long():
    def act(rank_group):
        synchronized, optimizer = join(rank_group, ragged(2), linear(), every=100)
        try:
            for step in range(4 if rank_group.rank else 3):
                x = torch.ones(2, 4)
                if step == 3:
                    time.sleep(1.5)  # the other waits and has said so before this backward begins
                synchronized(x).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            synchronized.finish()
        finally:
            synchronized.close()

    began = time.monotonic()
    for error in errors_of(2, act):
        assert isinstance(error, LockstepError)
    assert time.monotonic() - began < 20


def test_a_rank_that_fails_before_it_joins_is_named():
    is_told = threading.Event()

    def act(rank_group):
        if rank_group.rank == 1:
            is_told.wait(20)  # alive, but elsewhere
            return
        try:
            join(rank_group, ragged(1, 1), linear(), timeout_s=1.0)
        finally:
            is_told.set()

    first, second = errors_of(2, act)
    assert second is None
    assert "ranks [1] did not arrive" in str(first)
