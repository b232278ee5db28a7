"""A rank that takes longer than the others is named while the run goes on, once, and again when that is over."""

import json
import random
import timeit
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from evenly.comm import RankGroup
from evenly.session import straggler_rule, straggler_watch
from evenly.session.counters import Counters
from evenly.session.rank_recorder import RankTotals
from evenly.session.recorder import Recorder
from evenly.session.straggler_rule import (
    ComparedRanks,
    RankPace,
    StragglerRule,
    StragglerVerdict,
    compared_ranks,
    planned_work,
)
from evenly.session.straggler_watch import StragglerWatch
from evenly.spec import Cluster, Device, Layout, Node, Plan, Replica, Role, Run, RunFinished, Straggler
from tests.processes import run_processes
from tests.ranks import cluster_of, ragged

STEPS = 100  # between two looks


def play(
    looks: Sequence[Sequence[float]],
    compared: Sequence[ComparedRanks],
    *,
    step_s: float = 0.0,
    work: Sequence[float] = (),
) -> list[StragglerVerdict]:
    """Returns what is said when all ranks publish these computing times, look by look."""
    rule, verdicts = StragglerRule(compared), []
    rule.expect([work] if work else [])
    for number, times in enumerate(looks, start=1):
        first, last = STEPS * (number - 1), STEPS * number
        paces = [RankPace(number, first, last, time_s, step_s or max(times)) for time_s in times]
        verdicts += rule.look(paces)
    return verdicts


def node_of(size: int) -> list[ComparedRanks]:
    return compared_ranks(cluster_of(ragged(size)))


def noisy_times(chance: random.Random, size: int, *, looks: int) -> list[list[float]]:
    """Returns times of equal ranks with noise; now and then one pauses, not the same one twice in a row."""
    times, paused = [], -1
    for _ in range(looks):
        row = [chance.gauss(1.0, 0.07) for _ in range(size)]
        rank = chance.randrange(size)
        paused = rank if chance.random() < 0.1 and rank != paused else -1
        if paused >= 0:
            row[paused] *= chance.uniform(1.0, 20.0)
        times.append(row)
    return times


