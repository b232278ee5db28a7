"""What a page of the documentation tells its reader to do, in order: files to save, lines to change, commands to type.

A comment before a block says what it is: `<!-- file: NAME -->`, `<!-- change: NAME -->` before a diff, or
`<!-- not run: WHY -->`. Other `bash` blocks are commands. A `text` block is output of the commands before it. After
`<!-- needs the lab -->`, until `<!-- needs no lab -->`, commands and files are for the emulated cluster.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PART = re.compile(rf"^<!-- (.+?) -->$|{FENCE.pattern}", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d+(\.\d+)*(e[+-]\d+)?")


@dataclass(frozen=True)
class PageStep:
    """One thing to do, or the output to expect (`output`); `name` is that of the file."""

    kind: Literal["file", "change", "command", "output"]
    text: str
    name: str = ""
    marked: frozenset[int] = frozenset()
    in_lab: bool = False


def read_steps(page: Path) -> list[PageStep]:
    """Returns what the page tells to do, from top to bottom."""
    return list(_steps(page.read_text()))


def changed(text: str, change: str) -> str:
    """Returns the text with the lines of the diff that begin with `-` replaced by those that begin with `+`."""
    before, after = (
        "".join(line[1:] + "\n" for line in change.splitlines() if line[0] in kept) for kept in (" -", " +")
    )
    assert text.count(before) == 1, f"these lines are in the file {text.count(before)} times:\n{before}"
    return text.replace(before, after)


def pattern_of(line: str) -> str:
    """Returns the line without its numbers, rules and spaces: what is the same on every machine."""
    return " ".join(NUMBER.sub("N", line.replace("─", "")).split())


def _steps(text: str) -> Iterator[PageStep]:
    comment, in_lab = "", False
    for found in PART.finditer(text):
        said, language, attributes, block = found.groups()
        if said is not None:
            comment, in_lab = said, in_lab if not said.startswith("needs") else said == "needs the lab"
            continue
        verb, _, name = comment.partition(": ")
        comment = ""
        if verb in ("file", "change"):
            yield PageStep(verb, block, name, _marked(attributes), in_lab)  # type: ignore[arg-type]  # one of the two
        elif language == "bash" and verb != "not run":
            yield PageStep("command", block, in_lab=in_lab)
        elif language == "text":
            yield PageStep("output", block, in_lab=in_lab)


def _marked(attributes: str) -> frozenset[int]:
    found = re.search(r'hl_lines="([\d ]+)"', attributes)
    return frozenset(map(int, found[1].split())) if found else frozenset()
