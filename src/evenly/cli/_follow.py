"""Shows a run that goes on: a table that is renewed on a terminal, plain lines elsewhere."""

import time
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from evenly.cli._show import say, table_of
from evenly.reports.live import PHASES, FollowedRun, LiveRow

COLORS = {"computing": "blue", "averaging": "cyan", "sending": "yellow", "waiting": "red", "other": "bright_black"}
LETTERS = {"computing": "#", "averaging": "+", "sending": ">", "waiting": ".", "other": "-"}  # without color
LEAST_WIDTH, MOST_WIDTH, OTHERS_WIDTH = 10, 40, 68  # characters of a bar, and of all other columns
MOST_IN_LINE = 8  # ranks; a line stays readable
APPEAR_S = 60.0  # how long the folder of a run may take to appear
POLL_S, LINE_S = 0.5, 10.0
SILENCE_S = 30.0  # after which it is said that nothing was written


def follow(run: FollowedRun, console: Console) -> None:
    """Shows the run until it is over."""
    run.read()
    if run.is_over:
        say(["the last start of this run has ended; a new one is shown from its first event on"], console)
    elif console.is_terminal and not console.is_dumb_terminal and console.width >= OTHERS_WIDTH + LEAST_WIDTH:
        _follow_in_a_table(run, console)
    else:
        _follow_in_lines(run, console)


def _follow_in_a_table(run: FollowedRun, console: Console) -> None:
    heard_at = time.monotonic()
    with Live(live_view(run, console), console=console, refresh_per_second=4, transient=True) as live:
        while not run.is_over:
            time.sleep(POLL_S)
            heard_at = time.monotonic() if run.read() else heard_at
            live.update(live_view(run, console, silence(time.monotonic() - heard_at)))


def _follow_in_lines(run: FollowedRun, console: Console) -> None:
    heard_at, said_at = time.monotonic(), -LINE_S
    while not run.is_over:
        if time.monotonic() - said_at >= LINE_S:
            rows, said_at = run.rows(), time.monotonic()
            line = silence(said_at - heard_at) or (live_line(rows) if rows else "")
            say([line] if line else [], console)
        time.sleep(POLL_S)
        heard_at = time.monotonic() if run.read() else heard_at


def open_run(path: Path, console: Console) -> FollowedRun:
    """Returns the run in a folder; waits for a while if there is none, since ranks take some time to start."""
    deadline = time.monotonic() + APPEAR_S
    if not path.exists():
        say([f"waiting for {path}, which the run makes when its ranks have started"], console)
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return FollowedRun(path)


def silence(silent_s: float) -> str:
    """Returns a sentence if nothing was written for long."""
    if silent_s < SILENCE_S:
        return ""
    return f"nothing was written for {silent_s:.0f} s: the run waits, or it has ended without a word. Ctrl-C to leave"


def live_line(rows: list[LiveRow]) -> str:
    """Returns all ranks in one line."""
    ranks = [f"rank {row.rank} {row.parts[0]:.0%} computing, {row.parts[3]:.0%} waiting" for row in rows[:MOST_IN_LINE]]
    more = [f"and {len(rows) - MOST_IN_LINE} more ranks"] if len(rows) > MOST_IN_LINE else []
    sent = sum(row.link_bytes or 0 for row in rows) / 1e6
    return f"step {max(row.step for row in rows)}, {sent:.1f} MB between nodes: " + "; ".join([*ranks, *more])


def live_view(run: FollowedRun, console: Console, title: str = "") -> Group:
    """Returns the table of all ranks, with a legend."""
    width = max(LEAST_WIDTH, min(MOST_WIDTH, console.width - OTHERS_WIDTH))
    return Group(Text(title or _title(run)), live_table(run.rows(), width), legend())


def live_table(rows: list[LiveRow], width: int) -> Table:
    """Returns a row for each rank: a bar of the last seconds that is `width` characters long, and bytes."""
    table = table_of(
        ("rank", "host", "step", "steps/s", "the last seconds", "mostly", "MB sent", "MB of its node"), left=2
    )
    table.columns[4].justify = "left"
    for row in rows:
        link = "" if row.link_bytes is None else f"{row.link_bytes / 1e6:.1f}"
        table.add_row(
            str(row.rank),
            Text(row.host),
            str(row.step),
            f"{row.steps_per_s:.1f}",
            bar(row, width),
            row.state,
            f"{row.sent_bytes / 1e6:.1f}",
            link,
        )
    return table


def bar(row: LiveRow, width: int) -> Text:
    """Returns the parts of a rank's time as a bar of `width` characters."""
    text, filled, total = Text(), 0, 0.0
    for phase, part in zip(PHASES, row.parts, strict=True):
        total += part
        length = round(total * width) - filled
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
    values = ", ".join(f"{name} {value:.4g}" for name, value in run.values.items())
    return values or ("waiting for the first steps" if not run.rows() else "")
