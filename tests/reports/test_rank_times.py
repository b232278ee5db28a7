"""Where the time of each rank went: waiting inside the node is told apart, clocks that differ are set right."""

import time

import pytest

from evenly.reports.rank_times import PHASES, rank_times
from evenly.spec import RankExchange, StepTimes
from tests.reports.recorded import of_parts, part, simulated
from tests.reports.runs import finished, started


def row(step, steps, ended_s, seconds, compute_s, gradients_s):
    return StepTimes(step, steps, ended_s, seconds, compute_s, gradients_s, 0.0, 0.0, 8.0 * steps, 0)


def phases(times, phase):
    return times.phases_s[:, PHASES.index(phase)].tolist()


def test_the_last_rank_of_a_node_to_average_did_not_wait():
    fast = part(0, 0, row(1, 1, 1.0, 1.0, 0.4, 0.5))
    slow = part(1, 0, row(1, 1, 1.0, 1.0, 0.7, 0.2))
    other = part(2, 1, row(1, 1, 1.0, 1.0, 0.9, 0.0))
    first, second, third = rank_times(of_parts(fast, slow, other, events=(started(),)))
    assert phases(first, "averaging") == phases(second, "averaging") == pytest.approx([0.2])
    assert phases(first, "waiting") == pytest.approx([0.3])
    assert phases(second, "waiting") == pytest.approx([0.0])
    assert phases(third, "averaging") == [0.0]
    assert phases(first, "other") == pytest.approx([0.1])


def test_rows_of_ranks_need_not_have_the_same_borders():
    fast = part(0, 0, row(2, 2, 2.0, 2.0, 0.8, 1.0), row(4, 2, 4.0, 2.0, 0.8, 1.0))
    slow = part(1, 0, row(1, 1, 1.0, 1.0, 0.7, 0.2), row(4, 3, 4.0, 3.0, 2.1, 0.6))
    first, second = rank_times(of_parts(fast, slow))
    assert phases(first, "averaging") == pytest.approx([0.4, 0.4])
    assert phases(first, "waiting") == pytest.approx([0.6, 0.6])
    assert phases(second, "averaging") == pytest.approx([0.2, 0.6])


def test_steps_that_another_rank_did_not_record_are_not_compared():
    whole = part(0, 0, row(1, 1, 1.0, 1.0, 0.4, 0.5), row(2, 1, 2.0, 1.0, 0.4, 0.5))
    short = part(1, 0, row(1, 1, 1.0, 1.0, 0.7, 0.2))
    first, _ = rank_times(of_parts(whole, short))
    assert phases(first, "averaging") == pytest.approx([0.2, 0.5])
    assert phases(first, "waiting") == pytest.approx([0.3, 0.0])


def test_a_clock_that_is_behind_does_not_move_a_rank_into_the_start_before():
    again = started(resumed=1).model_copy(update={"at_s": 200.0})
    parts = [
        part(rank, 0, row(2, 1, 1.0, 1.0, 0.8 - wait, wait), at_s=200.0 - rank) for rank, wait in enumerate([0.5, 0.1])
    ]
    first, second = rank_times(of_parts(*parts, events=(started(), again)))
    assert phases(first, "waiting") == pytest.approx([0.4])
    assert phases(second, "waiting") == pytest.approx([0.0])


def test_with_global_gradients_all_ranks_wait_for_each_other():
    parts = [part(rank, rank, row(1, 1, 1.0, 1.0, 0.9 - wait, wait)) for rank, wait in enumerate([0.5, 0.1])]
    first, second = rank_times(of_parts(*parts, events=(started(every="global"),)))
    assert phases(first, "waiting") == pytest.approx([0.4])
    assert phases(second, "waiting") == pytest.approx([0.0])


def exchange(number, at_s):
    times = {"seconds": 0.1, "met_s": 0.0, "waited_s": 0.1}
    return RankExchange(at_s=at_s, number=number, step=number, merged=number, sent_bytes=1, **times)


def test_a_host_whose_clock_is_wrong_is_set_right_by_its_exchanges():
    near = part(0, 0, row(2, 2, 2.0, 2.0, 1.0, 0.0), host="a", at_s=100.0, exchanges=(exchange(1, 1.0),))
    far = part(1, 1, row(2, 2, 2.0, 2.0, 1.0, 0.0), host="b", at_s=137.0, exchanges=(exchange(1, 1.1),))
    first, second = rank_times(of_parts(near, far, events=(started(),)))
    assert first.ended_s.tolist() == [2.0]
    assert second.ended_s.tolist() == pytest.approx([1.9])


