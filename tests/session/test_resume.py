"""A run resumed is bit-identical to one not interrupted; a killed save never costs the checkpoint before it."""

import re

import pytest

from evenly.errors import CheckpointDamageError
from tests.processes import collect, run_processes, start_processes
from tests.ranks import ragged

TRAIN = "tests.session.programs:train"


def damage(file):
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def without(result, *names):
    return {key: value for key, value in result.items() if key not in names}


def test_resumed_inside_a_period_bit_for_bit(tmp_path):
    nodes = ragged(3, 1)  # three ranks: the order in which gradients are summed matters in the last bit
    whole = run_processes(nodes, TRAIN, {"folder": str(tmp_path / "whole")})
    crash = {"folder": str(tmp_path / "cut"), "crash_rank": 1, "crash_step": 7}
    ended = collect(start_processes(nodes, TRAIN, crash))
    assert all(rank.code != 0 for rank in ended)
    resumed = run_processes(nodes, TRAIN, {"folder": str(tmp_path / "cut")})
    assert [without(r, "made") for r in resumed] == [without(r, "made") for r in whole]
    assert resumed[0]["made"] == whole[0]["made"] - 6  # from step 6, in the middle of a period of 4 and of an epoch
    assert len({r["model"] for r in resumed}) == 1


@pytest.mark.parametrize(
    "exchange",
    [
        {"overlap": 3, "codec": "int8", "optimizer_state": "average"},
        {"overlap": 4, "fragments": 2, "outer": "nesterov", "codec": "bf16"},
    ],
)
def test_resumed_with_an_exchange_under_way_bit_for_bit(tmp_path, exchange):
    nodes = ragged(3, 1)
    whole = run_processes(nodes, TRAIN, {"folder": str(tmp_path / "whole"), "exchange": exchange})
    crash = {"folder": str(tmp_path / "cut"), "crash_rank": 1, "crash_step": 7, "exchange": exchange}
    collect(start_processes(nodes, TRAIN, crash))
    resumed = run_processes(nodes, TRAIN, {"folder": str(tmp_path / "cut"), "exchange": exchange})
    assert [without(r, "made") for r in resumed] == [without(r, "made") for r in whole]
    assert resumed[0]["made"] == whole[0]["made"] - 6  # the exchange of step 4 is merged after step 7 or 8
    assert len({r["model"] for r in resumed}) == 1


def test_other_settings_of_the_exchange_are_refused_inside_a_period(tmp_path):
    nodes = ragged(1, 1)
    coded = {"folder": str(tmp_path / "run"), "exchange": {"codec": "int8"}}
    collect(start_processes(nodes, TRAIN, {**coded, "crash_rank": 1, "crash_step": 7}))
    ended = collect(start_processes(nodes, TRAIN, {"folder": str(tmp_path / "run"), "exchange": {"codec": "fp32"}}))
    assert all(rank.code != 0 for rank in ended)
    assert "with other settings of the exchange" in ended[0].errors


def test_killed_while_saving_resumes_from_the_checkpoint_before(tmp_path):
    nodes = ragged(1, 1)
    whole = run_processes(nodes, TRAIN, {"folder": str(tmp_path / "whole"), "epochs": 2})
    crash = {"folder": str(tmp_path / "cut"), "epochs": 2, "how": "while saving", "crash_rank": 1, "crash_step": 2}
    ended = collect(start_processes(nodes, TRAIN, crash))
    assert all(rank.code != 0 for rank in ended)
    saved = sorted(path.name for path in (tmp_path / "cut" / "checkpoints").glob("step-*"))
    assert saved == ["step-000000003"]
    resumed = run_processes(nodes, TRAIN, {"folder": str(tmp_path / "cut"), "epochs": 2})
    assert [without(r, "made") for r in resumed] == [without(r, "made") for r in whole]
    assert resumed[0]["made"] == whole[0]["made"] - 3
    assert not list((tmp_path / "cut" / "checkpoints").glob(".*")), "half-written folders are cleared"


def test_resumed_on_another_cluster(tmp_path):
    cut = {"folder": str(tmp_path / "run"), "crash_rank": 0, "crash_step": 7}
    collect(start_processes(ragged(2, 1), TRAIN, cut))
    resumed = run_processes(ragged(1, 1), TRAIN, {"folder": str(tmp_path / "run")})
    assert len({r["model"] for r in resumed}) == 1
    assert resumed[0]["nodes"] == [[0], [1]]
    assert resumed[0]["step"] > 6
    samples_left = 3 * 53 - 6 * 12  # each epoch's samples once, whatever the split
    assert resumed[0]["made"] >= samples_left // 8


def test_nodes_without_a_common_file_system(tmp_path):
    nodes = ragged(1, 1)
    shared = run_processes(nodes, TRAIN, {"folder": str(tmp_path / "shared")})
    own = {"folder": str(tmp_path / "own"), "own_folders": True}
    collect(start_processes(nodes, TRAIN, {**own, "crash_rank": 0, "crash_step": 7, "how": "raise"}))
    for node in range(2):
        files = {path.name for path in (tmp_path / f"own-{node}" / "checkpoints" / "step-000000006").iterdir()}
        assert files == {"manifest.json", f"node-{node}.json", f"node-{node}.safetensors",
                         f"rank-{node}.json", f"rank-{node}.safetensors"}  # fmt: skip
    resumed = run_processes(nodes, TRAIN, own)
    assert [without(r, "made") for r in resumed] == [without(r, "made") for r in shared]


