"""Benchmarks are run by hand: what they import from the library must still be there."""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_every_module_of_the_benchmarks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])  # each script adds to it
    files = sorted((ROOT / "benchmarks").rglob("*.py"))
    assert len(files) > 50
    for file in files:
        importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
