"""Every rank records its steps and exchanges in a file of its own, which stays small."""

import time
from pathlib import Path

import pytest

from evenly.exchange import ExchangeSummary
from evenly.session import rank_recorder
from evenly.session.rank_recorder import RankIdentity, RankRecorder, RankTotals
from evenly.session.run_clock import RunClock
from evenly.spec import CheckpointSaved, ExchangeDone, Run, RunFinished, read_rank_logs
from tests.processes import collect, run_processes, start_processes
from tests.ranks import ragged

IDENTITY = RankIdentity(0, 0, host="a", device="cpu:0")


class Clock(RunClock):
    """The time, as a test sets it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def record(folder: Path, clock: Clock, *, steps: int, step_s: float) -> None:
    made = 0
    recorder = RankRecorder(
        folder, IDENTITY, lambda: RankTotals(made, made * step_s / 2, 0, 0, 0, made * 4, 0), None, clock
    )
    for made in range(1, steps + 1):  # the recorder reads it
        clock.now += step_s
        recorder.step_done(made)
    recorder.close()


@pytest.mark.parametrize("step_s", [1e-3, 0.3])
def test_lines_become_longer_as_the_run_does(tmp_path: Path, clock: Clock, step_s: float) -> None:
    record(tmp_path, clock, steps=100_000, step_s=step_s)
    (part,) = read_rank_logs(tmp_path).parts
    assert sum(row.steps for row in part.steps) == 100_000
    assert sum(row.compute_s for row in part.steps) == pytest.approx(100_000 * step_s / 2, rel=1e-4)
    assert part.steps[0].seconds < 0.02 + 1.1 * step_s
    assert all(row.seconds <= max(0.02, row.ended_s / 4000) + 1.1 * step_s for row in part.steps)
    assert (tmp_path / "ranks" / "0.jsonl").stat().st_size < 2.5e6


def test_a_second_start_is_a_part_of_its_own_and_a_cut_line_is_dropped(tmp_path: Path, clock: Clock) -> None:
    record(tmp_path, clock, steps=3, step_s=0.1)
    with (tmp_path / "ranks" / "0.jsonl").open("a") as file:
        file.write("[7,1,")
    record(tmp_path, clock, steps=2, step_s=0.1)
    logs = read_rank_logs(tmp_path)
    assert [len(part.steps) for part in logs.parts] == [3, 2]
    assert not logs.problems


def test_a_large_file_of_earlier_starts_is_begun_anew(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path, clock, steps=30, step_s=0.1)
    monkeypatch.setattr(rank_recorder, "MOST_BYTES", 100)
    record(tmp_path, clock, steps=2, step_s=0.1)
    assert [len(part.steps) for part in read_rank_logs(tmp_path).parts] == [2]


def test_a_file_that_cannot_be_written_ends_the_record_only(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "ranks").write_text("")
    record(tmp_path, clock, steps=300, step_s=0.1)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "The run goes on without it" in message


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_ends_the_record_only(tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "0.jsonl").symlink_to("/dev/full")
    record(tmp_path, clock, steps=300, step_s=0.1)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "No space left on device" in message


def test_exchanges_and_bytes_of_a_long_run_share_lines_and_lose_none(tmp_path: Path, clock: Clock) -> None:
    made = 0
    recorder = RankRecorder(
        tmp_path, IDENTITY, lambda: RankTotals(made, 0, made * 1e-3, 0, 0, made, 0), lambda: made, clock
    )
    for made in range(1, 50_001):  # the recorder reads it
        clock.now += 0.1
        recorder.step_done(made)
        recorder.exchange_done(
            ExchangeSummary(
                number=made, step=made, merged=made, seconds=0.1, met_s=0.0, waited_s=0.1, sent_bytes=7, weights=()
            )
        )
    recorder.close()
    (part,) = read_rank_logs(tmp_path).parts
    assert len(part.exchanges) < 20_000
    assert sum(done.count for done in part.exchanges) == 50_000
    assert sum(done.sent_bytes for done in part.exchanges) == 7 * 50_000
    assert part.exchanges[-1].number == 50_000
    assert [done.count for done in part.exchanges[:300]] == [1] * 300
    assert part.links[-1].sent_bytes >= 49_000
    assert (tmp_path / "ranks" / "0.jsonl").stat().st_size < 5e6


def test_an_exchange_after_the_last_step_is_part_of_the_times(tmp_path: Path, clock: Clock) -> None:
    totals = RankTotals(1, 0.5, 0, 0, 0, 4, 0)
    recorder = RankRecorder(tmp_path, IDENTITY, lambda: totals, None, clock)
    totals = RankTotals(2, 1.0, 0, 0, 0, 8, 0)
    clock.now += 1
    recorder.step_done(2)
    totals = totals._replace(exchange_s=2.0, waiting_s=1.0)
    clock.now += 3
    recorder.close()
    (part,) = read_rank_logs(tmp_path).parts
    assert [(row.step, row.steps, row.seconds, row.exchange_s, row.waiting_s) for row in part.steps] == [
        (2, 1, 1.0, 0.0, 0.0),
        (2, 0, 3.0, 2.0, 1.0),
    ]


def test_all_ranks_of_a_run_record_what_they_did(tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path / "run"), "how": "", "at": 7, "epochs": 3}
    run_processes(ragged(2, 1), "tests.session.stop_programs:leave", arguments)
    run, logs = Run.read(tmp_path / "run"), read_rank_logs(tmp_path / "run")
    assert [(part.started.rank, part.started.node) for part in logs.parts] == [(0, 0), (1, 0), (2, 1)]
    finished = run.last(RunFinished)
    assert finished is not None
    for part, phases in zip(logs.parts, finished.phases, strict=True):
        assert sum(row.compute_s for row in part.steps) == pytest.approx(phases.compute_s, rel=1e-3, abs=1e-3)
        assert sum(row.exchange_s for row in part.steps) == pytest.approx(phases.exchange_s, rel=1e-3, abs=1e-3)
        assert [done.number for done in part.exchanges] == [done.number for done in run.of(ExchangeDone)]
        assert sum(done.sent_bytes for done in part.exchanges) == phases.exchange_bytes
        assert all(row.compute_s + row.gradients_s <= row.seconds * 1.01 + 1e-3 for row in part.steps)
    assert [bool(part.links) for part in logs.parts] == [True, False, True]


def test_a_pause_is_left_out_of_the_time() -> None:
    run_clock = RunClock()
    began, began_at = run_clock.monotonic(), run_clock.time()
    run_clock.pause()
    run_clock.pause()
    time.sleep(0.3)
    assert run_clock.monotonic() - began < 0.1
    run_clock.resume()
    run_clock.resume()
    assert run_clock.monotonic() - began < 0.1
    assert run_clock.time() - began_at < 0.1
    time.sleep(0.02)
    assert run_clock.monotonic() - began >= 0.02


@pytest.mark.parametrize("every", [4, "global"])
def test_every_step_before_a_checkpoint_is_on_disk_when_the_ranks_are_killed(tmp_path: Path, every: int | str) -> None:
    arguments = {"folder": str(tmp_path / "run"), "how": "SIGKILL", "epochs": 2, "every": every}
    killed = collect(start_processes(ragged(2, 1), "tests.session.stop_programs:leave", arguments), limit_s=60.0)
    assert [rank.code for rank in killed] == [-9, -9, -9]
    run, logs = Run.read(tmp_path / "run"), read_rank_logs(tmp_path / "run")
    assert run.last(RunFinished) is None
    saved = run.last(CheckpointSaved)
    assert saved is not None
    assert [part.started.rank for part in logs.parts] == [0, 1, 2]
    for part in logs.parts:
        assert sum(row.steps for row in part.steps) == saved.step
        assert sum(done.count for done in part.exchanges) == len(run.of(ExchangeDone))
        assert every == "global" or part.exchanges[-1].step == saved.step
        assert every != "global" or sum(row.gradient_bytes for row in part.steps) > 0
