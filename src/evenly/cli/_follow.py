"""Shows a run that goes on: a table that is renewed on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from evenly.cli._show import say, table_of
from evenly.reports.live import PHASES, FollowedRun, LiveRow

COLORS = {"computing": "blue", "averaging": "cyan", "sending": "yellow", "waiting": "red", "other": "bright_black"}
LETTERS = {"computing": "#", "averaging": "+", "sending": ">", "waiting": ".", "other": " "}  # without color
WIDTH = 40  # of the bars
POLL_S, LINE_S = 0.5, 10.0


def follow(run: FollowedRun, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Shows the run until it is over."""
    run.read()
    if not console.is_terminal:
        _follow_in_lines(run, console, clock)
        return
    with Live(live_view(run), console=console, refresh_per_second=4, transient=True) as live:
        while not run.is_over:
            time.sleep(POLL_S)
            run.read()
            live.update(live_view(run))


def _follow_in_lines(run: FollowedRun, console: Console, clock: Callable[[], float]) -> None:
    said_at = -LINE_S
    while not run.is_over:
        if clock() - said_at >= LINE_S and (rows := run.rows()):
            say([live_line(rows)], console)
            said_at = clock()
        time.sleep(POLL_S)
        run.read()


def live_line(rows: list[LiveRow]) -> str:
    """Returns all ranks in one line."""
    ranks = [f"rank {row.rank} {row.parts[0]:.0%} computing, {row.parts[3]:.0%} waiting" for row in rows]
    return f"step {max(row.step for row in rows)}: " + "; ".join(ranks)


def live_view(run: FollowedRun, title: str = "") -> Group:
    """Returns the table of all ranks, with a legend."""
    rows = run.rows()
    return Group(title or _title(run), live_table(rows), legend())


def live_table(rows: list[LiveRow]) -> Table:
    """Returns a row for each rank: a bar of the last seconds, and bytes."""
    table = table_of(
        ("rank", "host", "step", "steps/s", "the last seconds", "now", "MB sent", "MB on the link"), left=2
    )
    for row in rows:
        link = "" if row.link_bytes is None else f"{row.link_bytes / 1e6:.1f}"
        table.add_row(
            str(row.rank),
            row.host,
            str(row.step),
            f"{row.steps_per_s:.1f}",
            bar(row),
            row.state,
            f"{row.sent_bytes / 1e6:.1f}",
            link,
        )
    return table


def bar(row: LiveRow) -> Text:
    """Returns the parts of a rank's time as a bar of `WIDTH` characters."""
    text, filled, total = Text(), 0, 0.0
    for phase, part in zip(PHASES, row.parts, strict=True):
        total += part
        length = round(total * WIDTH) - filled
        text.append(LETTERS[phase] * length, style=f"{COLORS[phase]} on {COLORS[phase]}")
        filled += length
    return text


def legend() -> Text:
    """Returns what the colors of the bars mean."""
    text = Text()
    for phase in PHASES:
        text.append(f" {LETTERS[phase]} ", style=f"{COLORS[phase]} on {COLORS[phase]}")
        text.append(f" {phase}   ")
    return text


def _title(run: FollowedRun) -> str:
    values = ", ".join(f"{name} {value:.4g}" for name, value in run.run.latest_values().items() if value is not None)
    return values or "waiting for the first steps"
