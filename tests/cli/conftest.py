"""Commands as a person types them, and the files that the verbs of planning read."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from evenly.cli import app, main
from evenly.planner import plan
from tests.reports.plans import cluster_of, graph_of, profile_of

SPEEDS = [60.0, 30.0, 10.0]


@pytest.fixture
def evenly() -> Callable[..., str]:
    """Returns what `evenly WORDS` prints on 80 columns; it must end well."""

    def run(*words: str | Path) -> str:
        done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
        if done.exception is not None:
            raise done.exception
        return done.output

    return run


@pytest.fixture
def fails(monkeypatch, capsys) -> Callable[..., str]:
    """Returns the one line that `evenly WORDS` ends with."""

    def run(*words: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", ["evenly", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            main()
        said = capsys.readouterr()
        assert caught.value.code == 1
        assert said.out == ""
        assert len(said.err.splitlines()) == 1
        return said.err

    return run


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> dict[str, Path]:
    """Returns a cluster of three ranks on two nodes, its profile, a network and a plan, as files."""
    folder, cluster, graph = tmp_path_factory.mktemp("plans"), cluster_of(2, 1), graph_of()
    profile = profile_of(cluster, SPEEDS, graph)
    made = plan(cluster, profile, graph, every=10, cut=False)
    values = {"cluster": cluster, "profile": profile, "graph": graph, "plan": made}
    for name, value in values.items():
        value.save(folder / f"{name}.json")
    return {name: folder / f"{name}.json" for name in values}


@pytest.fixture
def given(files) -> list[str]:
    """Returns the options that name cluster, profile and network."""
    return [word for name in ("cluster", "profile", "graph") for word in (f"--{name}", str(files[name]))]
