"""A run that goes on is shown from its files: how each rank spends its last seconds, and what it sends."""

from pathlib import Path

import pytest

from evenly.errors import SpecError
from evenly.reports import read_recorded
from evenly.reports.live import FollowedRun
from evenly.spec import (
    EveryGradient,
    LinkBytes,
    Plan,
    RankExchange,
    RankStarted,
    RunFailed,
    RunFinished,
    RunStarted,
    StepTimes,
)
from tests.reports.plans import cluster_of
from tests.reports.recorded import write_recorded


def add(folder: Path, rank: int, *entries: object, node: int = 0) -> None:
    """Adds lines to the file of a rank, which is begun by its first one."""
    file = folder / "ranks" / f"{rank}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        entries = (RankStarted(at_s=0.0, rank=rank, node=node, host=f"host-{node}"), *entries)
    lines = [entry.to_line() if isinstance(entry, StepTimes) else entry.model_dump_json() for entry in entries]  # type: ignore[attr-defined]
    with file.open("a") as stream:
        stream.write("".join(f"{line}\n" for line in lines))


def row(step: int, *, compute_s: float = 0.0, gradients_s: float = 0.0, exchange_s: float = 0.0) -> StepTimes:
    """Returns a step of one second that ends at the second of its number."""
    return StepTimes(step, 1, float(step), 1.0, compute_s, gradients_s, exchange_s, 0.0, 4.0, 100)


def test_each_rank_has_a_row_with_the_parts_of_its_time(tmp_path: Path) -> None:
    add(tmp_path, 0, row(1, compute_s=0.2, gradients_s=0.8))
    add(tmp_path, 1, row(1, compute_s=0.7, gradients_s=0.3))
    add(tmp_path, 2, row(1, compute_s=0.5, exchange_s=0.4), node=1)
    run = FollowedRun(tmp_path)
    assert run.read()
    first, second, third = run.rows()
    assert [(r.rank, r.node, r.host, r.step) for r in (first, second, third)] == [
        (0, 0, "host-0", 1), (1, 0, "host-0", 1), (2, 1, "host-1", 1)]  # fmt: skip
    assert first.parts == pytest.approx((0.2, 0.3, 0.0, 0.5, 0.0))  # it waits for the slower rank of its node
    assert second.parts == pytest.approx((0.7, 0.3, 0.0, 0.0, 0.0))
    assert third.parts == pytest.approx((0.5, 0.0, 0.4, 0.0, 0.1))
    assert [r.state for r in (first, second, third)] == ["waiting", "computing", "computing"]


def test_a_run_with_global_gradients_waits_for_all_ranks(tmp_path: Path) -> None:
    plan = Plan.even(cluster_of(1, 1), batch_size=4, period=EveryGradient())
    started = RunStarted(at_s=0.0, name="x", cluster=cluster_of(1, 1), plan=plan)
    (tmp_path / "run.jsonl").write_text(started.model_dump_json() + "\n")
    add(tmp_path, 0, row(1, compute_s=0.2, gradients_s=0.8))
    add(tmp_path, 1, row(1, compute_s=0.7, gradients_s=0.3), node=1)
    run = FollowedRun(tmp_path)
    run.read()
    assert run.rows()[0].parts == pytest.approx((0.2, 0.3, 0.0, 0.5, 0.0))


def test_only_the_last_seconds_count_and_bytes_are_those_since_the_start(tmp_path: Path) -> None:
    add(tmp_path, 0, *(row(step, compute_s=1.0) for step in range(1, 8)))
    run = FollowedRun(tmp_path)
    run.read()
    done = RankExchange(at_s=9.0, number=1, step=7, merged=7, seconds=1, met_s=0, waited_s=0, sent_bytes=5000)
    add(tmp_path, 0, *(row(step, gradients_s=1.0) for step in range(8, 20)), done, LinkBytes(at_s=9.0, sent_bytes=77))
    assert run.read()
    (live,) = run.rows()
    assert live.parts == pytest.approx((0, 1.0, 0, 0, 0))
    assert (live.step, live.sent_bytes, live.link_bytes) == (19, 19 * 100 + 5000, 77)
    assert live.steps_per_s == pytest.approx(1.0)
    assert not run.read()


