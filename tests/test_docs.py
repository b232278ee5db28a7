"""What README and docs show is true: code runs or compiles, links lead somewhere, commands and options exist."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from evenly.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PEERS = ROOT / "docs" / "peers.md"
FIGURES = re.compile(r"^<!-- figures: (.+) -->\n\n((?:\|.*\n)+)", re.MULTILINE)
FENCE = re.compile(r"(<!-- runs -->\n)?^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
RUNNER = """
import json, os, subprocess, sys
for page, blocks in json.load(sys.stdin).items():
    os.mkdir(page)
    os.chdir(page)
    namespace = {"__name__": "__main__"}  # the blocks of a page go on from each other
    for number, (language, block) in enumerate(blocks, start=1):
        if language == "bash":
            subprocess.run(["bash", "-euc", block], check=True)
        else:
            exec(compile(block, f"{page}, block {number}", "exec"), namespace)
    os.chdir("..")
"""


def ids(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """Yields the text of each block in one of these languages."""
    yield from (text for _, language, text in FENCE.findall(page.read_text()) if language in languages)


def marked_blocks(page: Path) -> list[tuple[str, str]]:
    """Returns language and text of the blocks that are marked to run."""
    return [(language, text) for mark, language, text in FENCE.findall(page.read_text()) if mark]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def slugs(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def commands(page: Path) -> Iterator[list[str]]:
    """Yields the words after `evenly` of every command in a shell block or between backticks."""
    lines = [line.split("#")[0] for text in blocks(page, "bash") for line in text.splitlines()]
    spans = re.findall(r"`([^`\n]+)`", prose(page))
    for line in [*lines, *spans]:
        yield from (found.split() for found in re.findall(r"(?:^|-m |-- |\d )evenly ((?:[a-z]|--help).*)", line))


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_python_compiles(page: Path) -> None:
    for text in blocks(page, "python"):
        compile(text, str(page), "exec")


def test_what_is_marked_runs(tmp_path: Path) -> None:
    marked = {ids(page).replace("/", "-"): marked_blocks(page) for page in PAGES}
    assert sum(map(len, marked.values())) > 5
    assert {language for shown in marked.values() for language, _ in shown} == {"python", "bash"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUNNER],
        input=json.dumps(marked),
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in slugs(target), f"{page.name} links to {link}; {target.name} has {sorted(slugs(target))}"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_and_their_options_exist(page: Path) -> None:
    root = typer.main.get_command(app)
    for words in commands(page):
        command: click.Command = root
        while isinstance(getattr(command, "commands", None), dict) and words and words[0].isalpha():
            assert words[0] in command.commands, f"{page.name} names `evenly {' '.join(words)}`"  # type: ignore[attr-defined]
            command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
        known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
        given = " ".join(words).split(" -- ")[0].split(".py")[0].split("-m ")[0]  # the rest is the script's
        for option in re.findall(r"(?:^| )(--[a-z-]+)", given):
            assert option in known, f"{page.name} names {option} of `evenly {command.name}`"


def test_some_commands_were_found() -> None:
    verbs = {words[0] for page in PAGES for words in commands(page)}
    assert {"discover", "train", "launch", "report", "lab"} <= verbs


def script(name: str) -> dict[str, Any]:
    """Returns the functions of a script."""
    return runpy.run_path(str(ROOT / "scripts" / name))


def test_the_command_line_page_is_what_the_commands_say() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    assert script("cli-reference.py")["rewritten"](page) == page, "Run: python scripts/cli-reference.py"


def test_another_default_and_a_command_without_its_parts_are_noticed() -> None:
    rewritten, page = script("cli-reference.py")["rewritten"], (ROOT / "docs" / "cli.md").read_text()
    other = page.replace("| `--budget <float>` | `0.05` |", "| `--budget <float>` | `0.5` |")
    assert other != page
    assert rewritten(other) == page
    with pytest.raises(SystemExit, match=r"options: lab check -->'.*more than once: \[\]"):
        rewritten(page.replace("<!-- options: lab check -->", ""))


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_equations_are_what_their_tex_says(page: Path) -> None:
    text = page.read_text()
    assert script("equations.py")["rewritten"](text) == text, "Run: python scripts/equations.py"
    assert len(re.findall("^<math ", text, re.MULTILINE)) == len(re.findall("^<!-- math: ", text, re.MULTILINE))


@pytest.mark.parametrize("tex", ["{x", "x_", "x}", r"\unknown", r"\frac{a}"])
def test_tex_that_is_wrong_or_unknown_is_refused(tex: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(tex))):
        script("equations.py")["mathml"](tex)


def recorded(settings: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Returns the rows of a result that a table of figures is about, by the table's first column."""
    result = json.loads((ROOT / "benchmarks" / "results" / settings["file"]).read_text())
    where = dict(pair.split("=", 1) for pair in settings.get("where", "").split(", ") if pair)
    rows = [row for row in result["rows"] if all(str(row[key]) == value for key, value in where.items())]
    by_key = {str(row[settings["key"]]): row for row in rows}
    assert len(by_key) == len(rows), f"{settings} names several rows alike"
    return by_key


