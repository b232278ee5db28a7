"""Periods that follow what is measured, chosen alike on all ranks."""

import time

import pytest
import torch
from torch import nn

from evenly.errors import SpecError
from evenly.nodes import join_nodes
from evenly.schedule.adaptive import ExchangeCosts, StepPace, choose
from evenly.schedule.step_counter import Schedule
from evenly.spec import Adaptive, EverySteps, Exchange, period_of
from tests.ranks import cluster_of, ragged, run_ranks


def test_a_budget_decides_by_the_time_of_an_exchange():
    wish = Adaptive(exchange_budget=0.02)
    slow, fast = ExchangeCosts(step_s=0.1, transfer_s=1.0), ExchangeCosts(step_s=0.1, transfer_s=0.01)
    assert choose(wish, Exchange(), 4, slow)[0] == 490  # 490 steps of 0.1 s and 1 s: 2 %
    assert choose(wish, Exchange(), 4, fast)[0] == 5
    assert choose(Adaptive(exchange_budget=0.02, most=100), Exchange(), 4, slow)[0] == 100
    assert choose(wish, Exchange(), 4, ExchangeCosts())[0] == 4


def test_what_overlaps_costs_what_it_slows_steps_by_and_the_wire_must_be_free():
    wish = Adaptive(exchange_budget=0.02)
    assert (
        choose(wish, Exchange(overlap=12), 4, ExchangeCosts(step_s=0.1, transfer_s=1.0))[0] == 24
    )  # half beside no exchange
    assert choose(wish, Exchange(overlap=12, fragments=3), 4, ExchangeCosts(step_s=0.1, transfer_s=1.0))[0] == 30
    assert choose(wish, Exchange(overlap=12), 4, ExchangeCosts(step_s=0.1, transfer_s=1.0, slowed_s=0.1))[0] == 49
    assert choose(wish, Exchange(overlap=5), 4, ExchangeCosts(step_s=0.1, transfer_s=0.6))[0] == 49  # 0.1 s too late
    assert choose(wish, Exchange(overlap=5), 4, ExchangeCosts(step_s=0.1, transfer_s=0.6, slowed_s=0.05))[0] == 49


def test_drift_changes_the_period_in_which_it_grew():
    wish = Adaptive(drift=0.1)
    assert choose(wish, Exchange(), 50, ExchangeCosts(drift=0.2, steps=8))[0] == 4
    assert choose(wish, Exchange(), 50, ExchangeCosts(drift=0.01, steps=8))[0] == 16
    assert choose(wish, Exchange(), 50, ExchangeCosts(drift=0.08, steps=8))[0] == 10
    assert choose(wish, Exchange(overlap=6), 50, ExchangeCosts(drift=0.2, steps=8))[0] == 12


@pytest.mark.parametrize("lag", [1, 2, 5])
def test_drift_settles_though_it_is_told_late(lag):
    wish, lengths = Adaptive(drift=0.8), [4] * (lag + 1)
    for _ in range(30):
        told = lengths[-1 - lag]  # drift grows in proportion to steps: 8 are right
        lengths.append(choose(wish, Exchange(), lengths[-1], ExchangeCosts(drift=told / 10, steps=told))[0])
    assert lengths[-10:] == [8] * 10


def test_half_of_the_first_period_is_beside_no_exchange():
    assert Schedule(Adaptive(start=4), least=Exchange(overlap=8).least_adaptive_steps).next_length == 16
    assert Schedule(Adaptive(start=4, most=10), least=Exchange(overlap=8).least_adaptive_steps).next_length == 10
    with pytest.raises(SpecError, match="longer than the longest"):
        Adaptive(start=20, most=10)


def test_a_new_length_holds_from_the_next_period_on():
    schedule, due = Schedule(Adaptive(start=3, warmup=1), fragments=2), []
    for step in range(1, 16):
        fragments = schedule.advance()
        if fragments:
            due.append((step, fragments))
            schedule.record_begun(fragments)
        if step == 3:
            schedule.next_length = 5
        if step == 9:
            schedule.next_length = 2  # at the very end of a period: the next one has it
    assert due == [(1, [0, 1]), (3, [0]), (4, [1]), (7, [0]), (9, [1]), (10, [0]), (11, [1]), (12, [0]), (13, [1]),
                   (14, [0]), (15, [1])]  # fmt: skip


