"""Nothing is imported before it is used, and a tool that is missing is named."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from evenly.errors import SpecError
from evenly.integrations.requirements import require_tool


def test_the_room_itself_imports_no_tool() -> None:
    tools = "lightning", "accelerate", "transformers", "torch"
    code = f"import sys, evenly.integrations; print([tool for tool in {tools} if tool in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_tool_that_is_missing_is_named() -> None:
    require_tool("json")
    with pytest.raises(SpecError, match=r"no_such_tool is not installed. Run: pip install 'evenly\[no_such_tool\]'"):
        require_tool("no_such_tool")


@pytest.mark.parametrize("tool", ["lightning", "accelerate", "transformers"])
def test_a_room_without_its_tool_says_what_to_install(tool: str) -> None:
    if find_spec(tool) is not None:
        pytest.skip(f"{tool} is installed")
    with pytest.raises(SpecError, match=f"pip install 'evenly.{tool}"):
        __import__(f"evenly.integrations.{tool}")
