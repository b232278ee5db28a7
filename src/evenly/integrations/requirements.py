"""Whether a tool is installed."""

from importlib.util import find_spec

from evenly.errors import SpecError


def require_tool(tool: str) -> None:
    """Raises `SpecError` unless the package `tool`, which is also the name of its extra, can be found."""
    if find_spec(tool) is None:
        raise SpecError(
            f"evenly.integrations.{tool} was imported, but {tool} is not installed. Run: pip install 'evenly[{tool}]'."
        )