@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("work", ["equal", "unequal"])
def test_equal_ranks_are_never_named_however_noisy_they_are(
    size: int, work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = [1.0 + (rank if work == "unequal" else 0) for rank in range(size)]
    runs = [
        [[time_s * part for time_s, part in zip(row, works, strict=True)] for row in noisy]
        for noisy in (noisy_times(random.Random(seed), size, looks=200) for seed in range(10))
    ]
    assert [play(times, node_of(size), work=works) for times in runs] == [[]] * 10
    monkeypatch.setattr(straggler_rule, "LOOKS", 1)
    assert all(play(times, node_of(size), work=works) for times in runs)  # there is something to be misled by


@given(
    st.integers(3, 6),
    st.floats(1.9, 50.0),
    st.integers(0, 20),
    st.integers(2, 30),
    st.randoms(use_true_random=False),
)
@settings(max_examples=50, deadline=None)
def test_a_slow_rank_is_named_once_and_once_when_it_is_over(
    size: int, factor: float, before: int, slow: int, chance: object
) -> None:
    def times(look: int) -> list[float]:
        return [
            chance.uniform(0.95, 1.05) * (factor if rank == 1 and before <= look < before + slow else 1.0)  # type: ignore[attr-defined]
            for rank in range(size)
        ]

    begun, over = play([times(look) for look in range(before + slow + 3)], node_of(size))
    assert (begun.rank, begun.since_step, begun.step) == (1, STEPS * before, STEPS * (before + 2))
    assert begun.factor == pytest.approx(factor, rel=0.15)
    assert (over.rank, over.since_step, over.step) == (1, STEPS * before, STEPS * (before + slow + 2))
    assert (begun.is_over, over.is_over) == (False, True)


def test_a_rank_between_the_two_limits_stays_what_it_was() -> None:
    slow = [[1.0, 1.0, 2.0]] * 2
    between = [[1.0, 1.0, 1.4]] * 20
    assert play(between, node_of(3)) == []
    assert [verdict.is_over for verdict in play([*slow, *between], node_of(3))] == [False]


UNEQUAL = {  # times of ranks that were given 4 parts and 1 part of the work
    "small parts cost more than their part": [2.2, 1.0],
    "in proportion": [4.0, 1.0],
    "the plan gave the fast device more": [1.0, 1.05],
}


@pytest.mark.parametrize("times", UNEQUAL.values(), ids=UNEQUAL)
def test_a_rank_that_was_given_more_work_is_no_straggler_until_it_becomes_slow(times: list[float]) -> None:
    usual = [times] * 6
    assert play(usual, node_of(2), work=[80, 20]) == []
    for rank in (0, 1):
        slow = [[2 * time_s if other == rank else time_s for other, time_s in enumerate(times)]] * 4
        begun, over = play([*usual, *slow, *usual], node_of(2), work=[80, 20])
        assert (begun.rank, begun.is_over, over.rank, over.is_over) == (rank, False, rank, True)
        assert (begun.factor, over.factor) == pytest.approx((2.0, 1.0), rel=0.1)


def test_a_rank_slower_than_its_work_explains_is_named_from_the_start() -> None:
    (verdict,) = play([[8.0, 1.0]] * 9, node_of(2), work=[80, 20])
    assert (verdict.rank, verdict.factor, verdict.since_step) == (0, 2.0, 0)
    assert [verdict.rank for verdict in play([[8.0, 1.0]] * 9, node_of(2), work=[50, 50])] == [0]


def test_a_pause_in_the_first_look_does_not_become_the_usual() -> None:
    paused, usual, slow = [[4.0, 1.0]], [[1.5, 1.0]] * 6, [[3.0, 1.0]] * 3
    assert [verdict.factor for verdict in play([*paused, *usual, *slow], node_of(2), work=[80, 20])] == [2.0]


def test_the_work_of_a_rank_is_its_samples_and_its_part_of_the_network() -> None:
    def role(rank: int, samples: int, compute_s: float = 0.0) -> Role:
        return Role(rank=rank, node=0, samples=samples, compute_s=compute_s)

    whole = Plan(roles=(role(0, 24, 0.5), role(1, 8, 0.4)))
    assert planned_work(whole) == [[24.0, 8.0], [0.5, 0.4]]
    cut = Plan(
        roles=(role(0, 32), role(1, 32), role(2, 16)),
        replicas=(
            Replica(ranks=(0, 1), layout=Layout(graph="g", shares=(80.0, 20.0), members=(0, 1))),
            Replica(ranks=(2,), layout=Layout(graph="g", shares=(1.0,), members=(0,))),
        ),
    )
    (work,) = planned_work(cut)
    assert work == pytest.approx([25.6, 6.4, 16.0])
    assert planned_work(Plan(roles=(role(0, 0), role(1, 0)))) == [[1.0, 1.0]]


@pytest.mark.slow
@pytest.mark.alone
def test_hand_made_batch_shares_raise_no_alarm(tmp_path: Path) -> None:
    run_processes(ragged(2), "tests.session.straggler_programs:train_unequally", {"folder": str(tmp_path / "run")})
    run = Run.read(tmp_path / "run")
    assert run.last(RunFinished) is not None
    assert run.of(Straggler) == []


def test_an_excess_that_nobody_waits_for_is_not_told() -> None:
    assert play([[1e-4, 3e-4]] * 5, node_of(2), step_s=0.1) == []
    assert len(play([[1e-4, 3e-4]] * 5, node_of(2), step_s=1e-3)) == 1


def test_a_pace_counts_once_however_often_it_is_read() -> None:
    rule = StragglerRule(node_of(2))
    paces = [RankPace(1, 0, 10, 1.0, 1.0), RankPace(1, 0, 10, 3.0, 3.0)]
    assert [rule.look(paces) for _ in range(5)] == [[]] * 5
    assert rule.look([None, RankPace(2, 10, 20, 3.0, 3.0)]) == []  # nobody to compare with
    assert [verdict.rank for verdict in rule.look([paces[0], RankPace(3, 20, 30, 3.0, 3.0)])] == [1]


def test_a_rank_alone_on_its_node_is_compared_with_equal_devices() -> None:
    def node(name: str, *ranks: int, device: Device) -> Node:
        return Node(name=name, ranks=ranks, devices=(device,) * len(ranks))

    fast, slow = Device(kind="cuda", name="H200"), Device(kind="cuda", name="T4")
    cluster = Cluster(
        nodes=(
            node("a", 0, 1, device=fast),
            node("b", 2, device=fast),
            node("c", 3, device=slow),
            node("d", 4, device=fast),
        )
    )
    compared = compared_ranks(cluster)
    assert [each.ranks for each in compared] == [(1,), (0,), (0, 1, 4), (), (0, 1, 2)]
    assert [each.of for each in compared] == ["node", "node", "devices", "devices", "devices"]
    (verdict,) = play([[1.0, 1.0, 3.0, 9.0, 1.0]] * 4, compared)
    assert (verdict.rank, verdict.compared_with) == (2, "devices")


def test_the_sentences_name_rank_host_factor_and_step() -> None:
    begun = Straggler(at_s=0.0, step=460, rank=3, host="b", factor=1.8, since_step=400)
    assert begun.explain() == "rank 3 on host b takes 1.8x the median of its node since step 400"
    over = begun.model_copy(update={"is_over": True, "step": 900, "factor": 1.04})
    assert over.explain() == "rank 3 on host b is as fast as its node again since step 900: 1.0x the median"


def test_ranks_publish_what_they_did_since_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(straggler_watch.time, "monotonic", lambda: now[0])
    store, made = dist.HashStore(), [0, 0]
    cluster = cluster_of(ragged(2))

    def totals(rank: int) -> tuple[int, RankTotals]:
        return made[rank], RankTotals(made[rank], made[rank] * (0.001 + 0.002 * rank), 0, 0, 0, 0, 0)

    watches = [StragglerWatch(RankGroup(rank, 2, store), cluster, lambda rank=rank: totals(rank)) for rank in (0, 1)]
    for _ in range(3):
        now[0] += 3.1
        made = [steps + 1000 for steps in made]
        watches[1].tick()
        watches[0].tick()
        watches[0].tick()  # too early for another look
    assert [(verdict.rank, verdict.since_step) for verdict in watches[0].verdicts] == [(1, 0)]
    assert not watches[1].verdicts
    assert json.loads(store.get("stragglers/1/1"))[:3] == [3, 2000, 3000]
    now[0] += 3.1
    watches[1].tick()  # no step was made: nothing is published
    assert json.loads(store.get("stragglers/1/1"))[0] == 3


@pytest.mark.alone
def test_a_step_costs_less_than_a_thousandth_of_a_millisecond(tmp_path: Path) -> None:
    watch = StragglerWatch(RankGroup(0, 2, dist.HashStore()), cluster_of(ragged(2)), lambda: (0, RankTotals(*[0] * 7)))
    counters = Counters(Recorder(None, rank=0))
    with_watch, number = Counters(Recorder(None, rank=0)), 5000
    with_watch.watch_stragglers(watch, ["a", "a"])
    costs = [
        min(timeit.repeat(lambda each=each: each._count_step(1, 1.0, epoch=0, times=1.0), number=number, repeat=15))
        / number
        for each in (counters, with_watch)
    ]
    assert costs[1] - costs[0] < 1e-6  # 0.1 % of a step of 1 ms


@pytest.mark.alone
def test_a_slowed_rank_is_named_in_the_record_and_on_the_screen(tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path / "run"), "slow_rank": 1, "phases_s": [2.0, 3.0, 4.0]}
    ranks = run_processes(ragged(2, 1), "tests.session.straggler_programs:train", arguments)
    run = Run.read(tmp_path / "run")
    assert run.last(RunFinished) is not None
    begun, over = [event for event in run.of(Straggler) if event.rank == 1]
    slow_from, slow_until = ranks[0]["slow"]
    assert (begun.is_over, over.is_over) == (False, True)
    assert 1.5 < begun.factor < 6
    assert begun.host == ranks[0]["hosts"][1]
    assert slow_from - 40 <= begun.since_step <= slow_from + 40
    assert slow_from < begun.step <= slow_until + 5 < over.step
    assert over.since_step == begun.since_step
    told = ranks[0]["told"]
    assert told.count(begun.explain()) == told.count(over.explain()) == 1
