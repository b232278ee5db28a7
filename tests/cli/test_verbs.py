"""The command line as a person types it: help, tables, JSON, a small training, errors in one line."""

import io
import json
import subprocess
import sys

import pytest
import torch.distributed as dist
from rich.console import Console
from typer.testing import CliRunner

from evenly import Cluster, Run, __version__
from evenly.cli import app, main
from evenly.cli.console import Watcher
from evenly.reports import HEADERS
from evenly.spec import RunFinished, RunStarted, Straggler
from tests.recipes.images import write_images
from tests.reports.runs import checkpoint, epoch, failed, finished, measured, started, steps, write

VERBS = (
    "discover",
    "doctor",
    "train",
    "experiment",
    "predict",
    "data",
    "launch",
    "report",
    "export",
    "lab",
    "lab run",
    "lab check",
    "lab clean",
)
TINY = ("--set", "epochs=1", "--set", "batch_size=16", "--set", "width=2")


def evenly(*words: str) -> str:
    """Returns what `evenly WORDS` prints on 80 columns; it must end well."""
    result = CliRunner().invoke(app, words, env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    if result.exception is not None:
        raise result.exception
    return result.output


def fails(monkeypatch, capsys, *words: str) -> str:
    """Returns the one line that `evenly WORDS` ends with."""
    monkeypatch.setattr(sys, "argv", ["evenly", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    said = capsys.readouterr()
    assert caught.value.code == 1
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    return said.err


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb):
    text = evenly(*verb.split(), "--help")
    assert f"evenly {verb}" in text or f"{verb} [OPTIONS]" in text
    assert max(map(len, text.splitlines())) <= 80


def test_help_lists_the_verbs_and_version_is_a_number():
    text = evenly("--help")
    assert all(f" {verb} " in text for verb in VERBS if " " not in verb)
    assert evenly("--version").strip() == __version__


def test_settings_of_a_recipe_are_listed():
    lines = evenly("train", "fashion", "--settings").splitlines()
    assert "epochs = 3  (passes over the data)" in lines
    assert "every = epoch  (K': a number of steps, '30s', '2%' of the time, 'epoch', '5 epochs' or 'global')" in lines


def test_settings_of_the_published_cases_are_those_of_the_paper():
    text = evenly("train", "mnist", "--settings")
    assert "optimizer = adafactor" in text
    assert "network = {'filters': (30, 30, 60, 60), 'hidden': 128}" in text


def test_recipes_and_experiments_are_listed():
    assert "fashion: A small ResNet on Fashion-MNIST" in evenly("train", "--list").splitlines()
    assert any(
        line.startswith("cifar: Global averaging against") for line in evenly("experiment", "--list").splitlines()
    )
    assert "every-10/seed-2: nodes 1,1" in evenly("experiment", "rnn", "--list").splitlines()


@pytest.mark.parametrize(("shares", "part"), [("40,x", "'x'"), ("40,,60", "''"), ("70%,30%", "'70%'")])
def test_shares_that_are_not_numbers_are_named(monkeypatch, capsys, shares, part):
    told = fails(monkeypatch, capsys, "train", "mnist", "--shares", shares)
    assert f"--shares {shares} was given, but {part} is not a number. Write --shares 70,25,5" in told


def test_discover_alone_and_closes_what_it_opened(tmp_path):
    file = tmp_path / "cluster.json"
    text = evenly("discover", "--device", "cpu", "--out", str(file))
    assert "1 rank on 1 node" in text
    assert "cpu" in text
    assert not dist.is_initialized()
    cluster = Cluster.load(file)
    assert cluster.world_size == 1
    assert Cluster.from_json(evenly("discover", "--device", "cpu", "--json")) == cluster


def test_train_then_report_then_train_again(tmp_path):
    data, folder = write_images(tmp_path / "data"), tmp_path / "first"
    words = ("train", "fashion", *TINY, "--data", str(data), "--run", str(folder))
    text = evenly(*words)
    assert "1 rank on 1 node" in text
    assert "epoch 1 done at step 4" in text
    assert f"checkpoint {folder}/checkpoints/step-000000004" in text
    table = evenly("report", str(folder))
    rows, phases = table.split("\n\n")
    assert text.endswith(f"{rows}\n")
    assert "compute" in phases
    assert "already done" in evenly(*words)
    assert Run.read(folder).last(RunFinished).steps == 0
    evenly(*words, "--fresh")
    assert Run.read(folder).last(RunFinished).steps == 4


def test_train_reads_a_settings_file(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text("epochs = 1\nbatch_size = 32\nwidth = 2\nevery = 1\n")
    data, folder = write_images(tmp_path / "data"), tmp_path / "run"
    evenly("train", "fashion", "--config", str(file), "--data", str(data), "--run", str(folder), "--set", "seed=3")
    run = Run.read(folder)
    assert run.last(RunStarted).plan.period.steps == 1
    assert run.last(RunStarted).settings["seed"] == 3
    assert run.last(RunFinished).steps == 2


def test_report_fits_80_columns_whatever_happened(tmp_path):
    folders = [
        write(tmp_path / "first", started(every="epoch"), measured(accuracy=0.9132), finished()),
        write(tmp_path / "a-very-long-name-of-a-run", started(every="global"), finished(98765.4, 10**10, 10**6)),
        write(tmp_path / "[red]", started(), steps(3), failed("PeerError: " + "long " * 40)),
        write(tmp_path / "killed", started(every=1000), epoch(4), checkpoint(4)),
    ]
    lines = evenly("report", *map(str, folders)).splitlines()
    assert lines[0].split() == [word for header in HEADERS for word in header.split()]
    assert all(len(line) <= 80 for line in lines[:-2])
    assert lines[2].split() == ["first", "3+1", "epoch", "done", "10.0", "640", "1.6", "4", "91.32"]
    assert lines[-2].startswith("[red] failed: PeerError: long long")
    assert lines[-1] == "killed unfinished after step 4"


def test_report_as_json_is_one_object_a_run(tmp_path):
    folder = write(tmp_path / "first", started(), measured(accuracy=0.5), finished())
    stopped = write(tmp_path / "second", started(every="epoch"))
    first, second = map(json.loads, evenly("report", "--json", str(folder), f"{stopped}/run.jsonl").splitlines())
    assert (first["name"], first["state"], first["samples_per_s"], first["accuracy"]) == ("first", "done", 640.0, 0.5)
    assert (second["name"], second["state"], second["seconds"]) == ("second", "unfinished", None)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("train", "cooking"),
            "evenly: the recipe 'cooking' was asked for, but there is none",
        ),
        (("train", "fashion", "--set", "epochs"), "evenly: --set 'epochs' was given"),
        (
            ("train", "fashion", "--data", "/nowhere"),
            "evenly: Fashion-MNIST was ",
        ),
        (("report", "/nowhere"), "evenly: cannot read a run from /nowhere"),
        (("discover", "--json", "--out", "/nowhere/cluster.json"), "evenly: cannot write Cluster to /nowhere"),
    ],
)
def test_an_expected_error_is_one_line(monkeypatch, capsys, words, told):
    assert fails(monkeypatch, capsys, *words).startswith(told)
    assert not dist.is_initialized()


