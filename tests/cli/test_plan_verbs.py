"""`evenly plan` and `evenly simulate`: tables, files, pictures, and what-if questions with answers that make sense."""

import json
import subprocess
import sys

import pytest

from evenly import EveryEpoch, EverySteps, Graph, Plan, Run
from evenly.errors import SpecError
from evenly.spec import Forecast, RunFinished, RunStarted
from tests.recipes.images import write_images

NETWORKS = "tests/cli/networks.py"


def figures(text: str) -> dict[str, list[str]]:
    """Returns the upper table of simulate: the words of each row after its name."""
    rows = [line for line in text.splitlines() if line.startswith(("a step, ms", "samples/s", "worst", "exchanges"))]
    return {row.split("  ")[0]: [cell for cell in row.split("  ")[1:] if cell.strip()] for row in rows}


@pytest.mark.parametrize("verb", ["measure", "plan", "simulate"])
def test_every_verb_has_help(evenly, verb):
    text = evenly(verb, "--help")
    assert f"evenly {verb} [OPTIONS]" in text
    assert max(map(len, text.splitlines())) <= 80
    assert f" {verb} " in evenly("--help")


def test_a_plan_from_files_is_a_table_a_file_and_a_picture(evenly, given, tmp_path):
    out, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    text = evenly("plan", *given, "--out", out, "--picture", picture)
    made = Plan.load(out)
    assert [role.samples for role in made.roles] == [60, 30, 10]
    assert "60 (60.0%)" in text
    assert "█ computes" in text
    assert "samples/s" in text
    assert "an exchange between nodes takes" in text
    assert max(map(len, text.splitlines())) <= 80
    assert picture.read_text().startswith("<?xml")


def test_json_is_the_plan_itself(evenly, given, tmp_path):
    printed = evenly("plan", *given, "--json", "--out", tmp_path / "plan.json")
    assert Plan.from_json(printed) == Plan.load(tmp_path / "plan.json")


def test_wishes_are_kept(evenly, given):
    words = ("--batch-size", "50", "--every", "epoch", "--memory", "8GB,1GB,512MiB", "--no-cut")
    made = Plan.from_json(evenly("plan", *given, *words, "--json"))
    assert made.batch_size == 50
    assert made.period == EveryEpoch()
    assert made.replicas == ()
    seldom, often = (Plan.from_json(evenly("plan", *given, "--budget", b, "--json")) for b in ("0.01", "0.4"))
    assert seldom.period.steps > often.period.steps


def test_prior_knowledge_stands_in_for_measurements(evenly, files):
    words = ("--speeds", "70,25,5", "--graph", files["graph"], "--flops", "10G", "--across", "10Gbit,1us")
    made = Plan.from_json(evenly("plan", *words, "--inside", "1TB/s,1us", "--nodes", "2,1", "--json"))
    assert [role.samples for role in made.roles] == [70, 25, 5]
    assert made.nodes == [[0, 1], [2]]
    assert made.predicted is not None
    assert not made.predicted.is_measured
    assert Plan.from_json(evenly("plan", *words, "--json")).nodes == [[0, 1, 2]]


def test_a_cluster_may_be_given_with_speeds(evenly, files):
    text = evenly(
        "plan", "--cluster", files["cluster"], "--graph", files["graph"], "--speeds", "1,1,1", "--flops", "1G"
    )
    assert "host1" in text
    assert "the speeds you gave" in text


def test_a_network_that_is_cut_shows_the_filters_of_each_rank(evenly):
    words = ("--input", "1x3x32x32", "--speeds", "3,2,2", "--nodes", "2,1", "--flops", "10G")
    text = evenly("plan", "cifar", *words, "--batch-size", "2", "--inside", "1TB/s,1us")
    assert "ranks 0, 1: one network together, of which each rank has" in text
    row = next(line.split() for line in text.splitlines() if line.startswith("stages.0.0"))
    assert row == ["stages.0.0", "filters", "36", "24"]
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (f"{NETWORKS}:Tiny", ("--input", "8x8")),
        ("tests.cli.networks:Tiny", ("--input", "8x8", "--dtype", "bfloat16")),
        (f"{NETWORKS}:Tokens", ("--input", "8x5", "--dtype", "int64")),
        (f"{NETWORKS}:Pair", ("--input", "8x8", "--input", "8x8")),
        (f"{NETWORKS}:Choosy", ("--input", "8x8")),
        ("fashion", ()),
        ("published-mnist", ("--input", "8x2x20x20")),
        ("acgan-generator", ()),
        ("resnet20", ("--input", "8x1x28x28", "--dtype", "bfloat16")),
    ],
)
def test_a_model_stands_in_for_a_graph(evenly, model, words):
    made = Plan.from_json(evenly("plan", model, *words, "--speeds", "1,1", "--flops", "1M", "--no-cut", "--json"))
    assert made.batch_size == (8 if words else 64)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "resnet50", "efficientnet-b0", "lstm-rows"])
