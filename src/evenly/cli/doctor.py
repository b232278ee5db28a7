"""`evenly doctor`: what this machine can do, and what is missing."""

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    data: Annotated[
        Path, typer.Option(help="Folder to look for data sets in, as `evenly data fetch` fills it.")
    ] = Path("data"),
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Say what this machine can do: torch, backends, GPUs, the lab, data sets, extras and launchers.

    Each line is ok, or says what is missing and the command that adds it. The exit code is 0 unless training itself is
    impossible, then 1. It loads torch in a process of its own and trains one step there, which takes some seconds.
    """
    from contextlib import nullcontext
    from dataclasses import asdict
    from json import dumps

    from rich.markup import escape

    from evenly.cli._checks import check_machine, read_torch_facts
    from evenly.cli._show import open_console, table_of

    stderr = open_console(stderr=True)
    with stderr.status("loading torch and training a step") if stderr.is_terminal else nullcontext():
        checks = check_machine(data, read_torch_facts())
    can_train = all(check.state != "broken" for check in checks)
    if json:
        print(dumps({"can_train": can_train, "checks": [asdict(check) for check in checks]}, indent=2))
        raise typer.Exit(0 if can_train else 1)
    table = table_of(("", "", ""), left=3)
    table.show_header = False
    for check in checks:
        remedy = f": {check.remedy}" if check.remedy else ""
        state = {"unneeded": "-", "broken": "BROKEN"}.get(check.state, check.state)
        table.add_row(state, escape(check.name), escape(f"{check.detail}{remedy}"))
    console = open_console()
    console.print(table)
    if not can_train:
        console.print("training is not possible here")
    raise typer.Exit(0 if can_train else 1)