def test_a_second_start_and_a_file_that_begins_anew_count_from_zero(tmp_path: Path) -> None:
    add(tmp_path, 0, row(1), row(2))
    run = FollowedRun(tmp_path)
    run.read()
    add(tmp_path, 0, RankStarted(at_s=9.0, rank=0, node=0, host="b"), row(3))
    run.read()
    assert [(r.step, r.host, r.sent_bytes) for r in run.rows()] == [(3, "b", 100)]
    (tmp_path / "ranks" / "0.jsonl").unlink()
    add(tmp_path, 0, row(9))
    run.read()
    assert [(r.step, r.host, r.sent_bytes) for r in run.rows()] == [(9, "host-0", 100)]


def test_a_line_that_is_not_whole_yet_is_read_later_and_a_broken_one_never(tmp_path: Path) -> None:
    add(tmp_path, 0, row(1))
    file, line = tmp_path / "ranks" / "0.jsonl", row(2).to_line()
    with file.open("a") as stream:
        stream.write('{"event": "nothing"}\n\x00\x01\n[1, 2]\n' + line[:10])
    run = FollowedRun(tmp_path)
    run.read()
    assert run.rows()[0].step == 1
    with file.open("a") as stream:
        stream.write(line[10:] + "\n")
    run.read()
    assert run.rows()[0].step == 2


@pytest.mark.parametrize("end", ["finished", "failed"])
def test_it_is_over_when_the_last_start_has_ended(tmp_path: Path, end: str) -> None:
    whole = read_recorded(write_recorded(tmp_path / "whole")).run
    folder = tmp_path / "run"
    folder.mkdir()
    run = FollowedRun(folder)
    assert not run.read()
    assert not run.is_over
    ended = [event for event in whole.events if isinstance(event, RunFinished)]
    failed = RunFailed(at_s=1.0, step=3, error="out of memory")
    last = ended if end == "finished" else [failed]
    events = [event for event in whole.events if not isinstance(event, RunFinished)]
    for part, is_over in ((events, False), (last, True), (events[:1], False)):
        with (folder / "run.jsonl").open("a") as stream:
            stream.write("".join(event.model_dump_json() + "\n" for event in part))
        assert run.read()
        assert run.is_over == is_over
    assert run.values["accuracy"] > 0.5
    assert not run.problems


def test_what_is_no_event_is_told_and_what_follows_is_read(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text('{"event": "unknown"}\n{"event": "failed", "at_s": 1, "step": 1}\n')
    run = FollowedRun(tmp_path / "run.jsonl")
    run.read()
    assert len(run.problems) == 1


def test_there_must_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="there is no such folder"):
        FollowedRun(tmp_path / "nowhere")


def test_ranks_of_an_earlier_start_are_not_shown(tmp_path: Path) -> None:
    def start(*nodes: int) -> str:
        return RunStarted(at_s=0.0, name="x", cluster=cluster_of(*nodes)).model_dump_json() + "\n"

    (tmp_path / "run.jsonl").write_text(start(4))
    for rank in range(4):
        add(tmp_path, rank, row(1, compute_s=1.0))
    run = FollowedRun(tmp_path)
    run.read()
    assert len(run.rows()) == 4
    with (tmp_path / "run.jsonl").open("a") as stream:
        stream.write(start(2))
    run.read()
    assert run.rows() == []
    for rank in range(2):
        add(tmp_path, rank, RankStarted(at_s=9.0, rank=rank, node=0, host="b"), row(5))
    run.read()
    assert [(r.rank, r.step, r.host) for r in run.rows()] == [(0, 5, "b"), (1, 5, "b")]
    again = FollowedRun(tmp_path)
    again.read()
    assert again.rows() == run.rows()


def test_a_line_that_a_crash_cut_and_a_new_start_replaced_hides_nothing(tmp_path: Path) -> None:
    add(tmp_path, 0, row(1))
    file = tmp_path / "ranks" / "0.jsonl"
    whole = file.read_text()
    file.write_text(whole + "[7,1,")
    run = FollowedRun(tmp_path)
    run.read()
    file.write_text(whole)
    add(tmp_path, 0, RankStarted(at_s=9.0, rank=0, node=0, host="b"), row(3))
    run.read()
    assert [(r.step, r.host) for r in run.rows()] == [(3, "b")]
