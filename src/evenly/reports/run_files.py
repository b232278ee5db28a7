"""Writes the record of a run into a folder, as training does."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from evenly.errors import SpecError
from evenly.spec import RankPart, Run
from evenly.spec.lenient_run import FILE
from evenly.spec.rank_log import FOLDER


def require_no_run(folder: Path) -> None:
    """Raises `SpecError` if the folder holds a run already, or is a file."""
    if folder.exists() and not folder.is_dir():
        raise SpecError(f"a run was to be recorded in {folder}, but that is a file. Give a folder.")
    if (folder / FILE).exists() or (folder / FOLDER).exists():
        raise SpecError(f"a run was to be recorded in {folder}, but it holds one already. Give another folder.")


def write_run(folder: Path, run: Run, parts: Sequence[RankPart]) -> None:
    """Writes `run.jsonl`, and `ranks/<rank>.jsonl` for every rank, into a folder, which is made if it is missing."""
    require_no_run(folder)
    try:
        (folder / FOLDER).mkdir(parents=True)
        _write(folder / FILE, (event.model_dump_json() for event in run.events))
        for part in parts:
            _write(folder / FOLDER / f"{part.started.rank}.jsonl", _lines(part))
    except OSError as error:
        raise SpecError(
            f"a run was to be recorded in {folder}; that cannot be done: {error.strerror}. "
            "Give a folder that can be written."
        ) from None


def _lines(part: RankPart) -> Iterator[str]:
    """Yields the lines of a part in the order of their times."""
    rows = [(row.ended_s, row.to_line()) for row in part.steps]
    rows += [(done.at_s, done.model_dump_json()) for done in part.exchanges]
    rows += [(link.at_s, link.model_dump_json()) for link in part.links]
    yield part.started.model_dump_json()
    yield from (line for _, line in sorted(rows, key=lambda row: row[0]))


def _write(file: Path, lines: Iterator[str]) -> None:
    with file.open("w", encoding="utf-8") as stream:
        stream.writelines(f"{line}\n" for line in lines)
