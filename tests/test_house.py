"""The house rules that a machine can check: what is imported, read, printed, and how long things are."""

import ast
import functools
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import evenly

ROOT = Path(evenly.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


@functools.cache
def trees() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text())) for path in FILES]


def spot(path: Path, node: ast.stmt | ast.expr) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def test_the_door_is_narrow_and_every_name_on_it_opens() -> None:
    assert len(evenly.__all__) <= 24
    assert len(set(evenly.__all__)) == len(evenly.__all__)
    for name in evenly.__all__:
        assert getattr(evenly, name) is not None
        assert name in dir(evenly)
    with pytest.raises(AttributeError, match="no_such_name"):
        evenly.no_such_name  # noqa: B018


def test_what_needs_no_torch_starts_without_it() -> None:
    """One process runs the statements in turn and tells after which of them torch is there."""
    lines = [
        "import evenly",
        "import evenly.spec",
        "import evenly.reports",
        "import evenly.cli",
        "evenly.Plan, evenly.EvenlyError, evenly.report",
        "from typer.testing import CliRunner; from evenly.cli import app; CliRunner().invoke(app, '--help')",
    ]
    code = "import sys\nfor line in sys.argv[1:]:\n    exec(line)\n    print(line, 'torch' in sys.modules, sep=': ')"
    done = subprocess.run([sys.executable, "-c", code, *lines], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [f"{line}: False" for line in lines], done.stderr


def test_only_launch_reads_the_environment() -> None:
    reads = [
        spot(path, node)
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.ImportFrom) and _of_os(node) and room(path) != "launch"
    ]
    assert reads == []


def _of_os(node: ast.Attribute | ast.ImportFrom) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and any(name.name in ENVIRONMENT for name in node.names)
    return isinstance(node.value, ast.Name) and node.value.id == "os" and node.attr in ENVIRONMENT


def test_only_the_command_line_prints() -> None:
    prints = [
        spot(path, node)
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        if room(path) != "cli"
    ]
    assert prints == []


def test_no_bare_assert() -> None:
    assert [spot(path, n) for path, tree in trees() for n in ast.walk(tree) if isinstance(n, ast.Assert)] == []


def test_sizes_are_told(record_property: Callable[[str, object], None]) -> None:
    """Sizes are an aim, not a limit: what is larger is only listed."""
    for path, tree in trees():
        lines = len(path.read_text().splitlines())
        if lines > (300 if path.name == "session.py" else 400):
            record_property(str(path.relative_to(ROOT)), lines)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > 60:
                    record_property(f"{spot(path, node)} {node.name}", length)


def test_rooms_see_only_the_floors_below() -> None:
    program = shutil.which("lint-imports", path=str(Path(sys.executable).parent)) or shutil.which("lint-imports")
    if program is None:
        pytest.skip("The contracts need lint-imports; pip install import-linter.")
    settings = ROOT.parents[1] / "pyproject.toml"
    if not settings.is_file():
        pytest.skip("The contracts are in pyproject.toml, and evenly is not installed from its sources here.")
    done = subprocess.run([program, "--config", str(settings)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
