"""The trace of a run follows the rules of the trace event format, and says what the ranks recorded."""

import json
import math

import pytest

from evenly.errors import SpecError
from evenly.reports.trace import trace_of, write_trace
from tests.reports.recorded import of_parts, recorded
from tests.reports.runs import started

REQUIRED = {"ph": str, "pid": int, "tid": int, "ts": (int, float), "name": str}
METADATA = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"}
METADATA |= {"thread_sort_index": "sort_index"}


def check_format(trace):
    """Raises unless the object is a trace in the JSON object format, with properly nested complete events."""
    assert isinstance(trace["traceEvents"], list)
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert isinstance(trace["otherData"], dict)
    open_ends: dict[tuple[int, int], list[float]] = {}
    latest = -math.inf
    for event in trace["traceEvents"]:
        for field, kind in REQUIRED.items():
            assert isinstance(event[field], kind), event
        assert math.isfinite(event["ts"])
        assert event["ts"] >= 0
        if event["ph"] == "M":
            assert isinstance(event["args"][METADATA[event["name"]]], str | int)
            continue
        assert event["ts"] >= latest
        latest = event["ts"]
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
            assert event["args"]
            continue
        assert event["ph"] == "X"
        assert event["dur"] >= 0
        ends = open_ends.setdefault((event["pid"], event["tid"]), [])
        while ends and ends[-1] <= event["ts"] + 2e-3:
            ends.pop()
        assert not ends or event["ts"] + event["dur"] <= ends[-1] + 2e-3, "events of a thread must be nested"
        ends.append(event["ts"] + event["dur"])


def test_a_trace_is_in_the_format(tmp_path):
    one = recorded(tmp_path / "run")
    write_trace(one, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    check_format(trace)
    assert trace["otherData"] == {"run": "run", "problems": []}


def test_nodes_are_processes_and_ranks_threads(tmp_path):
    events = trace_of(recorded(tmp_path / "run"))["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    assert processes == {1: "node 0 (host0)", 2: "node 1 (host1)"}
    assert threads == {(1, 0): "rank 0 (cpu:0)", (1, 1): "rank 1 (cpu:0)", (2, 2): "rank 2 (cpu:0)"}


def test_times_and_bytes_are_those_that_were_recorded(tmp_path):
    one = recorded(tmp_path / "run")
    events = trace_of(one)["traceEvents"]
    for part in one.logs.parts:
        own = [event for event in events if event["ph"] == "X" and event["tid"] == part.started.rank]
        computing = sum(event["dur"] for event in own if event["cat"] == "compute")
        assert computing == pytest.approx(1e6 * sum(row.compute_s for row in part.steps), rel=1e-3)
        name = f"bytes sent in exchanges, rank {part.started.rank}"
        sent = [event["args"]["bytes"] for event in events if event["name"] == name]
        assert sent[-1] == sum(done.sent_bytes for done in part.exchanges) > 0


def test_a_run_without_rank_files_has_no_trace():
    with pytest.raises(SpecError, match="its ranks recorded no steps"):
        trace_of(of_parts(events=(started(),)))
