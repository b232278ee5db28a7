"""Shells complete verbs, options, recipes and run folders; help and completion load nothing that takes long."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from evenly.cli import app
from evenly.cli._completion import experiments, recipes, runs
from evenly.recipes.config import recipe_names
from evenly.recipes.experiments import experiment_names

HELP_S = 0.5
PROGRAM = f"#!{sys.executable}\nfrom evenly.cli import main\nmain()\n"


def verbs() -> Iterator[tuple[str, ...]]:
    """Yields the words of every command, the program itself first."""
    waiting: list[tuple[tuple[str, ...], object]] = [((), typer.main.get_command(app))]
    while waiting:
        words, command = waiting.pop()
        yield words
        waiting += [((*words, name), below) for name, below in getattr(command, "commands", {}).items()]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The command as pip installs it, in a folder with two runs."""
    path = tmp_path / "evenly"
    path.write_text(PROGRAM)
    path.chmod(0o755)
    for name in ("runs/first", "runs/group/second", "runs/empty", ".hidden/third"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("runs/first", "runs/group/second", ".hidden/third"):
        (tmp_path / name / "run.jsonl").touch()
    return path


def ask(program: Path, *words: str, **variables: str) -> str:
    environ = {**os.environ, "HOME": str(program.parent), **variables}
    done = subprocess.run([program, *words], cwd=program.parent, env=environ, capture_output=True, text=True)
    assert done.stderr == ""
    return done.stdout


def complete(program: Path, shell: str, typed: str) -> str:
    """Returns what the program answers to the script of this shell."""
    return ask(
        program,
        _EVENLY_COMPLETE=f"complete_{shell}",
        COMP_WORDS=typed.replace(" ", "\n"),
        COMP_CWORD=str(typed.count(" ")),
        _TYPER_COMPLETE_ARGS=typed,
        _TYPER_COMPLETE_FISH_ACTION="get-args",
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_verbs_recipes_and_runs(program: Path, shell: str) -> None:
    assert "doctor" in complete(program, shell, "evenly do")
    assert "fashion" in complete(program, shell, "evenly train f")
    assert "resnet18" in complete(program, shell, "evenly plan res")
    found = complete(program, shell, "evenly report runs/")
    assert "runs/first" in found
    assert "runs/group/second" in found
    assert "empty" not in found
    assert "--html" not in found


@pytest.mark.parametrize(
    ("shell", "file"),
    [
        ("bash", ".bash_completions/evenly.sh"),
        ("zsh", ".zfunc/_evenly"),
        ("fish", ".config/fish/completions/evenly.fish"),
    ],
)
def test_completion_is_shown_and_installed(program: Path, shell: str, file: str) -> None:
    unasked = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # the test does not run in this shell
    script = ask(program, "--show-completion", shell, **unasked)
    assert f"_EVENLY_COMPLETE=complete_{shell}" in script
    assert "completion installed" in ask(program, "--install-completion", shell, **unasked)
    assert (program.parent / file).read_text().strip() == script.strip()


def test_bash_itself_completes(program: Path) -> None:
    script = ask(program, "--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    typed = "COMP_WORDS=(evenly report ru); COMP_CWORD=2; _evenly_completion ./evenly; echo ${COMPREPLY[*]}"
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{typed}"], cwd=program.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["runs/first", "runs/group/second"]


def test_runs_are_offered_by_the_path_that_is_typed(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(program.parent)
    assert runs("") == ["runs/first", "runs/group/second"]
    assert runs("runs/f") == ["runs/first"]
    assert runs(f"{program.parent}/runs/group") == [f"{program.parent}/runs/group/second"]
    assert runs(".h") == [".hidden/third"]
    assert runs("/nowhere/x") == []


def test_recipes_are_those_that_can_be_trained() -> None:
    assert recipes("") == recipe_names()
    assert experiments("") == experiment_names()


def test_help_of_every_verb_loads_neither_torch_nor_the_values() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from evenly.cli import app\n"
        "for words in sys.argv[1:]:\n"
        "    result = CliRunner().invoke(app, [*words.split(), '--help'])\n"
        "    loaded = [name for name in ('torch', 'numpy', 'psutil', 'evenly.spec') if name in sys.modules]\n"
        "    print(words, result.exit_code, *loaded, sep='|')"
    )
    words = [" ".join(words) for words in verbs()]
    assert len(words) > 12
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines() == [f"{word}|0" for word in words], done.stderr


@pytest.mark.parametrize("words", [[], ["report"]], ids=["evenly", "report"])
def test_help_takes_less_than_half_a_second(words: list[str]) -> None:
    """Or, while this machine is slow, less than twice as long as what every program with such help loads."""
    help_s, load_s = [], []
    while not help_s or (min(help_s) >= max(HELP_S, 2 * min(load_s)) and len(help_s) < 8):
        help_s.append(processor_time(["-m", "evenly", *words, "--help"]))
        load_s.append(processor_time(["-c", "import typer.rich_utils, pydantic.types"]))
    assert min(help_s) < max(HELP_S, 2 * min(load_s))


def processor_time(arguments: list[str]) -> float:
    """Returns what a start of Python takes; bytecode is kept, as it is for users."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environ)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
