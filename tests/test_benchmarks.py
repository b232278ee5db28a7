"""Benchmarks are run by hand: what they import from the library must still be there."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMPORT_ALL = """
import importlib, sys, traceback
failed = 0
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception:
        traceback.print_exc()
        failed = 1
sys.exit(failed)
"""


def test_every_module_of_the_benchmarks_can_be_imported() -> None:
    files = sorted((ROOT / "benchmarks").rglob("*.py"))
    assert len(files) > 50
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *names], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