def test_a_resumed_schedule_goes_on_where_it_stood():
    whole, saved = Schedule(EverySteps(4, warmup=1), fragments=2), Schedule(EverySteps(4, warmup=1), fragments=2)
    for _ in range(7):
        saved.advance()
        whole.advance()
    resumed = Schedule(EverySteps(4, warmup=1), fragments=2)
    resumed.resume(saved.progress())
    assert [resumed.advance() for _ in range(9)] == [whole.advance() for _ in range(9)]


def test_a_run_resumed_with_a_shorter_period_goes_on_exchanging():
    saved = Schedule(EverySteps(50))
    for _ in range(45):
        saved.advance()
    resumed = Schedule(EverySteps(10))
    resumed.resume(saved.progress())
    assert [step for step in range(46, 70) if resumed.advance()] == [55, 65]


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("wish", [{"exchange_budget": 0.1}, {"drift": 1e-3}, {"drift": 1e3}])
def test_all_ranks_choose_the_same(wish, overlap):
    def act(rank_group):
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings = {"period": Adaptive(start=2, most=64, **wish), "exchange": Exchange(overlap=overlap)}
        synchronized = join_nodes(model, optimizer, rank_group=rank_group, cluster=cluster_of(ragged(2, 1)), **settings)
        chosen, told = [], []
        synchronized.on_period.append(lambda step, steps, why: chosen.append((step, steps, why)))
        synchronized.on_exchange.append(lambda done: told.append(done.step))
        generator = torch.Generator().manual_seed(rank_group.rank)
        for _ in range(40):
            synchronized(torch.randn(4, 8, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.002 * (rank_group.rank + 1))
        synchronized.finish()
        synchronized.close()
        return chosen, told, model.weight.detach().clone()

    results = run_ranks(3, act)
    assert all(chosen == results[0][0] and told == results[0][1] for chosen, told, _ in results)
    assert all(torch.equal(weight, results[0][2]) for _, _, weight in results)
    if "drift" in wish:
        lengths = [steps for _, steps, _ in results[0][0]]
        if wish["drift"] > 1:
            assert lengths[:2] == ([8, 16] if overlap else [4, 8])  # never more than twice what was seen
        else:
            assert not lengths or lengths[-1] == max(1, 2 * overlap)


def test_what_an_exchange_adds_to_the_steps_beside_it(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("evenly.schedule.adaptive.time.monotonic", lambda: now[0])
    pace, seen = StepPace(), []
    for number in range(30):
        beside = number > 4 and number % 5 in (1, 2)
        pace.begin(during_exchange=beside)
        now[0] += 0.1 + 0.03 * beside + 5.0 * (number == 6)  # one is late for another reason
        pace.end()
        if number % 5 == 2:
            seen.append(pace.merged(0.2, slowed_s=0.5))
            now[0] += 1.0  # between steps nothing counts
            pace.drop()
    assert seen[0] == (0.2, 0.5)  # nothing was compared yet: as it was known before
    assert pace.median_s == pytest.approx(0.1)
    assert seen[-1] == pytest.approx((0.2, 0.06))


def test_steps_that_are_all_beside_exchanges_are_measured_as_they_are(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("evenly.schedule.adaptive.time.monotonic", lambda: now[0])
    pace = StepPace()
    pace.begin(during_exchange=False)
    now[0] += 9.0  # the first step of a run takes long
    pace.end()
    for _ in range(20):
        pace.begin(during_exchange=True)
        now[0] += 0.2
        pace.end()
    assert pace.median_s == pytest.approx(0.2)
    assert pace.merged(0.3, slowed_s=0.0) == (0.3, 0.0)


def test_fragments_that_leave_no_step_alone_still_find_their_period():
    def act(rank_group):
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings = {"period": Adaptive(exchange_budget=0.01), "exchange": Exchange(overlap=3, fragments=4)}
        synchronized = join_nodes(model, optimizer, rank_group=rank_group, cluster=cluster_of(ragged(1, 1)), **settings)
        whys = []  # the first period has 4 steps, those that are chosen 6 or more
        synchronized.on_period.append(lambda step, steps, why: whys.append(why))
        for _ in range(40):
            synchronized(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
        synchronized.finish()
        synchronized.close()
        return whys

    assert "an exchange takes" in run_ranks(2, act)[0][0]


def test_one_wish_at_a_time():
    assert period_of("5 %") == Adaptive(exchange_budget=0.05)
    assert Adaptive().exchange_budget == 0.02
    assert Adaptive(drift=0.1).exchange_budget is None
    assert period_of("adaptive") == Adaptive()
    for fields in ({"exchange_budget": 0.1, "drift": 0.1}, {"exchange_budget": 0.0}, {"drift": -1.0}, {"start": 0}):
        with pytest.raises(SpecError):
            Adaptive(**fields)
