"""Loggers write what happens in a run to TensorBoard, MLflow, Weights & Biases and Prometheus: the real clients."""

import importlib.util
import json
import math
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import evenly
from evenly.errors import SpecError
from evenly.integrations.loggers import (
    MlflowLogger,
    PrometheusLogger,
    TensorBoardLogger,
    WandbLogger,
    base,
    prometheus,
    sender,
)
from evenly.integrations.loggers.base import EventLogger, Settings
from evenly.integrations.loggers.prometheus import exposition
from evenly.integrations.loggers.values import EventValues
from evenly.spec import Event, ExchangeDone, Measured, RunFailed, StepsDone, Straggler
from tests.reports.runs import finished, started

pytestmark = pytest.mark.filterwarnings("ignore")  # of the clients and what they load


PACKAGES = {"mlflow": "mlflow-skinny"}


def needs(module: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Marks a test that only `make test-all` runs, which installs the clients of all loggers."""
    is_missing = importlib.util.find_spec(module) is None
    reason = f"{module} is not installed: pip install {PACKAGES.get(module, module)}"
    return lambda test: pytest.mark.slow(pytest.mark.skipif(is_missing, reason=reason)(test))


def a_run() -> list[Event]:
    """Returns the events of a run whose loss becomes NaN and whose rank 3 is slow for a while."""
    begun = started().model_copy(update={"settings": {"lr": 0.1, "purpose": 'a "try"', "top (%)": 5}})
    at_s = begun.at_s
    return [
        begun,
        StepsDone(at_s=at_s + 2, epoch=0, step=10, samples=640),
        Measured(at_s=at_s + 2, step=10, values={"loss/train": 0.5, "top-5 (%)": 12.0}),
        StepsDone(at_s=at_s + 4, epoch=0, step=30, samples=1920),
        ExchangeDone(
            at_s=at_s + 4, number=1, step=20, merged=28, seconds=0.25, sent_bytes=4096, weights=(0.5, 0.5), drift=0.01
        ),
        Straggler(at_s=at_s + 5, step=40, rank=3, host="b", factor=1.8, since_step=33),
        Measured(at_s=at_s + 6, step=50, values={"loss/train": None}),
        Straggler(at_s=at_s + 7, step=60, rank=3, host="b", factor=1.1, since_step=33, is_over=True),
        finished(),
    ]


def expected() -> dict[str, list[tuple[int, float]]]:
    """Returns the values of each name of `a_run`, with their steps."""
    return {
        "loss/train": [(10, 0.5), (50, math.nan)],
        "evenly/samples_per_s": [(10, 320.0), (30, 640.0)],
        "evenly/exchange/seconds": [(28, 0.25)],
        "evenly/exchange/drift": [(28, 0.01)],
        "evenly/exchange/sent_bytes": [(28, 4096.0)],
        "evenly/straggler/3": [(40, 1.8), (60, 1.0)],
        "evenly/failed": [(0, 0.0)],
    }


def same(found: list[tuple[int, float]], wanted: list[tuple[int, float]]) -> bool:
    return [step for step, _ in found] == [step for step, _ in wanted] and [
        value for _, value in found
    ] == pytest.approx([value for _, value in wanted], nan_ok=True, rel=1e-6)


def play(listener: Callable[[Event], None]) -> None:
    for event in a_run():
        listener(event)


def test_events_become_numbers_of_their_step() -> None:
    values = EventValues()
    rows = [values(event) for event in a_run()]
    for name, wanted in expected().items():
        assert same([(step, numbers[name]) for step, numbers in rows if name in numbers], wanted), name
    step, numbers = values(RunFailed(at_s=9.0, step=61, error="PeerError: gone"))
    assert (step, numbers) == (61, {"evenly/failed": 1.0})


@needs("tensorboard")
def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    play(TensorBoardLogger(tmp_path / "board"))
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    for name, wanted in expected().items():
        assert same([(scalar.step, scalar.value) for scalar in board.Scalars(name)], wanted), name
    assert board.Scalars("loss/train")[0].wall_time == a_run()[2].at_s
    (text,) = board.Tensors("settings/text_summary")
    assert b"| lr | 0.1 |" in text.tensor_proto.string_val[0]


@needs("mlflow")
def test_mlflow_reads_back_what_was_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # releases that ask for a database by default
    from mlflow import MlflowClient

    place = (tmp_path / "mlruns").as_uri()
    logger = MlflowLogger("tests", tracking_uri=place)
    play(logger)
    client = MlflowClient(place)
    for name, wanted in expected().items():
        history = client.get_metric_history(logger.run_id, name)
        assert same([(metric.step, metric.value) for metric in history], wanted), name
    run = client.get_run(logger.run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", a_run()[0].name)
    assert run.data.params == {"lr": "0.1", "purpose": 'a "try"', "top ___": "5"}
    assert run.data.metrics["top-5 ___"] == 12.0
    second = MlflowLogger("tests", tracking_uri=place)
    second(a_run()[0])
    second(RunFailed(at_s=a_run()[0].at_s + 9, step=61, error="PeerError: gone"))
    assert client.get_run(second.run_id).info.status == "FAILED"


@needs("wandb")
def test_wandb_keeps_what_was_logged_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    code = (
        "import sys; from tests.integrations.test_loggers import WandbLogger, play\n"
        "play(WandbLogger('tests', mode='offline', dir=sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    history = wandb_history(file)
    for name, wanted in expected().items():
        found = [(int(row["evenly/step"]), float(row[name])) for row in history if name in row]
        assert same(found, wanted), name


def wandb_history(file: Path) -> list[dict[str, float]]:
    """Returns the rows of a run that was kept offline: protocol buffers in a log of LevelDB's form."""
    from wandb.proto import wandb_internal_pb2

    data, rows, kept = file.read_bytes(), [], b""
    position = 7  # after the header of the file
    while position + 7 <= len(data):
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])
        kept += data[position + 7 : position + 7 + size]
        position += 7 + size
        left = BLOCK_BYTES - position % BLOCK_BYTES
        position += left if left < 7 else 0  # no record begins so near the end of a block
        if kind not in (1, 4):  # the first or a middle part of a record
            continue
        record = wandb_internal_pb2.Record.FromString(kept)
        kept = b""
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


