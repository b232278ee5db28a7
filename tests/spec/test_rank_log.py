"""What ranks recorded is read as far as it can be, and a sentence says what could not be."""

from pathlib import Path

import pytest

from evenly.spec import LinkBytes, RankExchange, RankStarted, StepTimes, read_rank_logs
from evenly.spec.rank_log import FOLDER, parse_rank_log

STARTED = RankStarted(at_s=1e9, rank=2, node=1, host="b", device="cpu:0", step=7)
STEPS = StepTimes(8, 1, 0.5, 0.125, 0.1, 0.01, 0.0, 0.015, 32.0, 4096)
EXCHANGE = RankExchange(at_s=0.6, number=1, step=8, merged=8, seconds=0.1, met_s=0.0, waited_s=0.1, sent_bytes=4096)
LINK = LinkBytes(at_s=0.7, sent_bytes=9)
LINES = [STARTED.model_dump_json(), STEPS.to_line(), EXCHANGE.model_dump_json(), LINK.model_dump_json()]


def test_what_was_written_is_read() -> None:
    logs = parse_rank_log([*LINES, *LINES], name="2.jsonl")
    assert not logs.problems
    assert len(logs.parts) == 2
    part = logs.parts[-1]
    assert (part.started, part.steps, part.exchanges, part.links) == (STARTED, (STEPS,), (EXCHANGE,), (LINK,))


@pytest.mark.parametrize(
    "line",
    ["garbage", "[1,2]", "[" * 5000, '{"event":"other"}', '{"event":"link"}', '["a",1,1,1,1,1,1,1,1,1]', "\x00\xff"],
)
def test_a_line_that_cannot_be_read_is_told_and_the_rest_is_shown(line: str) -> None:
    logs = parse_rank_log([LINES[0], line, *LINES[1:]], name="2.jsonl")
    assert logs.problems == ("2.jsonl: 1 line could not be read, the first is line 2",)
    assert logs.parts[0].steps == (STEPS,)


def test_numbers_that_are_none_are_not_read() -> None:
    for word in ("NaN", "Infinity", "1e999", "true", "null", "9" * 400):
        logs = parse_rank_log([LINES[0], f"[{word},1,1,1,1,1,1,1,1,1]", LINES[1]], name="x")
        assert logs.problems, word


def test_a_last_line_that_a_crash_cut_short_is_left_out() -> None:
    logs = parse_rank_log([*LINES, STEPS.to_line()[:9]], name="x")
    assert not logs.problems
    assert logs.parts[0].steps == (STEPS,)


def test_files_that_are_missing_empty_or_foreign(tmp_path: Path) -> None:
    assert read_rank_logs(tmp_path) == read_rank_logs(tmp_path / "nowhere")
    folder = tmp_path / FOLDER
    folder.mkdir()
    (folder / "0.jsonl").write_bytes(b"")
    (folder / "1.jsonl").write_bytes(bytes(range(256)) * 10)
    (folder / "10.jsonl").write_text("\n".join(LINES))
    (folder / "2.jsonl").mkdir()
    logs = read_rank_logs(tmp_path)
    assert [part.started for part in logs.parts] == [STARTED]
    assert len(logs.problems) == 2
