"""Plans in sessions: unequal batches train as on one device, ranks may be left out, measurements become plans."""

import pytest
import torch

from evenly import Run, report
from evenly.reports import prediction_rows
from evenly.session.rebalancing import lean_factors, unit_factors
from evenly.spec import Layout, RunFinished
from tests.processes import collect, run_processes, start_processes
from tests.ranks import ragged

UNEVEN = "tests.session.plan_programs:uneven"


def parameters(result):
    return [torch.tensor(values, dtype=torch.float64) for values in result["parameters"]]


def test_unequal_batches_train_as_on_one_device():
    (alone,) = run_processes(ragged(1), UNEVEN, {"samples": [10]})
    for result in run_processes(ragged(2), UNEVEN, {"samples": [7, 3]}):
        torch.testing.assert_close(parameters(result), parameters(alone), rtol=1e-10, atol=1e-12)


def test_ranks_that_are_left_out_wait_for_the_end(tmp_path):
    results = run_processes(ragged(2, 2), UNEVEN, {"samples": [0, 7, 3, 0], "folder": str(tmp_path / "run")})
    assert [result.get("left_out", False) for result in results] == [True, False, False, True]
    assert [(results[rank]["rank"], results[rank]["world"]) for rank in (1, 2)] == [(0, 2), (1, 2)]
    assert [results[rank]["summed_by_the_script"] for rank in (1, 2)] == [[2, 1], [2, 1]]
    assert results[1]["sizes"] == [7] * 10
    torch.testing.assert_close(parameters(results[1]), parameters(results[2]))
    run = Run.read(tmp_path / "run")
    assert run.events[0].plan.nodes == [[0], [1]]
    assert run.events[0].left_out == {0: "too slow", 3: "too slow"}
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) > 0


def test_a_node_that_is_left_out_waits_and_says_why():
    busy, idle = collect(start_processes(ragged(1, 1), UNEVEN, {"samples": [10, 0]}), limit_s=60)
    assert idle.result == {"left_out": True}
    assert (busy.result["rank"], busy.result["world"]) == (0, 1)
    assert "rank 1 is left out and waits until the run is over: too slow" in idle.errors
    assert "training on 1 of 2 ranks: the others would only slow these down, as plan.explain() says" in busy.errors


def test_a_group_of_the_script_still_has_the_ranks_that_are_left_out_and_a_warning_says_so():
    program = "tests.session.plan_programs:uneven_in_a_group_of_the_script"
    busy, idle = collect(start_processes(ragged(1, 1), program, {"samples": [10, 0]}), limit_s=60)
    assert idle.result == {"left_out": True}
    assert busy.result["world"] == 1
    assert "the process group that the script opened still has 2 ranks, of which only 0 train" in busy.errors


def test_a_session_says_what_speaks_against_a_measurement():
    first, second = collect(start_processes(ragged(2), "tests.session.plan_programs:doubted", {}), limit_s=60)
    assert "the plan is doubtful: repeated steps of 2 ranks lie up to 90% apart" in first.errors
    assert "doubtful" not in second.errors
    assert sum(first.result["planned"]) == 32


@pytest.mark.parametrize("nodes", [(2,), pytest.param((2, 1), marks=pytest.mark.slow)])
def test_a_report_shows_what_a_measured_plan_predicted_beside_what_it_took(nodes, tmp_path):
    settings = {"batch": 32, "folder": str(tmp_path), "size": 640}
    results = run_processes(ragged(*nodes), "tests.session.plan_programs:measured", settings, limit_s=110)
    predicted_s = next(result["step_s"] for result in results if "planned" in result)
    run = Run.read(tmp_path)
    rows = {name: cells for name, *cells in prediction_rows(run)}
    assert float(rows["a step"][0]) == pytest.approx(1e3 * predicted_s, rel=0.1)
    finished = run.last(RunFinished)
    assert finished.phases[0].step.lower_s <= finished.phases[0].step.median_s <= finished.phases[0].step.upper_s
    assert 0 < finished.phases[0].step.median_s < finished.seconds
    for phases in finished.phases:
        assert f"rank {phases.rank} computing" in rows
        assert phases.computing.median_s <= phases.step.median_s
    assert ("an exchange" in rows) == (len(run.events[0].plan.nodes) > 1)
    assert "predicted ms" in report(run)


def test_a_measurement_becomes_a_plan_that_trains():
    results = run_processes(ragged(2), "tests.session.plan_programs:measured", {"batch": 32}, limit_s=110)
    busy = [result for result in results if "planned" in result]  # a small network may need one rank only
    assert len({str(result["planned"]) for result in busy}) == 1
    planned = busy[0]["planned"]
    for ranks in busy[0]["replicas"]:
        assert len({planned[rank] for rank in ranks}) == 1  # who holds a network together trains the same samples
    repeated = {rank for ranks in busy[0]["replicas"] for rank in ranks[1:]}
    assert sum(samples for rank, samples in enumerate(planned) if rank not in repeated) == 32
    trained = [results[rank]["sizes"] for rank in range(2) if planned[rank] and rank not in repeated]
    assert [sum(sizes) for sizes in zip(*trained, strict=True)] == [32, 18]  # of 50
    assert busy[0]["step_s"] > 0


