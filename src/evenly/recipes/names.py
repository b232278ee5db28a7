"""Names that were misspelt."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a question with the known name nearest to `name`, after a space, or nothing if none is near.

    >>> did_you_mean("epoch", ["epochs", "lr"])
    " Did you mean 'epochs'?"
    """
    near = get_close_matches(name.lower(), list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
