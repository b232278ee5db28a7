"""A table of a run's figures, one row per epoch: `results.csv` in its folder."""

import csv
from pathlib import Path

from evenly.recipes.training_files import RESULTS


class ResultsFile:
    """The rows of a run; written anew after every epoch, on the rank that is given a folder."""

    def __init__(self, folder: Path | None, *, is_resumed: bool) -> None:
        """Keeps the rows that an earlier start of the run has written, if it goes on."""
        self._file = None if folder is None else folder / RESULTS
        self._rows: dict[int, dict[str, object]] = {}
        if self._file is not None and is_resumed and self._file.is_file():
            with self._file.open(newline="", encoding="utf-8") as stream:
                for row in csv.DictReader(stream):
                    if str(row.get("epoch", "")).isdecimal():
                        self._rows[int(row["epoch"])] = dict(row)

    def add(self, *, epoch: int, **figures: float) -> None:
        """Adds figures to the row of an epoch, drops later rows, and writes the file."""
        if self._file is None:
            return
        self._rows = {number: row for number, row in self._rows.items() if number <= epoch}
        self._rows.setdefault(epoch, {"epoch": epoch}).update(figures)
        names = list(dict.fromkeys(name for row in self._rows.values() for name in row))
        partial = self._file.with_suffix(".partial")
        with partial.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, names)
            writer.writeheader()
            writer.writerows(self._rows[number] for number in sorted(self._rows))
        partial.replace(self._file)
