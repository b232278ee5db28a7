"""Networks that torch shards inside a node, by FSDP2 or DTensors by hand, train as the single-process reference."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.processes import collect, run_processes, start_processes

PROGRAMS = "tests.nodes.torch_shard_programs"
NODES = [[0, 1], [2]]
LIMIT = 1e-9  # of the differences, in float64

CASES = {
    "every step": {"optimizer": "momentum", "every": 1, "kinds": ["fsdp", "fsdp"]},
    "a node that holds it whole": {"optimizer": "adamw", "every": 3, "kinds": ["fsdp", "whole"]},
    "beside the training": {
        "optimizer": "adam",
        "every": 3,
        "kinds": ["fsdp", "fsdp"],
        "exchange": {"overlap": 2, "fragments": 2, "optimizer_state": "average"},
    },
    "outer optimizer": {
        "optimizer": "sgd",
        "every": 2,
        "kinds": ["fsdp", "fsdp"],
        "exchange": {"outer": "nesterov"},
    },
    "tensor parallelism": {
        "optimizer": "adam",
        "every": 3,
        "kinds": ["tensor", "whole"],
        "exchange": {"optimizer_state": "average"},
    },
}


SLOW = ("beside the training", "outer optimizer")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in CASES]
)
def test_it_trains_as_one_process(case: str) -> None:
    results = run_processes(NODES, f"{PROGRAMS}:train", {"nodes": NODES, **CASES[case]})
    assert [max(differences) < LIMIT for differences in results] == [True] * 3, results
    assert len(results[0]) == 9


def test_gradients_are_weighted_by_samples_in_odd_steps() -> None:
    results = run_processes(NODES, f"{PROGRAMS}:odd_steps", {"nodes": NODES})
    assert all(difference < LIMIT for found in results for difference in found.values()), results


def _run(folder: Path, kinds: list[str], **more: object) -> list[dict]:
    return run_processes(NODES, f"{PROGRAMS}:resumed", {"nodes": NODES, "folder": str(folder), "kinds": kinds, **more})


def _difference(one: list[dict], other: list[dict]) -> float:
    pairs = [
        (torch.tensor(a), torch.tensor(b))
        for left, right in zip(one, other, strict=True)
        for key in ("parameters", "state")
        for a, b in zip(left[key], right[key], strict=True)
    ]
    return max(float((a - b).abs().max()) for a, b in pairs)


def test_a_checkpoint_is_resumed_as_plain_and_as_fsdp(tmp_path: Path) -> None:
    whole = _run(tmp_path / "whole", ["whole", "whole"])
    dead = collect(
        start_processes(
            NODES,
            f"{PROGRAMS}:resumed",
            {"nodes": NODES, "folder": str(tmp_path / "fsdp"), "kinds": ["fsdp", "fsdp"], "end_step": 11},
        )
    )
    assert [rank.code for rank in dead] == [9, 9, 9], [rank.errors[-1500:] for rank in dead]
    shutil.copytree(tmp_path / "fsdp", tmp_path / "plain")
    weights = tmp_path / "weights.pt"
    again = _run(tmp_path / "fsdp", ["fsdp", "whole"], weights=str(weights))
    assert _difference(again, whole) < LIMIT
    assert _difference(_run(tmp_path / "plain", ["whole", "whole"]), whole) < LIMIT
    saved = [value for value in torch.load(weights).values() if value.ndim > 1]
    for value, numbers in zip(saved, [row for row in again[0]["parameters"] if len(row) > 10], strict=True):
        torch.testing.assert_close(value.flatten(), torch.tensor(numbers, dtype=torch.float64))


@pytest.mark.slow
def test_exchanges_with_a_code_go_on_inside_a_period(tmp_path: Path) -> None:
    exchange = {"overlap": 3, "codec": "int8", "optimizer_state": "average"}
    whole = _run(tmp_path / "whole", ["fsdp", "fsdp"], exchange=exchange)
    arguments = {"nodes": NODES, "folder": str(tmp_path / "dead"), "kinds": ["fsdp", "fsdp"], "exchange": exchange}
    dead = collect(start_processes(NODES, f"{PROGRAMS}:resumed", {**arguments, "end_step": 11}))
    assert [rank.code for rank in dead] == [9, 9, 9], [rank.errors[-1500:] for rank in dead]
    assert _difference(_run(tmp_path / "dead", ["fsdp", "fsdp"], exchange=exchange), whole) < LIMIT


def test_what_cannot_be_averaged_is_refused() -> None:
    nodes = [[0, 1], [2, 3]]
    (found, *others) = run_processes(nodes, f"{PROGRAMS}:refusals", {"nodes": nodes})
    assert "FSDP shards the network over the ranks [0, 1], but the ranks [0, 1, 2, 3] all ranks" in found.pop("global")
    assert "over the ranks [0, 1], but the ranks [0, 1, 2, 3] are a node" in found.pop("one node")
    assert "its parameter '0.weight' is in none of them" in found.pop("partly")
    assert "a mesh of 2 dims, (2, 2)" in found.pop("mesh")
    mixed = [found.pop("mixed"), *(other["mixed"] for other in others)]
    assert all("2 ranks shard the network by FSDP" in message for message in mixed), mixed
    assert not found


def test_gradients_that_are_not_finite_end_the_run_or_the_step() -> None:
    for skipped, stopped in run_processes(NODES, f"{PROGRAMS}:poisoned", {"nodes": NODES}):
        assert skipped == "6 True"
        assert "NonFiniteError: the gradients of ranks [0, 1] became NaN" in stopped or "stopped" in stopped


def test_gathered_parameters_and_kept_gradients_do_no_harm() -> None:
    for found in run_processes(NODES, f"{PROGRAMS}:corners", {"nodes": NODES}):
        assert "a backward did not come from what a forward of the synchronized model" in found.pop("_foreign")
        assert found == {"_closure": 0.0, "_loaded": 0.0, "_zeroed": 1.0, "_skipped": 0, "_frozen": 0.0}


def test_batches_accumulated_in_a_session_are_weighted() -> None:
    differences = run_processes(NODES, f"{PROGRAMS}:accumulated", {"nodes": NODES})
    assert max(differences) < LIMIT