def test_a_network_with_a_name_has_a_usual_input(evenly, model):
    made = Plan.from_json(evenly("plan", model, "--speeds", "2,1", "--json"))
    assert made.batch_size == (16 if model == "gpt" else 64)


def test_many_ranks_are_counted_not_listed(evenly, files):
    known = ("--speeds", ",".join(["1"] * 50), "--nodes", ",".join(["2"] * 25), "--graph", files["graph"])
    text = evenly("plan", *known, "--flops", "1G", "--no-cut")
    assert "and 10 more ranks; --json has them all" in text


def test_where_the_encoding_has_no_blocks_bars_are_ascii(given):
    command = [sys.executable, "-m", "evenly", "plan", *given]
    from evenly.launch import overlay

    done = subprocess.run(command, capture_output=True, timeout=60, env=overlay({"PYTHONIOENCODING": "ascii"}))
    assert done.returncode == 0, done.stderr
    assert b"# computes  = on the wires  . waits for others" in done.stdout


def test_planning_and_simulating_need_no_torch(files):
    options = [word for name in ("cluster", "profile", "graph") for word in (f"--{name}", str(files[name]))]
    lines = [["plan", *options], ["simulate", "--plan", str(files["plan"]), *options]]
    lines += [[verb, "--help"] for verb in ("measure", "plan", "simulate")]
    code = (
        "import sys; from typer.testing import CliRunner; from evenly.cli import app\n"
        f"codes = [CliRunner().invoke(app, line).exit_code for line in {lines!r}]\n"
        "sys.exit('torch' in sys.modules or any(codes))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_a_simulation_is_what_the_plan_predicts(evenly, files, given, tmp_path):
    out = tmp_path / "forecast.json"
    text = evenly("simulate", "--plan", files["plan"], *given, "--steps", "200", "--out", out)
    told, made = Forecast.load(out), Plan.load(files["plan"])
    assert made.predicted is not None
    assert told.seconds == pytest.approx(200 * made.predicted.step_s + 20 * made.predicted.exchange_s, rel=0.02)
    assert "exchanges in 200 steps" in text
    assert "changed" not in text
    shaken = evenly("simulate", "--plan", files["plan"], *given, "--steps", "200", "--jitter", "0.3", "--json")
    assert json.loads(shaken)["before"]["seconds"] > told.seconds
    assert json.loads(shaken)["after"] is None


@pytest.mark.parametrize(
    ("words", "said", "slower"),
    [
        (("--link", "0.1"), "changed: 0.1 times the bandwidth between nodes", True),
        (("--slow", "2=0.25"), "changed: rank 2 at 0.25 times its speed", True),
        (("--slow", "0=0.5", "--slow", "1=0.5"), "changed: rank 1 at 0.5 times its speed", True),
        (("--period", "200"), "changed: period 200", False),
        (("--add", "1:like 0"), "changed: planned anew for 4 ranks: 100 samples a step, the same period", False),
        (("--add", "1:like 0", "--period", "9"), "4 ranks: 100 samples a step, that period", False),
        (("--add", "host0"), "changed: a device more on node host0", False),
        (("--add", "2:0"), "changed: a device more on node 2, like rank 0", False),
    ],
)
def test_what_if(evenly, files, given, tmp_path, words, said, slower):
    command = ("simulate", "--plan", files["plan"], *given, *words)
    text = evenly(*command, "--out", tmp_path / "after.json")
    assert said in text
    found = json.loads(evenly(*command, "--json"))
    assert (found["after"]["seconds"] > found["before"]["seconds"]) == slower
    assert Forecast.load(tmp_path / "after.json").seconds == found["after"]["seconds"]
    assert len(figures(text)["a step, ms"]) == 3


def test_a_period_of_several_epochs(evenly, files, given, tmp_path):
    text = evenly("plan", *given, "--every", "5 epochs", "--out", tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").period == EveryEpoch(5)
    assert "every 5 epochs (of 1000 steps each)" in " ".join(text.split())
    found = evenly("simulate", "--plan", files["plan"], *given, "--period", "5 epochs", "--json")
    after = json.loads(found)["after"]
    assert after["exchanges"] == after["steps"] / 5000


def test_a_larger_part_of_the_time_lets_nodes_exchange_more_often(evenly, files, given):
    command = ("simulate", "--plan", files["plan"], *given, "--json", "--period")
    rare, often = (json.loads(evenly(*command, part))["after"]["exchanges"] for part in ("1%", "40%"))
    assert rare < often


def test_a_new_device_is_planned_for_and_told_as_new(evenly, files, given):
    text = evenly("simulate", "--plan", files["plan"], *given, "--add", "1:like 0")
    assert "3     host1  new → 3" in text
    found = json.loads(evenly("simulate", "--plan", files["plan"], *given, "--add", "1:like 0", "--json"))
    samples = [device["samples"] for device in found["after"]["devices"]]
    assert sum(samples) == 100
    assert samples[3] == pytest.approx(samples[0], abs=1)
    assert [device["node"] for device in found["after"]["devices"]] == [0, 0, 1, 1]


def test_of_many_ranks_20_are_listed(evenly, files, tmp_path):
    known = ("--speeds", ",".join(["1"] * 30), "--nodes", ",".join(["2"] * 15), "--graph", files["graph"])
    evenly("plan", *known, "--no-cut", "--out", tmp_path / "plan.json")
    text = evenly(
        "simulate", "--plan", tmp_path / "plan.json", *known, "--link", "0.5", "--picture", tmp_path / "a.png"
    )
    assert "and 10 more ranks" in text
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_a_period_that_is_given_replaces_that_of_the_plan(evenly, files, given):
    found = json.loads(evenly("simulate", "--plan", files["plan"], *given, "--period", "global", "--json"))
    assert found["before"]["exchanges"] == 100
    assert found["after"]["exchanges"] == 1000
    assert Plan.load(files["plan"]).period == EverySteps(10)
    assert Graph.load(files["graph"]).batch_size == 100


@pytest.mark.slow
def test_two_ranks_train_as_a_plan_from_a_file_says(evenly, tmp_path):
    data, folder, plan = write_images(tmp_path / "data"), tmp_path / "run", tmp_path / "plan.json"
    speeds = ("--speeds", "3,1", "--nodes", "1,1", "--batch-size", "16", "--every", "2", "--no-cut")
    evenly("plan", "fashion", *speeds, "--flops", "1G", "--across", "10Gbit,1us", "--out", plan)
    words = ["launch", "--nodes", "1,1", "-m", "evenly", "train", "fashion", "--set", "epochs=1", "--plan", str(plan)]
    command = [sys.executable, "-m", "evenly", *words, "--data", str(data), "--run", str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    run = Run.read(folder)
    assert run.last(RunStarted).plan == Plan.load(plan)
    assert [role.samples for role in run.last(RunStarted).plan.roles] == [12, 4]
    assert run.last(RunFinished).steps == 4


def test_settings_that_a_plan_has_are_refused_beside_it(evenly, tmp_path):
    for words in (("--set", "every=3"), ("--set", "batch_size=8")):
        with pytest.raises(SpecError, match="was given beside --plan"):
            evenly("train", "fashion", *words, "--plan", tmp_path / "plan.json")


def test_a_simulation_is_recorded_as_a_run_that_report_shows(evenly, fails, files, given, tmp_path):
    folder, page = tmp_path / "run", tmp_path / "page.html"
    text = evenly("simulate", "--plan", files["plan"], *given, "--steps", "200", "--jitter", "0.1", "--record", folder)
    assert f"recorded as a run in {folder}" in text.replace("\n", "")
    assert Run.read(folder).last(RunFinished).steps == 200
    assert sorted(file.name for file in (folder / "ranks").iterdir()) == ["0.jsonl", "1.jsonl", "2.jsonl"]
    assert "2+1" in evenly("report", folder, "--html", page)
    assert "Simulated" in page.read_text()
    assert "it holds one already" in fails("simulate", "--plan", files["plan"], *given, "--record", folder)


def test_of_a_what_if_the_changed_run_is_recorded(evenly, files, given, tmp_path):
    folder = tmp_path / "run"
    evenly("simulate", "--plan", files["plan"], *given, "--steps", "100", "--period", "25", "--record", folder)
    assert Run.read(folder).last(RunStarted).plan.period == EverySteps(25)
    assert Run.read(folder).last(RunFinished).exchanges == 4
