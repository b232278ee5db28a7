"""Benchmarks are run by hand: what they import from the library must still be there."""

import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
IMPORTS = re.compile(r"^ *(import|from) (torch|evenly|benchmarks)\b", re.MULTILINE)


def test_every_module_of_the_benchmarks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])  # each script adds to it
    files = sorted((ROOT / "benchmarks").rglob("*.py"))
    assert len(files) > 50
    for file in files:
        importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


def test_no_command_leaves_its_folder_in_the_way() -> None:
    """Python looks there first, and torch would take cuda.py for the package of that name."""
    texts = {file.name: file.read_text() for file in (ROOT / "benchmarks").glob("*.py")}
    commands = [name for name, text in texts.items() if '__name__ == "__main__"' in text and IMPORTS.search(text)]
    assert len(commands) > 10
    assert [name for name in commands if "\nsys.path.pop(0)" not in texts[name]] == []
