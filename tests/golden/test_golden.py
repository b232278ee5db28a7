"""Runs that must not change: their losses are kept, bit for bit, in golden.json.

After a change that is meant to alter numbers: python -m tests.golden.test_golden
"""

import json
import platform
import tempfile
from pathlib import Path

import pytest
import torch

from tests.processes import run_processes
from tests.ranks import ragged

GOLDEN = Path(__file__).with_name("golden.json")
PROGRAMS = "tests.golden.programs"


def machine():
    """Returns where bits are comparable: processor and version of torch."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} torch {torch.__version__}"


def run_all(folder):
    """Returns the losses of each run, by rank."""
    ranks = run_processes(ragged(2, 1), f"{PROGRAMS}:run_by_hand", limit_s=110)
    runs = {name: [rank[name] for rank in ranks] for name in ranks[0]}
    for name, nodes, cut in (("planned", ragged(2, 1), False), ("cut, two nodes", ragged(2, 2), True)):
        for epochs, ending in ((2, ""), (3, ", resumed")):
            arguments = {"folder": str(folder / name), "epochs": epochs, "cut": cut}
            runs[name + ending] = run_processes(nodes, f"{PROGRAMS}:session_run", arguments)
    return runs


@pytest.mark.timeout(240)
def test_losses_are_those_of_before(tmp_path):
    golden = json.loads(GOLDEN.read_text())
    runs = run_all(tmp_path)
    assert runs.keys() == golden["runs"].keys()
    if golden["machine"] == machine():
        assert {name for name in runs if runs[name] != golden["runs"][name]} == set()
        return
    for name, by_rank in runs.items():  # another machine rounds in another way
        rough = any(code in name for code in ("int4", "int8", "bf16"))
        for losses, expected in zip(by_rank, golden["runs"][name], strict=True):
            values = [[float.fromhex(value) for value in row] for row in (losses, expected)]
            assert values[0] == pytest.approx(values[1], rel=1e-2 if rough else 1e-9), name


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        GOLDEN.write_text(json.dumps({"machine": machine(), "runs": run_all(Path(made))}, indent=1) + "\n")
