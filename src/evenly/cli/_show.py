"""Prints plans and forecasts: tables, bars and a few sentences."""

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from evenly.launch.terminal import is_terminal
from evenly.reports import (
    PLAN_HEADERS,
    RANK_HEADERS,
    bars,
    block_rows,
    compare,
    left_out_notes,
    plan_cells,
    rank_cells,
    rank_rows,
    side_by_side,
    totals,
)
from evenly.spec import Cluster, Forecast, Layout, Plan, Profile
from evenly.spec.plan import counted

MOST_PLANNED, MOST_COMPARED, MOST_BLOCKS = 40, 20, 40  # rows of a table; the rest is counted


def open_console(*, stderr: bool = False) -> Console:
    """Returns a console that writes escape codes only to a terminal, also where FORCE_COLOR is set."""
    is_plain = not is_terminal(sys.stderr if stderr else sys.stdout)
    return Console(stderr=stderr, highlight=False, force_terminal=False if is_plain else None)


def show_plan(plan: Plan, forecast: Forecast, cluster: Cluster, *, console: Console) -> None:
    """Prints the role of each rank, how networks are cut, and how long each rank computes and waits."""
    rows = rank_rows(plan, forecast, cluster)
    table = table_of(PLAN_HEADERS, left=3)
    for row in rows[:MOST_PLANNED]:
        table.add_row(*map(escape, plan_cells(row)))
    console.print(table)
    _say_more(rows, MOST_PLANNED, console)
    _show_layouts(plan, console)
    say([""], console)
    say(
        [*bars(rows[:MOST_PLANNED], width=40, ascii_only=console.options.ascii_only), "", *totals(plan, forecast)],
        console,
    )
    say([*left_out_notes(rows), *plan.remarks], console)


def show_forecasts(
    before: tuple[Plan, Forecast, Cluster], after: tuple[Plan, Forecast, Cluster] | None, *, console: Console
) -> None:
    """Prints the figures of a run, and of a changed one beside it, then every rank."""
    table = table_of(("", "as planned", *(("changed", "by") if after else ())), left=1)
    for cells in compare(before[1], after[1] if after else None):
        table.add_row(*cells)
    console.print(table)
    say([""], console)
    pairs = list(side_by_side(rank_rows(*before), rank_rows(*after) if after else None))
    ranks = table_of(RANK_HEADERS, left=2)
    for row_before, row_after in pairs[:MOST_COMPARED]:
        ranks.add_row(
            *map(escape, rank_cells(row_before, row_after, arrow="->" if console.options.ascii_only else "→"))
        )
    console.print(ranks)
    _say_more(pairs, MOST_COMPARED, console)
    say(left_out_notes(rank_rows(*(after or before))), console)


def table_of(headers: Sequence[str], *, left: int) -> Table:
    """Returns an empty table whose first `left` columns hold words, the others numbers."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for number, header in enumerate(headers):
        table.add_column(header, justify="left" if number < left else "right", overflow="fold")
    return table


def say(lines: Sequence[str], console: Console) -> None:
    """Prints lines as they are."""
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def say_doubts(profile: Profile, plan: Plan | None = None, *, console: Console) -> None:
    """Prints why a measurement should not be trusted, and how to make a new one."""
    from evenly.planner import doubts

    say([*doubts(profile, plan), *(["evenly measure --fresh measures anew"] if doubts(profile) else [])], console)


def _say_more(rows: Sequence[object], most: int, console: Console) -> None:
    if len(rows) > most:
        say([f"and {counted(len(rows) - most, 'more rank')}; --json has them all"], console)


def _show_layouts(plan: Plan, console: Console) -> None:
    """Prints each layout once, with the ranks that use it."""
    holders_by_layout: dict[str, tuple[Layout, list[tuple[int, ...]]]] = {}
    for replica in plan.replicas:
        if len(replica.ranks) > 1:
            holders_by_layout.setdefault(replica.layout.model_dump_json(), (replica.layout, []))[1].append(
                replica.ranks
            )
    for layout, holders in holders_by_layout.values():
        names = "; ".join("ranks " + ", ".join(map(str, ranks)) for ranks in holders)
        say(["", f"{names}: one network together, of which each rank has"], console)
        table = table_of(("layer", "what", *(f"rank {rank}" for rank in holders[0])), left=2)
        rows = block_rows(layout)
        for row in rows[:MOST_BLOCKS]:
            counts = map(str, row.counts or ["all"] * len(holders[0]))
            table.add_row(escape(row.layers), row.unit, *counts)
        console.print(table)
        if len(rows) > MOST_BLOCKS:
            say([f"and {counted(len(rows) - MOST_BLOCKS, 'more row')}; --json has them all"], console)
