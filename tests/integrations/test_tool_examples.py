"""The examples for tools of others: few lines differ from the plain script, and all ranks end with one network."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.processes import run_processes
from tests.ranks import ragged

EXAMPLES = Path(__file__).parents[2] / "examples" / "tools"
TOOLS = sorted({path.stem.partition("_")[0] for path in EXAMPLES.glob("*.py")})


def code_lines(path: Path) -> list[str]:
    """Returns the lines without the docstring at the top, blank lines and indentation."""
    text = path.read_text().split('"""', 2)[2]
    return [line.strip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("tool", TOOLS)
def test_few_lines_differ_from_the_plain_script(tool: str) -> None:
    before, after = (code_lines(EXAMPLES / f"{tool}_{kind}.py") for kind in ("plain", "evenly"))
    assert len([line for line in before if line not in after]) <= 6
    assert len([line for line in after if line not in before]) <= 6


@pytest.mark.slow
@pytest.mark.parametrize("tools", [["lightning", "fabric"], ["accelerate"], ["transformers"]], ids="-".join)
def test_on_two_unequal_nodes_all_ranks_end_with_the_same_network(tools: list[str], tmp_path: Path) -> None:
    """The scripts for one library run in the same processes: most of the time goes into importing it."""
    if find_spec(tools[0]) is None:
        pytest.skip(f"{tools[0]} is not installed: pip install {tools[0]}")
    scripts = [str(EXAMPLES / f"{tool}_evenly.py") for tool in tools]
    said = run_processes(
        ragged(2, 1), "tests.integrations.once:run_scripts", {"scripts": scripts, "folder": str(tmp_path)}, limit_s=240
    )
    for number in range(len(tools)):
        found = [re.findall(r"rank (\d) of 3: ([\d.]+) % right", texts[number])[0] for texts in said]
        assert sorted(rank for rank, _ in found) == ["0", "1", "2"]
        assert len({right for _, right in found}) == 1
        assert float(found[0][1]) > 90
