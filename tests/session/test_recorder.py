"""The events of a run reach `run.jsonl` in order; frequent exchanges are written together."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from evenly.session.recorder import Recorder
from evenly.spec import Event, ExchangeDone, Measured, Run


class Times:
    """The clock of a run, as a test sets it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    recorder = Recorder(tmp_path, rank=0)
    recorder.run_clock = Times()  # type: ignore[assignment]  # the two readings that a recorder takes
    yield recorder
    recorder.close()


def exchange(recorder: Recorder, number: int, *, after_s: float) -> None:
    recorder.run_clock.now += after_s  # type: ignore[attr-defined]
    recorder.record(ExchangeDone, number=number, step=10 * number, seconds=0.01, sent_bytes=4, weights=(1.0, 1.0))


def written(folder: Path) -> list[Event]:
    return list(Run.read(folder / "run.jsonl").events)


def test_exchanges_are_written_once_a_second_with_the_time_of_each(tmp_path: Path, recorder: Recorder) -> None:
    for number in range(1, 12):
        exchange(recorder, number, after_s=0.3)
    numbers = [event.number for event in written(tmp_path) if isinstance(event, ExchangeDone)]
    assert numbers == [1, 2, 3, 4, 5, 6, 7, 8, 9]  # the first at once, then after 1.2 s and 2.4 s
    recorder.close()
    events = written(tmp_path)
    assert [event.at_s for event in events] == pytest.approx([1000 + 0.3 * number for number in range(1, 12)])


def test_another_event_is_written_at_once_after_the_exchanges_before_it(tmp_path: Path, recorder: Recorder) -> None:
    for number in range(1, 4):
        exchange(recorder, number, after_s=0.1)
    recorder.record(Measured, step=31, values={"loss": 1.0})
    assert [event.event for event in written(tmp_path)] == ["exchange"] * 3 + ["measured"]


def test_listeners_learn_of_every_event_at_once(tmp_path: Path, recorder: Recorder) -> None:
    heard: list[Event] = []
    recorder.listeners.append(heard.append)
    for number in range(1, 4):
        exchange(recorder, number, after_s=0.1)
        assert heard[-1].at_s == pytest.approx(1000 + 0.1 * number)
    recorder.close()
    assert heard == written(tmp_path)


def test_rare_exchanges_are_written_at_once(tmp_path: Path, recorder: Recorder) -> None:
    for number in range(1, 4):
        exchange(recorder, number, after_s=2.0)
        assert len(written(tmp_path)) == number
