"""`evenly measure` with real ranks: a profile that plans, kept for the next time; and what is shown of it."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from evenly import Cluster, Graph, Plan
from evenly.cli.measure import progress, show_profile
from evenly.launch import overlay
from evenly.spec import Curve, Link, Profile, Rate
from tests.processes import run_processes
from tests.ranks import ragged
from tests.reports.plans import cluster_of, graph_of, profile_of

NETWORK = "tests/cli/networks.py:Tiny"


def test_two_ranks_measure_and_what_they_write_can_be_planned_with(evenly, tmp_path):
    files = {name: tmp_path / f"{name}.json" for name in ("profile", "cluster", "graph")}
    options = [f"--{o}={files[f]}" for o, f in (("out", "profile"), ("cluster-out", "cluster"), ("graph-out", "graph"))]
    words = ["measure", NETWORK, "--input", "8x8", "--quick", "--device", "cpu", "--memory", "64MB,32MB", *options]
    arguments = {"words": words, "environment": {"HOME": str(tmp_path)}}

    said = run_processes(ragged(1, 1), "tests.scripts:run_command", arguments, limit_s=100)
    assert "a training step with" in said[0]
    assert "latency ms" in said[0]
    assert "measured now, and kept in" in said[0]
    (kept,) = (tmp_path / ".cache" / "evenly" / "profiles").iterdir()
    profile, cluster, graph = Profile.load(kept), Cluster.load(files["cluster"]), Graph.load(files["graph"])
    assert profile == Profile.load(files["profile"])
    profile.require_fit(cluster, graph)
    assert len(profile.devices) == len(cluster.nodes) == 2
    assert [device.free_bytes for device in profile.devices] == [64_000_000, 32_000_000]
    assert {(lane.source, lane.target) for lane in profile.lanes} == {(0, 1), (1, 0)}
    known = [word for name, path in files.items() for word in (f"--{name}", path)]
    made = Plan.from_json(evenly("plan", *known, "--batch-size", "64", "--json"))
    assert made.predicted is not None
    assert made.predicted.is_measured


@pytest.mark.slow
def test_ranks_that_the_launcher_starts_measure(tmp_path):
    command = [sys.executable, "-m", "evenly", "launch", "--nodes", "1,1", "-m", "evenly", "measure", NETWORK]
    command += ["--input", "8x8", "--quick", "--device", "cpu", "--memory", "64MB,32MB"]
    environment = overlay({"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"})
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    assert "a training step with" in done.stdout
    (kept,) = (tmp_path / ".cache" / "evenly" / "profiles").iterdir()
    assert [device.free_bytes for device in Profile.load(kept).devices] == [64_000_000, 32_000_000]


def test_a_profile_is_kept_for_the_next_time(evenly, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    command = ("measure", NETWORK, "--input", "8x8", "--quick", "--device", "cpu")
    first, second = evenly(*command), evenly(*command)
    assert "measured now, and kept in" in first
    assert "kept from an earlier time in" in second
    assert "--fresh measures anew" in second
    said = [[line for line in text.splitlines()[:-1] if "measuring:" not in line] for text in (first, second)]
    assert said[0] == said[1]
    (kept,) = (tmp_path / ".cache" / "evenly" / "profiles").iterdir()

    measured = Profile.load(kept)
    monkeypatch.setattr("evenly.session.measure", lambda *_, **__: measured)
    assert "measured now" in evenly(*command, "--fresh")
    kept.write_text("damaged")
    assert "measured now" in evenly(*command)
    assert Profile.load(kept) == measured
    for limit in ("64MB", "32MB"):
        assert "measured now" in evenly(*command, "--memory", limit)
        assert "kept from an earlier time in" in evenly(*command, "--memory", limit)
    assert "kept from an earlier time in" in evenly(*command)
    assert "measured now" in evenly("measure", NETWORK, "--input", "4x8", "--quick", "--device", "cpu")
    assert len(list(kept.parent.iterdir())) == 4


def test_a_cache_that_cannot_be_written_is_told(evenly, tmp_path, monkeypatch):
    (tmp_path / ".cache").write_text("a file where the folder should be")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    profile = profile_of(cluster_of(1), [1.0], graph_of())
    monkeypatch.setattr("evenly.session.measure", lambda *_, **__: profile)
    text = evenly("measure", NETWORK, "--input", "8x8", "--device", "cpu")
    assert "measured now; not kept, because" in text


def test_progress_is_a_bar_on_a_terminal_and_a_few_lines_elsewhere():
    seen = io.StringIO()
    with progress(quick=True, console=None) as tell:
        assert tell is None
    with progress(quick=True, console=Console(file=seen, force_terminal=False)) as tell:
        for place in range(5):
            tell(f"step {place}")
    assert seen.getvalue() == "measuring: step 0\n"
    seen.truncate(0)
    seen.seek(0)
    with progress(quick=True, console=Console(file=seen, width=80, force_terminal=True)) as tell:
        tell("a step with [8] samples")
    assert "a step with [8] samples" in seen.getvalue()


def shown(profile: Profile, cluster: Cluster) -> str:
    seen = io.StringIO()
    show_profile(profile, cluster, console=Console(file=seen, width=80, highlight=False))
    return seen.getvalue()


def test_a_profile_is_shown_with_steps_and_the_slowest_ways():
    cluster, graph = cluster_of(6, 1), graph_of()
    profile = profile_of(cluster, [60.0] * 6 + [10.0], graph)
    pairs = [(a, b) for a in range(7) for b in range(7) if a != b]
    rates = [Rate(latency_s=1e-4, bytes_per_s=1e6 * (1 + number)) for number in range(len(pairs))]
    lanes = tuple(Link(source=a, target=b, rate=rate) for (a, b), rate in zip(pairs, rates, strict=True))
    text = shown(profile.model_copy(update={"lanes": lanes}), cluster)
    assert "a training step with 100 samples" in text
    assert "333.3" in text  # samples/s of the fast ones: 3 GFlop at 10 GFlop/s for 100 samples
    assert "and 22 faster links; --out has them all" in text
    assert max(map(len, text.splitlines())) <= 80


def test_of_many_sizes_some_are_shown_so_that_a_row_fits_into_a_line():
    cluster, graph = cluster_of(1), graph_of()
    profile = profile_of(cluster, [1.0], graph)
    step = Curve(sizes=(2, 8, 16, 32, 48, 64), seconds=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6))
    text = shown(
        profile.model_copy(update={"devices": (profile.devices[0].model_copy(update={"step": step}),)}), cluster
    )
    assert "a training step with 2, 8, 16, 32, 48, 64 samples" in text
    assert " 2: ms  16: ms  32: ms  64: ms " in text


def test_a_profile_of_one_rank_has_no_ways():
    cluster = cluster_of(1)
    assert "latency" not in shown(profile_of(cluster, [1.0], graph_of()), cluster)
