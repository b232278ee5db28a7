"""Where the seconds of each rank went."""

import pytest

from evenly import Run, report
from evenly.reports import PHASE_HEADERS, phase_rows, remarks
from evenly.session.counters import phases_of
from evenly.spec import Exchange, ExchangeDone, Rebalanced, RunFinished, Straggler
from tests.reports.runs import finished, started

NAMES = ("compute_s", "gradients_s", "exchange_s", "waiting_s", "gradient_bytes", "sent_bytes")
VALUES = [(4.0, 3.0, 1.0, 0.5, 2e6, 1e6), (6.0, 1.0, 1.0, 0.5, 2e6, 1e6), (5.0, 0.0, 1.0, 3.5, 0, 2e6)]
ROWS = [dict(zip(NAMES, values, strict=True)) for values in VALUES]


def exchange(**more):
    fields = {"at_s": 1.0, "number": 1, "step": 8, "seconds": 0.2, "sent_bytes": 5, "weights": (0.5, 0.5)}
    return ExchangeDone(**{**fields, "merged": 8, **more})


def ended() -> RunFinished:
    return finished().model_copy(update={"phases": phases_of(ROWS, [[0, 1], [2]], 10.0)})


def test_who_averages_longer_than_its_siblings_has_waited_for_them():
    fast, slow, single = phases_of(ROWS, [[0, 1], [2]], 10.0)
    assert (fast.gradients_s, fast.waiting_s, fast.other_s) == (1.0, 2.5, 1.5)
    assert (slow.gradients_s, slow.waiting_s, slow.other_s) == (1.0, 0.5, 1.5)
    assert (single.gradients_s, single.waiting_s, single.other_s) == (0.0, 3.5, 0.5)
    for phases in (fast, slow, single):
        parts = (phases.compute_s, phases.gradients_s, phases.exchange_s, phases.waiting_s, phases.other_s)
        assert sum(parts) == pytest.approx(10.0)


def test_a_report_of_one_run_says_where_the_time_went():
    run = Run(
        events=(started(), exchange(waited_s=0.3, drift=0.02), exchange(number=2, merged=12, waited_s=0.1), ended())
    )
    assert phase_rows(run)[0] == ("0", "0", "40.0 %", "10.0 %", "10.0 %", "25.0 %", "15.0 %", "2.0", "1.0")
    assert remarks(run) == [
        "2 exchanges took 0.4 s, training waited for 0.4 s, 1 of them merged late; the node of rank 0 was 0 % "
        "away from the average of all at the last, 2 % at most"
    ]
    assert remarks(Run(events=(started(), exchange(waited_s=0.3), ended())))[0].startswith("1 exchange took 0.2 s")
    plan = run.events[0].plan.model_copy(update={"exchange": Exchange(overlap=3, codec="int8", outer="nesterov")})
    coded = Run(events=(run.events[0].model_copy(update={"plan": plan}), *run.events[1:]))
    assert remarks(coded)[0].startswith("2 exchanges (beside 3 steps, as int8, with SGD outside) took 0.4 s")
    text = report(run)
    assert all(header in text for header in PHASE_HEADERS)
    assert "2 exchanges took" in text
    assert "compute" not in report(run, run)


def test_a_run_without_a_record_of_phases_has_no_table():
    run = Run(events=(started(), finished()))
    assert phase_rows(run) == []
    assert remarks(run) == []
    assert report(run).count("\n") == 1


def test_a_report_says_who_took_part_and_how_work_was_dealt_out_anew():
    start = started().model_copy(update={"ranks": (0, 2), "left_out": {1: "too slow", 3: "too slow"}})
    changes = [Rebalanced(at_s=1.0, step=step, samples=(500 + step, 500 - step)) for step in (24, 68)]
    assert remarks(Run(events=(start, *changes, finished()))) == [
        "of all that were started ranks 0, 2 took part, counted here as 0, 1",
        "ranks 1, 3 took no part: too slow",
        "work was rebalanced 2 times, last after step 68: 568, 432 samples",
    ]


def test_stragglers_are_told_with_their_steps():
    begun = Straggler(at_s=1.0, step=460, rank=3, host="b", factor=1.8, since_step=400)
    over = begun.model_copy(update={"is_over": True, "step": 900})
    again = begun.model_copy(update={"since_step": 1200, "step": 1260, "factor": 3.0})
    assert remarks(Run(events=(started(), begun, over, again, begun, ended()))) == [  # a resumed run repeats some
        "rank 3 on host b takes 1.8x the median of its node since step 400, until step 900",
        "rank 3 on host b takes 3.0x the median of its node since step 1200",
    ]
    many = [begun.model_copy(update={"since_step": step}) for step in range(9)]
    assert (
        remarks(Run(events=(started(), *many, ended())))[-1] == "and 4 more times that a rank took longer than others"
    )