def test_a_device_that_is_not_there_is_one_line_and_leaves_no_group(monkeypatch, capsys):
    try:
        assert "the device 'abacus'" in fails(monkeypatch, capsys, "discover", "--device", "abacus")
        assert not dist.is_initialized()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_python_m_evenly_ends_with_1_and_no_traceback():
    command = [sys.executable, "-m", "evenly", "report", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "evenly: cannot read a run from /nowhere: No such file or directory. Give a run folder.\n"


def watch(*events, terminal=False):
    """Returns what a person sees of these events."""
    seen = io.StringIO()
    watcher = Watcher(Console(file=seen, width=80, force_terminal=terminal, highlight=False))
    for event in events:
        watcher(event)
    watcher.close()
    return seen.getvalue()


def test_a_run_is_told_in_plain_lines_where_there_is_no_terminal():
    begun = started().model_copy(update={"settings": {"total_steps": 200}})
    text = watch(begun, steps(10), steps(11), measured(loss=0.25, scale=None), epoch(20), checkpoint(20), finished())
    assert "epoch 1 step 10/200: 320 samples/s" in text
    assert "step 11/200" not in text  # plain lines come seldom
    assert "step 20: loss 0.25, scale not finite" in text
    assert text.splitlines()[-1].split()[:4] == ["first", "3+1", "50", "done"]


def test_a_straggler_is_told_when_it_begins_and_when_it_is_over():
    begun = Straggler(at_s=101.0, step=46, rank=3, host="b", factor=1.8, since_step=40)
    for terminal in (False, True):
        text = watch(started(), begun, begun.model_copy(update={"is_over": True, "step": 90}), terminal=terminal)
        assert text.count("rank 3 on host b takes 1.8x the median of its node since step 40") == 1
        assert text.count("rank 3 on host b is as fast as its node again since step 90") == 1


@pytest.mark.parametrize(("resumed", "told"), [(10, "resumed at step 10"), (200, "already done"), (0, "")])
def test_a_resumed_run_says_so(resumed, told):
    begun = started(resumed=resumed).model_copy(update={"settings": {"total_steps": 200}})
    text = watch(begun)
    assert told in text
    assert ("resumed" in text) == (resumed == 10)


def test_on_a_terminal_a_bar_comes_and_goes():
    begun = started().model_copy(update={"settings": {"total_steps": 200}})
    text = watch(begun, steps(10), measured(loss=0.25), failed(), terminal=True)
    assert "epoch 1, 320/s" in text
    assert "10/200" in text
    assert "step 20: loss 0.25" in text