@pytest.mark.alone
def test_batches_follow_a_device_that_becomes_slow_and_nothing_is_lost():
    slowed = "tests.session.plan_programs:slowed"
    (alone,) = run_processes(ragged(1), slowed, {"samples": [24], "slow_s": [0.0], "after": 0, "rebalance": False})
    given = {"samples": [12, 12], "slow_s": [0.002, 0.002], "after": 20, "rebalance": True}
    first, second = run_processes(ragged(2), slowed, given, limit_s=100)
    assert all(a + b == 24 for a, b in zip(first["sizes"], second["sizes"], strict=True))
    assert max(first["sizes"][:20]) <= 15  # a busy machine may move some
    assert first["sizes"][45] >= 17  # 19 of 24 is the ideal
    torch.testing.assert_close(parameters(first), parameters(alone), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(parameters(second), parameters(first), rtol=0, atol=0)


@pytest.mark.alone
def test_batches_follow_no_further_than_memory_reaches():
    given = {"samples": [12, 12], "slow_s": [0.002, 0.002], "after": 10, "rebalance": True, "most": [15, 24]}
    first, second = run_processes(ragged(2), "tests.session.plan_programs:slowed", given, limit_s=100)
    assert first["sizes"][-1] == 15
    assert second["sizes"][-1] == 9


@pytest.mark.alone
def test_batches_change_between_steps_only():
    slowed = "tests.session.plan_programs:slowed"
    given = {"samples": [12, 12], "slow_s": [0.001, 0.001], "after": 10, "rebalance": True, "batches": 2}
    first, second = run_processes(ragged(2), slowed, given, limit_s=100)
    pairs = list(zip(first["sizes"][::2], first["sizes"][1::2], strict=True))
    assert all(a == b for a, b in pairs)
    assert pairs[-1][0] > 12
    alone = {**given, "samples": [24], "slow_s": [0.0], "rebalance": False}
    (truth,) = run_processes(ragged(1), slowed, alone)
    torch.testing.assert_close(parameters(second), parameters(truth), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("local", [False, True])
def test_a_run_with_ranks_left_out_goes_on_from_its_checkpoint(tmp_path, local):
    given = {"samples": [0, 7, 3, 0], "local": local}
    run_processes(ragged(2, 2), UNEVEN, {**given, "folder": str(tmp_path / "a"), "epochs": 1})
    resumed = run_processes(ragged(2, 2), UNEVEN, {**given, "folder": str(tmp_path / "a"), "epochs": 2})
    at_once = run_processes(ragged(2, 2), UNEVEN, {**given, "folder": str(tmp_path / "b"), "epochs": 2})
    assert len(resumed[1]["sizes"]) == len(at_once[1]["sizes"]) // 2
    for rank in (1, 2):
        torch.testing.assert_close(parameters(resumed[rank]), parameters(at_once[rank]), rtol=0, atol=0)


@pytest.mark.alone
@pytest.mark.parametrize("nodes", [1, 2])
def test_units_of_a_cut_network_follow_a_device_that_becomes_slow_and_the_losses_stay(nodes: int) -> None:
    program = "tests.session.plan_programs:cut_and_slowed"
    given = {"nodes": nodes, "after": 20, "unit_s": 0.001, "size": 600}
    moved = run_processes(ragged(2 * nodes), program, {**given, "rebalance": True}, limit_s=100)
    still = run_processes(ragged(2 * nodes), program, {**given, "rebalance": False, "unit_s": 0.0}, limit_s=100)
    rows = [result["rows"] for result in moved]
    assert all(a + b == 48 for node in range(nodes) for a, b in zip(rows[2 * node], rows[2 * node + 1], strict=True))
    assert min(rows[-1][:20]) >= 18  # a busy machine may move some
    assert rows[-1][40] <= 13  # 10 of 48 is the ideal
    assert moved[0]["moves"]
    assert all(result["rows"][-1] == 24 for result in still)
    for result, other in zip(moved, still, strict=True):
        until = next((step for step, size in enumerate(result["sizes"]) if size != 12), None)  # batches follow, too
        assert until is None or until >= 5
        torch.testing.assert_close(result["losses"][:until], other["losses"][:until], rtol=1e-9, atol=1e-11)
        if until is None:
            torch.testing.assert_close(
                parameters(result), parameters(other), rtol=1e-7, atol=1e-8
            )  # 100 steps of AdamW
    assert nodes > 1 or moved[0]["sizes"] == still[0]["sizes"]


def test_a_slow_rank_that_messages_keep_busy_gets_fewer_units():
    layout = Layout.model_construct(shares=(0.8, 0.2), members=(0, 1))
    alike = [0.32, 0.32]  # both compute equally long, so by that nothing is to be gained
    assert unit_factors(layout, alike) is None
    assert lean_factors(layout, alike, alike) is None  # nobody waits
    first, second = lean_factors(layout, alike, [0.48, 0.48])
    assert second == pytest.approx(0.7)
    assert 0.8 * first + 0.2 * second == pytest.approx(1.0)
    slow = [0.32 / 0.8, 0.32 / 0.2]
    busy = 0.16 / slow[1]
    assert (0.8 * first + busy) * slow[0] == pytest.approx((0.2 * second + busy) * slow[1])  # all finish together
