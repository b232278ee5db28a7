"""Splits the parameters into fragments of about equal size, which are exchanged one after another."""

from collections.abc import Sequence
from dataclasses import replace

from evenly.exchange.tensors.averaged_tensors import AveragedTensor, Rows

Piece = dict[str, Rows | None]  # parameters by name; of some only rows


def split(entries: Sequence[AveragedTensor], sizes: Sequence[int], count: int, *, rows: bool) -> list[Piece]:
    """Returns for each of `count` fragments the parameters in it, by name; of some only rows, where `rows` are allowed.

    `sizes` are the elements of the parameters on one device, so that all ranks split alike.
    """
    total, offset = sum(sizes), 0
    fragments: list[Piece] = [{} for _ in range(count)]
    for entry, size in zip(entries, sizes, strict=True):
        first, last = _fragment_at(offset, total, count), _fragment_at(offset + size - 1, total, count)
        height = entry.tensor.shape[0] if rows and entry.tensor.ndim and size else 0
        if first == last or height < 2:
            fragments[_fragment_at(offset + size // 2, total, count)][entry.home] = None
        else:
            _cut(entry.home, height, offset, size, total, fragments)
        offset += size
    return fragments


def entries_in(entries: Sequence[AveragedTensor], fragment: Piece) -> list[AveragedTensor]:
    """Returns the entries of a fragment: those whose parameter is in it, or some of their rows."""
    chosen = []
    for entry in entries:
        if entry.home in fragment:
            rows = fragment[entry.home]
            chosen.append(entry if rows is None else _narrowed(entry, rows))
    return chosen


def _fragment_at(element: int, total: int, count: int) -> int:
    return min(max(element, 0) * count // max(total, 1), count - 1)


def _cut(home: str, height: int, offset: int, size: int, total: int, fragments: list[Piece]) -> None:
    """Gives every fragment the rows whose middle lies in it."""
    width, count = size // height, len(fragments)
    middle = offset + width // 2  # of the first row
    borders = [-(-(-(-total * index // count) - middle) // width) for index in range(count)]
    starts = [min(max(border, 0), height) for border in borders] + [height]
    for index in range(count):
        if starts[index] < starts[index + 1]:
            fragments[index][home] = Rows(starts[index], starts[index + 1])


def _narrowed(entry: AveragedTensor, rows: Rows) -> AveragedTensor:
    tensor = entry.tensor.detach().narrow(0, rows.start, rows.stop - rows.start)
    return replace(entry, label=f"{entry.label}[{rows.start}:{rows.stop}]", tensor=tensor, rows=rows)