def test_exchanges_of_one_start_do_not_set_the_clocks_of_another():
    """Exchange 2 was lost with the first start and repeated; rank 1 resumed on another host, whose clock is wrong."""

    def begun(rank, host, at_s, *exchanges):
        return part(rank, rank, row(2, 2, 2.0, 2.0, 1.0, 0.0), host=host, at_s=at_s, exchanges=exchanges)

    def at(event, at_s):
        return event.model_copy(update={"at_s": at_s})

    events = (started(), at(finished(), 110.0), at(started(resumed=1), 9000.0), at(finished(), 9010.0))
    parts = (
        begun(0, "a", 100.0, exchange(1, 1.0), exchange(2, 2.0)),
        begun(0, "a", 9000.0, exchange(2, 1.0), exchange(3, 2.0)),
        begun(1, "b", 100.0, exchange(1, 1.0), exchange(2, 2.0)),
        begun(1, "c", 9037.0, exchange(2, 1.0), exchange(3, 2.0)),
    )
    times = rank_times(of_parts(*parts, events=events))
    assert [one.ended_s.tolist() for one in times] == [pytest.approx([end]) for end in (2.0, 12.0, 2.0, 12.0)]


def test_a_run_whose_first_rank_changed_its_host_is_set_right_in_both_starts():
    def begun(rank, host, at_s):
        exchanges = (exchange(1, 1.0),)
        return part(rank, rank, row(2, 2, 2.0, 2.0, 1.0, 0.0), host=host, at_s=at_s, exchanges=exchanges)

    ends = [finished().model_copy(update={"at_s": at_s}) for at_s in (110.0, 9010.0)]
    events = (started(), ends[0], started(resumed=1).model_copy(update={"at_s": 9000.0}), ends[1])
    parts = (begun(0, "a", 100.0), begun(0, "b", 9000.0), begun(1, "b", 103.0), begun(1, "c", 9003.0))
    times = rank_times(of_parts(*parts, events=events))
    assert [one.ended_s.tolist() for one in times] == [pytest.approx([end]) for end in (2.0, 12.0, 2.0, 12.0)]


def test_an_interruption_takes_no_time_and_starts_before_a_fresh_one_do_not_count():
    def begun(at_s, step):
        return started(resumed=step).model_copy(update={"at_s": at_s})

    def steps(at_s):
        return part(0, 0, row(5, 5, 2.0, 2.0, 1.0, 0.0), at_s=at_s)

    ends = [finished().model_copy(update={"at_s": at_s}) for at_s in (102.0, 1002.0, 9002.0)]
    events = (begun(100.0, 0), ends[0], begun(1000.0, 0), ends[1], begun(9000.0, 5), ends[2])
    times = rank_times(of_parts(steps(100.0), steps(1000.0), steps(9000.0), events=events))
    assert [part.ended_s.tolist() for part in times] == [[2.0], [4.0]]


def test_the_phases_of_a_simulated_run_add_up_to_its_time():
    made = simulated(steps=100)
    for times, total in zip(
        rank_times(of_parts(*made.parts, events=made.run.events)), made.run.events[-1].phases, strict=True
    ):
        assert times.phases_s.sum() == pytest.approx(times.seconds.sum(), rel=1e-6)
        assert times.phases_s[:, 0].sum() == pytest.approx(total.compute_s)
        assert times.steps.sum() == 100


def test_each_record_is_read_once_however_many_ranks_average_together():
    ranks = 32
    rows = [StepTimes(step, 1, float(step), 1.0, 0.5, 0.3, 0.0, 0.0, 8.0, 0) for step in range(1, 2001)]
    parts = [part(rank, rank, *rows) for rank in range(ranks)]

    def least_s(every):
        events, durations_s = (started(every=every).model_copy(update={"at_s": 0.0}),), []
        for _ in range(3):
            began_s = time.process_time()
            rank_times(of_parts(*parts, events=events))
            durations_s.append(time.process_time() - began_s)
        return min(durations_s)

    assert least_s("global") < 4 * least_s(10)  # with nodes of one rank, none is compared with another
