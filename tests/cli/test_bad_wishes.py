"""Bad input to measure, plan and simulate: one message that says what to do, exit code 1, no traceback."""

import pytest
import torch.distributed as dist

from evenly.planner import plan
from evenly.spec import Plan
from tests.reports.plans import cluster_of, graph_of, profile_of

NETWORKS = "tests/cli/networks.py"
SPEEDS = ("--speeds", "1,1")


@pytest.mark.parametrize("option", ["--cluster", "--profile", "--graph"])
def test_a_file_that_is_not_there(fails, given, option):
    given[given.index(option) + 1] = "/nowhere/file.json"
    kind = option[2:].capitalize()
    assert f"cannot read {kind} from /nowhere/file.json: No such file" in fails("plan", *given)


@pytest.mark.parametrize(("option", "other"), [("--cluster", "plan"), ("--profile", "graph"), ("--graph", "cluster")])
def test_a_file_of_another_kind_is_named(fails, files, given, option, other):
    given[given.index(option) + 1] = str(files[other])
    told = fails("plan", *given)
    assert f"but the file holds a {other.capitalize()}, not a {option[2:].capitalize()}" in told
    assert "Give a file that was written by: evenly " in told


def test_a_cluster_given_as_a_plan(fails, files, given):
    told = fails("simulate", "--plan", files["cluster"], *given)
    assert "but the file holds a Cluster, not a Plan. Give a file that was written by: evenly plan --out FILE." in told


def test_a_file_that_is_no_json(fails, given, tmp_path):
    (tmp_path / "bad.json").write_bytes(b"\xff\x00 no")
    given[given.index("--graph") + 1] = str(tmp_path / "bad.json")
    assert "Graph is not valid" in fails("plan", *given)


def test_a_profile_of_another_network(fails, files, given, tmp_path):
    graph_of(50).save(tmp_path / "graph.json")
    given[given.index("--graph") + 1] = str(tmp_path / "graph.json")
    assert "the profile was measured with another network" in fails("plan", *given)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--speeds", "1,1,1", "--nodes", "1,1"), "--nodes 1,1 has 2 ranks, but --speeds 1,1,1 has 3"),
        (("--speeds", "1,0"), "Speeds are finite numbers above 0"),
        (("--speeds", "1,nan"), "Speeds are finite numbers above 0"),
        (("--speeds", "1,-3"), "Speeds are finite numbers above 0"),
        (("--speeds", "1,fast"), "--speeds 1,fast was given, but 'fast' is not a number"),
        (("--speeds", ""), "'' is not a number"),
        ((*SPEEDS, "--nodes", "2,0"), "every node has at least 1 rank"),
        ((*SPEEDS, "--nodes", "two"), "every node has at least 1 rank"),
        ((*SPEEDS, "--across", "1Gb"), "Write --across 1Gbit, --across 10GB/s or --across 1Gbit,20ms"),
        ((*SPEEDS, "--across", "fast"), "--across fast was given"),
        ((*SPEEDS, "--across", "1Gbit,soon"), "--across 1Gbit,soon was given"),
        ((*SPEEDS, "--inside", "0GB/s"), "--inside 0GB/s was given"),
        ((*SPEEDS, "--flops", "many"), "--flops many was given"),
        ((*SPEEDS, "--flops", "0"), "--flops 0 was given"),
        ((*SPEEDS, "--memory", "8,4"), "'8' is no amount of memory. Write --memory 8GB,512MiB"),
        ((*SPEEDS, "--memory", "8GB,"), "'' is no amount of memory"),
        ((*SPEEDS, "--memory", "8GB"), "was given for 2 ranks"),
        ((*SPEEDS, "--every", "sometimes"), "every='sometimes' is not a period"),
        ((*SPEEDS, "--every", "0"), "every=0 was asked for"),
        ((*SPEEDS, "--budget", "2"), "exchange_budget=2.0 was asked for"),
        ((*SPEEDS, "--every", "1" * 5000), "is not a period"),
        ((*SPEEDS, "--across", "1e-300bit"), "--across 1e-300bit was given"),
        ((*SPEEDS, "--batch-size", "1" + 20 * "0"), "a global batch of more than"),
        ((*SPEEDS, "--batch-size", "0"), "a global batch of 0 samples was asked for"),
        ((*SPEEDS, "--out", "/nowhere/plan.json"), "there is no folder /nowhere"),
        ((*SPEEDS, "--out", "/"), "it is a folder"),
        ((*SPEEDS, "--picture", "/nowhere/plan.png"), "there is no folder /nowhere"),
        ((*SPEEDS, "--picture", "plan.txt"), "pictures are .png or .svg files"),
        (("--across", "1Gbit"), "--across 1Gbit was given without --speeds"),
        ((), "no cluster was given. Add --cluster"),
    ],
)
def test_what_cannot_be_planned(fails, files, words, told):
    assert told in fails("plan", "--graph", files["graph"], *words)


