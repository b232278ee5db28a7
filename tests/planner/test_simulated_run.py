"""A simulated run leaves the record that training would have left, marked as simulated."""

import pytest

from evenly import Run
from evenly.planner import plan, simulate, simulate_run
from evenly.reports import read_recorded, row_of, write_run
from evenly.spec import ExchangeDone, RunFinished, RunStarted
from tests.reports.plans import cluster_of, graph_of, profile_of
from tests.reports.recorded import SPEEDS, simulated


def test_the_record_is_read_back_as_it_was_written(tmp_path):
    made = simulated(steps=300)
    write_run(tmp_path / "run", made.run, made.parts)
    back = read_recorded(tmp_path / "run")
    assert back.run == Run.read(tmp_path / "run") == made.run
    assert back.problems == ()
    assert len(back.logs.parts) == 3
    assert made.run.last(RunStarted).settings["simulated"] is True


@pytest.mark.parametrize("jitter", [0.0, 0.3])
@pytest.mark.parametrize("every", [1, 10, 64, "global"])
def test_totals_are_those_of_the_forecast(jitter, every):
    cluster, graph = cluster_of(2, 1), graph_of()
    profile = profile_of(cluster, SPEEDS, graph)
    values = (plan(cluster, profile, graph, every=every, cut=False), cluster, profile, graph)
    made, forecast = (
        simulate_run(*values, name="r", steps=128, jitter=jitter),
        simulate(*values, steps=128, jitter=jitter),
    )
    finished = made.run.last(RunFinished)
    assert made.forecast == forecast
    assert finished.seconds == forecast.seconds
    assert (finished.steps, finished.samples) == (128, 128 * 100)
    assert finished.exchanges == len(made.run.of(ExchangeDone)) == (0 if every == "global" else forecast.exchanges)
    for part, device, phases in zip(made.parts, forecast.devices, finished.phases, strict=True):
        assert sum(row.steps for row in part.steps) == 128
        assert part.steps[-1].step == 128
        assert sum(row.compute_s for row in part.steps) == pytest.approx(device.compute_s)
        assert part.steps[-1].ended_s <= forecast.seconds * (1 + 1e-9)
        assert sum(row.seconds for row in part.steps) == pytest.approx(part.steps[-1].ended_s)
        spent_s = sum(row.compute_s + row.gradients_s + row.exchange_s + row.waiting_s for row in part.steps)
        assert spent_s == pytest.approx(part.steps[-1].ended_s)
        sent = sum(row.gradient_bytes for row in part.steps) + sum(done.sent_bytes for done in part.exchanges)
        assert sent == pytest.approx(device.sent_bytes, rel=1e-3, abs=200)
        assert phases.compute_s == pytest.approx(device.compute_s)
        assert phases.gradient_bytes + phases.exchange_bytes == pytest.approx(device.sent_bytes, rel=1e-3, abs=200)
    across = forecast.devices[2].sent_bytes  # it is alone on its node, and nodes send equal amounts to each other
    assert across > 0
    assert finished.interface_bytes == pytest.approx((across, across), rel=1e-3, abs=200)
    assert finished.sent_bytes == pytest.approx(0 if every == "global" else 2 * across, rel=1e-3, abs=200)
    for part, total in zip((made.parts[0], made.parts[2]), finished.interface_bytes, strict=True):
        assert part.links[-1].sent_bytes == pytest.approx(total, abs=1)
        assert part.links[-1].at_s == pytest.approx(forecast.seconds, rel=1e-5)
    assert row_of(made.run).mb_across == pytest.approx(2 * across / 1e6, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("every", [10, "global"])
def test_a_single_node_sends_nothing_to_others(every):
    cluster, graph = cluster_of(2), graph_of()
    profile = profile_of(cluster, [60.0, 30.0], graph)
    made = simulate_run(
        plan(cluster, profile, graph, every=every, cut=False), cluster, profile, graph, name="r", steps=50
    )
    finished = made.run.last(RunFinished)
    assert finished.interface_bytes == (0,)
    assert [link.sent_bytes for link in made.parts[0].links] == [0]
    for phases, device in zip(finished.phases, made.forecast.devices, strict=True):
        assert phases.gradient_bytes == pytest.approx(device.sent_bytes, rel=1e-3, abs=200)


def test_a_rank_that_is_left_out_is_named_with_its_reason():
    cluster, graph = cluster_of(2, 1), graph_of()
    profile = profile_of(cluster, [60.0, 30.0, 0.001], graph)
    made = plan(cluster, profile, graph, every=1, cut=False)
    assert made.roles[2].left_out
    run = simulate_run(made, cluster, profile, graph, name="r", steps=50)
    started = run.run.last(RunStarted)
    assert started.left_out == {2: made.roles[2].left_out}
    assert started.ranks == (0, 1)
    assert [part.started.rank for part in run.parts] == [0, 1]


def test_rows_grow_with_the_run_so_that_files_stay_small():
    few, many = (len(simulated(steps=steps, jitter=0.0, every=1000).parts[0].steps) for steps in (2_000, 200_000))
    assert many < 40 * few
