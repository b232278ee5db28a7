"""Two forecasts -> rows side by side: the effect of a change of cluster, links or period."""

from collections.abc import Iterator, Sequence

from evenly.reports.plan_table import RankRow, milliseconds, per_second
from evenly.spec import Forecast
from evenly.spec.plan import counted

RANK_HEADERS = ("rank", "node", "samples", "computes ms", "wires ms", "waits ms")


def compare(before: Forecast, after: Forecast | None) -> list[tuple[str, ...]]:
    """Returns rows of a name and its value before; with `after` also that value and the difference."""
    rows = []
    for (name, figure, text), figure_after in zip(_figures(before), _figures(after or before), strict=True):
        row: tuple[str, ...] = (name, text)
        if after is not None:
            row = (*row, figure_after[2], _difference(figure, figure_after[1], is_part="part of" in name))
        rows.append(row)
    return rows


def rank_cells(before: RankRow | None, after: RankRow | None, *, arrow: str = "→") -> tuple[str, ...]:
    """Returns a rank before and after as texts, under `RANK_HEADERS`; a rank may be new."""
    row = after or before
    if row is None:
        return ()
    pairs = zip(_cells(before), _cells(after or before), strict=True)
    texts = [
        text_before if text_before == text_after else f"{text_before} {arrow} {text_after}"
        for text_before, text_after in pairs
    ]
    return (str(row.rank), row.node, *texts)


def side_by_side(
    before: Sequence[RankRow], after: Sequence[RankRow] | None
) -> Iterator[tuple[RankRow | None, RankRow | None]]:
    """Yields every rank before and after; None if it is missing."""
    later = {row.rank: row for row in after or ()}
    earlier = {row.rank: row for row in before}
    for rank in sorted({*earlier, *later}):
        yield earlier.get(rank), later.get(rank)


def _figures(forecast: Forecast) -> Iterator[tuple[str, float, str]]:
    exchanging = forecast.exchange_s / forecast.seconds if forecast.seconds else 0.0
    yield "a step, ms", forecast.step_s, milliseconds(forecast.step_s)
    yield "samples/s", forecast.samples_per_s, per_second(forecast.samples_per_s)
    yield "worst wait, part of the time", forecast.worst_wait, f"{forecast.worst_wait:.1%}"
    yield "exchanges, part of the time", exchanging, f"{exchanging:.1%}"
    yield f"exchanges in {counted(forecast.steps, 'step')}", float(forecast.exchanges), str(forecast.exchanges)


def _difference(before: float, after: float, *, is_part: bool) -> str:
    if is_part:
        return f"{100 * (after - before):+.1f} points"
    return f"{after / before - 1:+.1%}" if before else "-"


def _cells(row: RankRow | None) -> tuple[str, ...]:
    if row is None:
        return ("new", "-", "-", "-")
    if row.left_out:
        return ("left out", "-", "-", "-")
    return (str(row.samples), *(milliseconds(seconds) for seconds in (row.compute_s, row.wires_s, row.wait_s)))