def test_what_is_missing_or_given_twice(fails, files, given):
    assert "neither --profile nor --speeds was given" in fails("plan", *given[:2], *given[4:])
    assert "no network was given" in fails("plan", *SPEEDS)
    assert "one stands for the other" in fails("plan", *given, *SPEEDS)
    assert "one stands for the other" in fails("plan", *given[:2], *SPEEDS, "--nodes", "2")
    assert "one stands for the other" in fails("plan", "cifar", *given)
    assert "were given for 3 ranks" in fails("plan", *given[:2], *given[4:], *SPEEDS)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("cooking", "there is no network 'cooking'. Choose one of: vgg16, resnet18,"),
        ("nowhere.py:Net", "there is no file nowhere.py"),
        ("no.such.module:Net", "importing no.such.module raised ModuleNotFoundError"),
        (f"{NETWORKS}:Nobody", "has no 'Nobody'"),
        (f"{NETWORKS}:constant", "'constant' is a int, which cannot be called"),
        (f"{NETWORKS}:number", "calling it gave a int, not a torch.nn.Module"),
        (f"{NETWORKS}:broken", "calling it raised RuntimeError: no weights here. Give"),
        (f"{NETWORKS}:needy", "calling it raised TypeError: needy() missing 1 required positional argument"),
    ],
)
@pytest.mark.parametrize("verb", [("plan", *SPEEDS), ("measure", "--device", "cpu")], ids=["plan", "measure"])
def test_a_model_that_is_none(fails, verb, model, told):
    assert told in fails(verb[0], model, *verb[1:], "--input", "8x8")
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "but not what goes into it. Add --input 64x3x32x32"),
        (("--input", "8x"), "--input 8x was given, but sizes are whole numbers"),
        (("--input", "0x8"), "--input 0x8 was given, but sizes are whole numbers of at least 1"),
        (("--input", "8,8"), "Write --input 64x3x32x32"),
        (("--input", "8x8", "--dtype", "float3"), "--dtype float3 was given. Choose one of: float32"),
        (("--input", "9999999999999999999x8"), "cannot be made"),
        (("--input", "8x9"), "was traced with an input of 8x9 (float32), but"),
        (("--input", "8x8", "--input", "8x8"), "the example does not fit forward(x"),
    ],
)
def test_an_input_that_does_not_fit(fails, words, told):
    assert told in fails("plan", f"{NETWORKS}:Tiny", *words, *SPEEDS)


def test_an_example_that_fits_into_no_memory(fails):
    told = fails("measure", f"{NETWORKS}:Tiny", "--device", "cpu", "--input", "9999999999x8")
    assert "--input 9999999999x8 was given, which is 320 GB, but" in told
    assert not dist.is_initialized()


def test_planning_needs_no_memory_for_the_example(evenly):
    assert "samples/s" in evenly("plan", f"{NETWORKS}:Tiny", "--input", "9999999999x8", *SPEEDS, "--batch-size", "64")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("Flat", "--input", "8x8"), "but no output has a gradient. Return one that has"),
        (("Tiny", "--input", "8"), "The first size of an example is its samples"),
        (("Tiny", "--input", "8x8", "--timeout", "nan"), "timeout_s=nan was given"),
        (("Tiny", "--input", "8x8", "--memory", "8GB,4GB"), "--memory 8GB,4GB was given for 1 rank"),
    ],
)
def test_what_cannot_be_measured(fails, words, told):
    name, *rest = words
    assert told in fails("measure", f"{NETWORKS}:{name}", *rest, "--device", "cpu", "--quick", "--fresh")
    assert not dist.is_initialized()


@pytest.mark.parametrize("option", ["--out", "--cluster-out", "--graph-out"])
def test_measure_says_before_measuring_that_a_file_cannot_be_written(fails, option):
    words = ("measure", f"{NETWORKS}:Tiny", "--input", "8x8", "--device", "cpu", option, "/nowhere/a.json")
    assert "there is no folder /nowhere" in fails(*words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--link", "0"), "--link 0 was given, but a factor is above 0"),
        (("--link", "nan"), "--link nan was given"),
        (("--slow", "1"), "Write --slow RANK=FACTOR"),
        (("--slow", "1=fast"), "Write --slow RANK=FACTOR"),
        (("--slow", "1=0"), "--slow 1=0 was given, but a factor is above 0"),
        (("--slow", "7=0.5"), "the ranks are 0 to 2"),
        (("--add", "5"), "the nodes are 0 to 1 (host0, host1)"),
        (("--add", "host9"), "Write --add 0, --add 0:like 2, or --add 2 for a new node"),
        (("--add", "0:like 9"), "the ranks 0 to 2"),
        (("--period", "never"), "every='never' is not a period"),
        (("--steps", "0"), "steps=0, jitter=0.0 were asked for"),
        (("--jitter", "-1"), "jitter=-1.0 were asked for"),
        (("--out", "/nowhere/forecast.json"), "there is no folder /nowhere"),
        (("--picture", "forecast"), "pictures are .png or .svg files"),
    ],
)
def test_what_cannot_be_simulated(fails, files, given, words, told):
    assert told in fails("simulate", "--plan", files["plan"], *given, *words)


def test_a_plan_of_another_cluster_or_network_or_without_samples(fails, given, tmp_path):
    graph, file = graph_of(), tmp_path / "plan.json"
    for sizes in ((2,), (1, 2)):
        cluster = cluster_of(*sizes)
        plan(cluster, profile_of(cluster, [1.0] * sum(sizes), graph), graph, cut=False).save(file)
        assert f"a plan for {sum(sizes)} ranks on the nodes" in fails("simulate", "--plan", file, *given)
    cluster, other = cluster_of(2, 1), graph_of(50)
    plan(cluster, profile_of(cluster, [1.0] * 3, other), other, cut=False).save(file)
    assert "the plan was made for another network" in fails("simulate", "--plan", file, *given)
    Plan.even(cluster).save(file)
    assert "the plan gives no rank any samples" in fails("simulate", "--plan", file, *given)