BLOCK_BYTES = 32768
SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)\{((?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\.)*",?)*)\} (NaN|[+-]Inf|[-+0-9.e]+)')


def prometheus_samples(text: str) -> dict[tuple[str, str], float]:
    """Returns the samples of a text in Prometheus's format, checked by its rules: one TYPE, before its samples."""
    samples: dict[tuple[str, str], float] = {}
    typed: list[str] = []
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            typed.append(line.split()[2])
            assert line.split()[3] == "gauge"
            continue
        match = SAMPLE.fullmatch(line)
        assert match is not None, line
        assert match[1] == typed[-1]
        assert (match[1], match[2]) not in samples
        samples[match[1], match[2]] = float(match[3])
    assert len(set(typed)) == len(typed)
    assert text.endswith("\n")
    return samples


def test_prometheus_finds_the_latest_numbers(tmp_path: Path) -> None:
    play(PrometheusLogger(tmp_path / "evenly.prom"))
    assert [path.name for path in tmp_path.iterdir()] == ["evenly.prom"]
    samples = prometheus_samples((tmp_path / "evenly.prom").read_text())
    run = f'run="{a_run()[0].name}"'
    assert samples["evenly_samples_per_s", run] == 640.0
    assert samples["evenly_straggler", f'{run},rank="3"'] == 1.0
    assert math.isnan(samples["evenly_logged", f'{run},name="loss/train"'])
    assert samples["evenly_logged", f'{run},name="top-5 (%)"'] == 12.0
    assert samples["evenly_step", run] == 60


@needs("prometheus_client")
def test_prometheus_own_parser_reads_the_file(tmp_path: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    listener = PrometheusLogger(tmp_path / "evenly.prom")
    listener(started())
    listener(Measured(at_s=1.0, step=1, values={'odd "name"\\\n': 2.0}))
    listener(finished())
    text = (tmp_path / "evenly.prom").read_text()
    found = {sample.name: sample for family in text_string_to_metric_families(text) for sample in family.samples}
    assert found["evenly_logged"].labels["name"] == 'odd "name"\\\n'
    assert len(prometheus_samples(text)) == len(found)


def test_a_session_logs_while_it_trains(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with evenly.Session(progress=False) as session:
        session.listen(PrometheusLogger(tmp_path / "evenly.prom"))
        plan = session.plan(batch_size=2, every=1)
        network, optimizer, loader = session.prepare(model, optimizer, TensorDataset(torch.ones(8, 4)), plan=plan)
        for _ in session.epochs(1):
            for (x,) in loader:
                loss = network(x).sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            session.log(loss=loss)
    samples = prometheus_samples((tmp_path / "evenly.prom").read_text())
    assert samples["evenly_step", 'run="run"'] == 4
    assert samples["evenly_logged", 'run="run",name="loss"'] == loss.item()
    assert samples["evenly_failed", 'run="run"'] == 0


def test_a_tool_that_fails_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    play(PrometheusLogger(tmp_path / "file" / "evenly.prom"))
    (message,) = [record.getMessage() for record in caplog.records]
    assert "PrometheusLogger cannot log any more: NotADirectoryError" in message


class SlowTool(EventLogger):
    """A tool that holds every event for a while, and counts what was opened and closed."""

    def __init__(self, held_s: float = 0.0, *, fails_at: int = -1) -> None:
        super().__init__()
        self.held_s, self.fails_at = held_s, fails_at
        self.steps: list[int] = []
        self.ended: list[bool] = []

    def begin(self, name: str, settings: Settings) -> None:
        pass

    def write(self, event: Event, step: int, values: Mapping[str, float]) -> None:
        time.sleep(self.held_s)
        if len(self.steps) == self.fails_at:
            raise ConnectionError("the tool is gone")
        self.steps.append(step)

    def end(self, *, has_failed: bool) -> None:
        self.ended.append(has_failed)


def test_training_does_not_wait_for_a_slow_tool_which_gets_all_events() -> None:
    tool = SlowTool(0.02)
    began = time.monotonic()
    for event in a_run()[:-1]:
        tool(event)
    assert time.monotonic() - began < 0.1
    tool(a_run()[-1])
    assert tool.steps == [0, 10, 10, 30, 28, 40, 50, 60, 60]
    assert tool.ended == [False]


def test_a_tool_that_hangs_at_the_end_is_left_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sender, "CLOSE_S", 0.2)
    tool = SlowTool(0.6)
    began = time.monotonic()
    play(tool)
    assert time.monotonic() - began < 0.5
    (message,) = [record.getMessage() for record in caplog.records]
    assert "SlowTool has not sent 9 events" in message


def test_events_that_a_tool_is_too_slow_for_are_counted_in_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sender, "MOST_PENDING", 3)
    tool = SlowTool(0.1)
    play(tool)
    assert len(tool.steps) < 9
    assert tool.steps[-1] == 60  # the end of the run is never dropped
    (message,) = [record.getMessage() for record in caplog.records]
    assert "SlowTool is too slow" in message


def test_a_tool_that_fails_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    tool = SlowTool(fails_at=2)
    play(tool)
    assert (tool.steps, tool.ended) == ([0, 10], [True])
    assert [record.getMessage() for record in caplog.records] == [
        "SlowTool cannot log any more: ConnectionError: the tool is gone. The run goes on without it."
    ]


@pytest.fixture(params=["refuses", "never answers"])
def dead_server(request: pytest.FixtureRequest) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if request.param == "refuses":
            server.close()
        yield f"http://127.0.0.1:{port}"


@needs("mlflow")
def test_a_dead_mlflow_server_does_not_hold_up_the_training(
    dead_server: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (("TIMEOUT", "2"), ("MAX_RETRIES", "1"), ("BACKOFF_FACTOR", "1")):
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", value)  # so that its thread ends with the test
    monkeypatch.setattr(sender, "CLOSE_S", 0.5)
    import mlflow  # noqa: F401  (its import is not what is timed)

    listener, times_s = MlflowLogger("tests", tracking_uri=dead_server), []
    for event in a_run():
        began = time.monotonic()
        listener(event)
        times_s.append(time.monotonic() - began)
    assert max(times_s[:-1]) < 0.1
    assert times_s[-1] < 1.5
    (message,) = [record.getMessage() for record in caplog.records if record.name == base.__name__]
    assert message.startswith("MlflowLogger ")
    until = time.monotonic() + 10
    while listener.is_sending and time.monotonic() < until:
        time.sleep(0.05)


@needs("mlflow")
def test_names_that_mlflow_refuses_cost_only_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    place, run = (tmp_path / "mlruns").as_uri(), a_run()
    listener = MlflowLogger("tests", tracking_uri=place)
    listener(run[0].model_copy(update={"settings": {"a//b": 1, "lr": 0.1}}))
    listener(Measured(at_s=run[0].at_s, step=3, values={"../loss": 1.0, "accuracy": 0.5}))
    listener(finished())
    logged = MlflowClient(place).get_run(listener.run_id)
    assert (logged.info.status, logged.data.params) == ("FINISHED", {"lr": "0.1"})
    assert logged.data.metrics["accuracy"] == 0.5
    messages = [record.getMessage() for record in caplog.records if "MLflow" in record.getMessage()]
    assert ["'a//b'" in messages[0], "'../loss'" in messages[1]] == [True, True]


def test_prometheus_replaces_its_file_once_a_second_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, written = tmp_path / "evenly.prom", []
    monkeypatch.setattr(prometheus, "exposition", lambda samples: written.append(1) or exposition(samples))
    listener, step = PrometheusLogger(file), 0
    listener(started())
    until = time.monotonic() + 1.2
    while time.monotonic() < until:
        step += 1
        listener(Measured(at_s=1.0, step=step, values={"loss": 1.0}))
        time.sleep(0.005)
    while listener.is_sending:  # the last numbers come without a further event
        time.sleep(0.05)
    samples = prometheus_samples(file.read_text())
    assert samples["evenly_step", f'run="{started().name}"'] == step
    assert 2 <= len(written) <= 4


def test_a_client_that_is_not_installed_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenly.integrations.loggers.base.find_spec", lambda _: None)
    for kind, extra in ((TensorBoardLogger, "tensorboard"), (MlflowLogger, "mlflow"), (WandbLogger, "wandb")):
        with pytest.raises(SpecError, match=rf"pip install 'evenly\[{extra}\]'"):
            kind("place")


def test_a_name_that_node_exporter_would_not_read_is_refused() -> None:
    with pytest.raises(SpecError, match=r"end in \.prom"):
        PrometheusLogger("metrics.txt")