def as_written(value: object, cell: str) -> str:
    """Returns a recorded value in the form of a cell: a text, nothing, or a number with as many digits."""
    if value is None or isinstance(value, str):
        return value or "-"
    assert isinstance(value, int | float)
    number = cell.removesuffix(" %")
    digits = len(number.partition(".")[2])
    return f"{100 * value:.{digits}f} %" if number != cell else f"{value:.{digits}f}"


def test_figures_of_the_peers_page_are_the_recorded_ones() -> None:
    tables = FIGURES.findall(PEERS.read_text())
    assert len(tables) >= 8
    for marker, table in tables:
        settings = dict(part.split(": ", 1) for part in f"file: {marker}".split("; "))
        rows, columns = recorded(settings), settings["columns"].split(", ")
        for line in table.splitlines()[2:]:
            key, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
            expected = [as_written(rows[key][column], cell) for column, cell in zip(columns, cells, strict=True)]
            assert cells == expected, f"{settings['file']}, {key}: {expected}"


def test_the_peers_page_names_commit_and_machine_of_its_figures() -> None:
    text = PEERS.read_text()
    for marker in {marker.split("; ")[0] for marker, _ in FIGURES.findall(text)}:
        result = json.loads((ROOT / "benchmarks" / "results" / marker).read_text())
        assert result["commit"] in text
        assert f"{result['machine']['cores']} cores {result['machine']['architecture']}" in " ".join(text.split())


def test_the_diff_in_the_readme_is_that_of_the_examples() -> None:
    plain, by_hand = ((ROOT / "examples" / name).read_text() for name in ("plain.py", "evenly_by_hand.py"))
    (text,) = blocks(ROOT / "README.md", "diff")
    for line in text.splitlines():
        line = line.ljust(1)
        assert line[0] == "+" or line[1:] in plain, line
        assert line[0] == "-" or line[1:] in by_hand, line
        assert line[0] != "-" or line[1:] + "\n" not in by_hand, line
        assert line[0] != "+" or line[1:] + "\n" not in plain, line


def test_every_root_name_is_in_the_api_page() -> None:
    import evenly

    told = set(re.findall(r"^::: evenly\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
    assert told == set(evenly.__all__)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    program = shutil.which("zensical", path=str(Path(sys.executable).parent)) or shutil.which("zensical")
    if program is None:
        pytest.skip("The site needs zensical; pip install -e '.[docs]'.")
    pytest.importorskip("mkdocstrings", reason="The site needs mkdocstrings; pip install -e '.[docs]'.")
    for name in ("docs", "src"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    done = subprocess.run([program, "build", "--strict"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stdout + done.stderr
    assert "synchronize" in (tmp_path / "site" / "api" / "index.html").read_text()


def test_the_glossary_is_short() -> None:
    assert len(re.findall(r"^:   ", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)) <= 35


def test_the_readme_fits_its_frame() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 100] == []
