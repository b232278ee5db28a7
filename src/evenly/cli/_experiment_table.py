"""The results of an experiment: files in its folder, a table on the screen."""

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from evenly.cli._show import open_console, table_of
from evenly.errors import EvenlyError
from evenly.recipes.experiments import (
    HEADERS,
    Experiment,
    Outcome,
    PlannedRun,
    draw_curves,
    group_rows,
    is_percent,
    read_outcome,
    row_cells,
    write_results,
)


class Results:
    """What is known of the runs of an experiment."""

    def __init__(self, folder: Path, name: str, experiment: Experiment, runs: Sequence[PlannedRun]) -> None:
        self._folder = folder
        self._name = name
        self._experiment = experiment
        self._runs = runs

    def write(self) -> None:
        """Writes the results of all runs that are complete, if there is one."""
        outcomes = self._outcomes()
        if outcomes:
            write_results(self._folder, self._name, self._experiment, outcomes)

    def show(self) -> None:
        """Prints the table, and writes the picture and the page."""
        outcomes = self._outcomes()
        console = open_console()
        if not outcomes:
            console.print(f"no run in {self._folder} is complete", markup=False)
            return
        table = table_of(HEADERS, left=1)
        for row in group_rows(self._experiment, outcomes):
            table.add_row(*map(escape, row_cells(row, percent=is_percent(self._experiment))))
        console.print(f"{self._experiment.metric.replace('_', ' ')} of {len(outcomes)} of {len(self._runs)} runs")
        console.print(table)
        written = [self._folder / "results.json", self._folder / "table.md", *self._pictures(outcomes)]
        console.print(f"written: {', '.join(map(str, written))}", markup=False, soft_wrap=True)

    def _outcomes(self) -> dict[PlannedRun, Outcome]:
        outcomes = ((run, read_outcome(self._folder / run.folder)) for run in self._runs)
        return {run: outcome for run, outcome in outcomes if outcome is not None}

    def _pictures(self, outcomes: dict[PlannedRun, Outcome]) -> list[Path]:
        """Returns the files of the picture and of the page with charts, as far as they can be made."""
        from evenly.reports import read_recorded
        from evenly.reports.page import write_page

        curves, page = self._folder / "curves.svg", self._folder / "report.html"
        written = [curves] if draw_curves(curves, self._experiment, outcomes) else []
        try:
            write_page([read_recorded(self._folder / run.folder) for run in outcomes], page)
        except EvenlyError:
            return written
        return [*written, page]
