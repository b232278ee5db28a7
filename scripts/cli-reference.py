"""Writes the generated parts of docs/cli.md: of every command its help, its usage, its arguments and its options.

The page is written by hand but for what stands between these lines, of which every command has both pairs:

    <!-- help: plan -->                    <!-- options: plan -->
    <!-- end -->                           <!-- end -->

    python scripts/cli-reference.py            # writes docs/cli.md
    python scripts/cli-reference.py --check    # only says whether it would change
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator
from html import escape
from pathlib import Path

import typer

from evenly.cli import app

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
COMMAND = "python scripts/cli-reference.py"
WIDTH = 100
PART = re.compile(r"^<!-- (help|options): ([a-z ]+) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page would change")
    is_check = parser.parse_args().check
    before = PAGE.read_text()
    after = rewritten(before)
    if not is_check:
        PAGE.write_text(after)
    elif after != before:
        sys.exit(f"docs/cli.md is not what the command line says. Run: {COMMAND}")


def rewritten(page: str) -> str:
    """Returns the page with all generated parts as the command line is now."""
    parts = {(kind, name): text for name, command, context in commands() for kind, text in texts(command, context)}
    places = [(match[1], match[2]) for match in PART.finditer(page)]
    wrong = [f"<!-- {kind}: {name} -->" for kind, name in {*places} ^ parts.keys()]
    twice = [f"<!-- {kind}: {name} -->" for kind, name in {*places} if places.count((kind, name)) > 1]
    if wrong or twice:
        sys.exit(
            f"docs/cli.md needs every command's parts once, each closed by <!-- end -->. Missing, or of a command that "
            f"does not exist: {sorted(wrong)}; more than once: {sorted(twice)}."
        )
    return PART.sub(
        lambda match: f"<!-- {match[1]}: {match[2]} -->\n\n{parts[match[1], match[2]]}\n\n<!-- end -->", page
    )


def commands() -> Iterator[tuple[str, "typer.core.TyperCommand", typer.Context]]:
    """Yields the words after `evenly`, the command and its context, for every command that does something."""
    root = typer.main.get_command(app)
    groups = [("", root, root.make_context("evenly", [], resilient_parsing=True))]
    for prefix, group, parent in groups:
        for name, command in group.commands.items():
            words, context = (
                f"{prefix} {name}".strip(),
                command.make_context(name, [], parent=parent, resilient_parsing=True),
            )
            if hasattr(command, "commands"):
                groups.append((words, command, context))
            else:
                yield words, command, context


def texts(command: "typer.core.TyperCommand", context: typer.Context) -> Iterator[tuple[str, str]]:
    """Yields the two parts of a command, by their kind."""
    paragraphs = [text for text in (command.help or "").split("\n\n") if not text.startswith("Example")]
    wrapped = [text if text.startswith(" ") else textwrap.fill(text, WIDTH) for text in paragraphs]
    yield "help", "\n\n".join(wrapped)
    usage = " ".join(command.get_usage(context).removeprefix("Usage: ").split())
    lines = ["```text", usage, "```"]
    parameters = [p for p in command.get_params(context) if p.name != "help" and not getattr(p, "hidden", False)]
    for kind in ("argument", "option"):
        rows = [row(parameter, context) for parameter in parameters if parameter.param_type_name == kind]
        lines += ["", f"| {kind} | default | meaning |", "|---|---|---|", *rows] if rows else []
    yield "options", "\n".join(lines)


def row(parameter: "typer.core.TyperOption", context: typer.Context) -> str:
    """Returns the row of an argument or an option, from what `--help` shows of it."""
    names, text = parameter.get_help_record(context)
    text, _, remarks = text.partition("  [")
    remarks = remarks.removesuffix("]").split("; ")
    default = next(
        (f"`{remark.removeprefix('default: ')}`" for remark in remarks if remark.startswith("default: ")), ""
    )
    if "required" in remarks:
        default = "required"
    return f"| {code(names)} | {default} | {text.replace('|', '&#124;')} |"


def code(text: str) -> str:
    """Returns the text as code in a cell of a table, which a bar would end."""
    return f"<code>{escape(text).replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"


if __name__ == "__main__":
    main()