@pytest.mark.parametrize(("how", "failing"), [("raise", 2), ("kill", 2), ("kill", 0)])
def test_a_failing_rank_ends_all_at_once(tmp_path, how, failing):
    """Also rank 0, which hosts the store where the others would read why."""
    crash = {"crash_rank": failing, "crash_step": 5, "how": how, "pause_s": 0.01}
    arguments = {"folder": str(tmp_path / "run"), "every": 50, "epochs": 200, "checkpoint_every": None, **crash}
    ended = collect(start_processes(ragged(2, 1, 1), TRAIN, arguments), limit_s=40.0)  # the time limit is 60 s
    assert all(rank.code != 0 for rank in ended)
    for rank in ended[:failing] + ended[failing + 1 :]:
        assert "PeerError" in rank.errors
        if how == "raise":
            assert "rank 2" in rank.errors
            assert "a broken sample" in rank.errors


def test_a_rank_that_hangs_is_named_at_the_time_limit_and_nobody_lingers(tmp_path):
    arguments = {
        "folder": str(tmp_path / "run"),
        "crash_rank": 1,
        "crash_step": 3,
        "how": "stop",
        "every": 4,
        "timeout_s": 6.0,
    }
    ranks = start_processes(ragged(1, 1, 1), TRAIN, arguments)
    try:
        ended = collect([ranks[0], ranks[2]], limit_s=45.0)
    finally:
        ranks[1].process.kill()
        ranks[1].process.join()
        ranks[1].folder.cleanup()
    for rank in ended:
        assert rank.code != 0
        assert re.search(r"ranks \[1\] did not arrive|rank 1 .*has given no sign of life", rank.errors), rank.errors


def test_checkpoints_by_steps_fall_on_steps_also_at_an_epochs_end_and_under_accumulation(tmp_path):
    run_processes(
        ragged(1), TRAIN, {"folder": str(tmp_path / "a"), "checkpoint_every": 7, "epochs": 2, "every": "epoch"}
    )
    steps = [int(path.name[5:]) for path in sorted((tmp_path / "a" / "checkpoints").glob("step-*"))]
    assert steps == [14, 21, 28]  # 14 steps an epoch, the last three are kept
    arguments = {"folder": str(tmp_path / "b"), "checkpoint_every": 2, "epochs": 1, "accumulate": 3}
    run_processes(ragged(1), TRAIN, arguments)
    steps = [int(path.name[5:]) for path in sorted((tmp_path / "b" / "checkpoints").glob("step-*"))]
    assert steps == [2, 4]


def test_a_rank_that_raises_while_a_checkpoint_is_written_does_not_cost_it(tmp_path):
    nodes, crash = ragged(2, 1), {"crash_rank": 1, "crash_step": 7, "how": "raise", "slow_disk_s": 0.3}
    whole = run_processes(nodes, TRAIN, {"folder": str(tmp_path / "whole")})
    ended = collect(start_processes(nodes, TRAIN, {"folder": str(tmp_path / "cut"), **crash}))
    assert all(rank.code != 0 for rank in ended)
    resumed = run_processes(nodes, TRAIN, {"folder": str(tmp_path / "cut")})
    assert [without(r, "made") for r in resumed] == [without(r, "made") for r in whole]
    assert resumed[0]["made"] == whole[0]["made"] - 6


def test_a_damaged_checkpoint_gives_way_to_the_one_before_and_the_log_says_so(tmp_path):
    """The file of one rank is damaged: all go on from the checkpoint before, and end as the run that was whole."""
    nodes = ragged(1, 1)
    whole = run_processes(nodes, TRAIN, {"folder": str(tmp_path), "epochs": 1})
    found = sorted((tmp_path / "checkpoints").glob("step-*"))
    damage(found[-1] / "rank-1.safetensors")
    ranks = collect(start_processes(nodes, TRAIN, {"folder": str(tmp_path), "epochs": 1}))
    assert [rank.code for rank in ranks] == [0, 0]
    assert [without(rank.result, "made") for rank in ranks] == [without(r, "made") for r in whole]
    assert ranks[0].result["made"] == int(found[-1].name[5:]) - int(found[-2].name[5:])
    assert re.search(
        rf"ranks \[1\] could not read .*rank-1\.safetensors was to be read, but it is damaged: its SHA-256 is .* "
        rf"goes on from \S+{found[-2].name}, and {found[-1].name} is now damaged-{found[-1].name}",
        ranks[0].errors,
    )
    assert (tmp_path / "checkpoints" / f"damaged-{found[-1].name}").is_dir()


def test_without_a_whole_checkpoint_every_rank_is_told_what_is_damaged(tmp_path):
    run_processes(ragged(1, 1), TRAIN, {"folder": str(tmp_path), "epochs": 1})
    for checkpoint in (tmp_path / "checkpoints").glob("step-*"):
        damage(checkpoint / "rank-1.safetensors")
    for rank in collect(start_processes(ragged(1, 1), TRAIN, {"folder": str(tmp_path)})):
        assert rank.code != 0
        assert CheckpointDamageError.__name__ in rank.errors
        assert "rank-1.safetensors" in rank.errors
        assert "SHA-256" in rank.errors
        assert "none of its checkpoints is whole" in rank.errors


@pytest.mark.parametrize("where", ["device", "data"])
def test_a_rank_that_fails_before_it_prepares_is_heard_by_the_others(where):
    heard, own = run_processes(ragged(1, 1), "tests.session.programs:fail_early", {"where": where})
    assert heard.startswith("True ")
    assert "rank 1" in heard
    assert ("cuda:9" if where == "device" else "no data here") in heard
    assert "PeerError" not in own


def test_a_skipped_step_on_one_node_does_not_part_the_ranks_at_a_checkpoint(tmp_path):
    first, second = run_processes(ragged(1, 1), "tests.session.programs:scale", {"folder": str(tmp_path)})
    assert first == second
    assert first[0] == 7
