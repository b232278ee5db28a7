"""SLURM's two short forms: tasks per node and host names."""

import re

from evenly.errors import LaunchError

_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_counts(text: str) -> tuple[int, ...]:
    """Returns the tasks of every node in order.

    >>> expand_counts("8(x3),2")
    (8, 8, 8, 2)
    """
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item.strip())
        if match is None:
            raise _error("counts such as 8(x3),2", text=text, item=item)
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def expand_hosts(text: str) -> tuple[str, ...]:
    """Returns the host names of a node list in order.

    >>> expand_hosts("a,b[01-03]-x")
    ('a', 'b01-x', 'b02-x', 'b03-x')
    >>> expand_hosts("n[1-2,006]")
    ('n1', 'n2', 'n006')
    """
    return tuple(host for item in _split_outside_brackets(text) for host in _expand_item(item, text=text))


def _expand_item(item: str, *, text: str) -> list[str]:
    """Expands the first bracket and, by calling itself, every one after it (`r[1-2]n[1-4]`)."""
    if not item or item.count("[") != item.count("]"):
        raise _error("hosts such as a,n[1-2,006]", text=text, item=item)
    head, bracket, remainder = item.partition("[")
    if not bracket:
        return [head]
    inside, _, tail = remainder.partition("]")
    tails = _expand_item(tail, text=text) if tail else [""]
    numbers = [number for part in inside.split(",") for number in _expand_range(part, text=text)]
    return [head + number + end for number in numbers for end in tails]


def _expand_range(part: str, *, text: str) -> list[str]:
    match = _RANGE.fullmatch(part.strip())
    if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
        raise _error("ranges such as 1-2 or 006", text=text, item=part)
    first, last = match[1], match[2] or match[1]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _split_outside_brackets(text: str) -> list[str]:
    return re.split(r",(?![^\[]*\])", text.strip())


def _error(expected: str, *, text: str, item: str) -> LaunchError:
    return LaunchError(
        f"a SLURM list should hold {expected}; {text!r} does not, at {item!r}. Start the step with srun."
    )
