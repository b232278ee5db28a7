"""Run -> where the seconds and bytes of each rank went."""

from collections.abc import Sequence

from evenly.reports.plan_table import by_reason, named
from evenly.reports.story import story
from evenly.spec import ExchangeDone, Phases, Rebalanced, Run, RunFinished, RunStarted
from evenly.spec.plan import travel_words

PHASE_HEADERS = ("rank", "node", "compute", "gradients", "exchange", "waiting", "other", "MB grad.", "MB exch.")
LATE_S = 1e-3  # to wait for less is no delay


def phase_rows(run: Run) -> list[tuple[str, ...]]:
    """Returns a row of texts for each rank, under `PHASE_HEADERS`; a resumed run is the sum of its parts that ended."""
    parts = [done.phases for done in story(run).of(RunFinished) if done.steps and done.phases]
    same = [part for part in parts if len(part) == len(parts[-1])]  # it may have gone on with other ranks
    return [_row(_sum(rank)) for rank in zip(*same, strict=True)]


def remarks(run: Run) -> list[str]:
    """Returns lines on who took part, how work was dealt out anew, and what exchanges cost."""
    told, lines = story(run), []
    if (started := told.of(RunStarted)) and (ranks := started[-1].ranks):
        here = _series(range(len(ranks)))
        lines.append(f"of all that were started {named(ranks)} took part, counted here as {here}")
        reasons = by_reason(started[-1].left_out)
        lines += [f"{named(ranks)} took no part: {why}" for why, ranks in reasons.items()]
    if changes := list({change.step: change for change in told.of(Rebalanced)}.values()):  # a resumed run repeats some
        times = "once" if len(changes) == 1 else f"{len(changes)} times"
        cut = "".join(f"; shares {_series([round(share, 3) for share in own])}" for own in changes[-1].shares)
        last = f"after step {changes[-1].step}: {_series(changes[-1].samples)} samples{cut}"
        lines.append(f"work was dealt out anew {times}, {'then' if len(changes) == 1 else 'last'} {last}")
    return [*lines, *_exchange_words(run)]


def _exchange_words(run: Run) -> list[str]:
    """Returns what the exchanges of a run cost and how far nodes went apart between them, in one line."""
    found = list({done.number: done for done in story(run).of(ExchangeDone)}.values())  # a resumed run repeats some
    if not found:
        return []
    waited_s, seconds = sum(done.waited_s for done in found), sum(done.seconds for done in found)
    late = sum(done.merged > done.step and done.waited_s > LATE_S for done in found)
    beside = f", {late} of them merged late" if any(done.merged > done.step for done in found) else ""
    return [
        f"{len(found)} exchanges{_form(run)} took {seconds:.3g} s, training stood still for {waited_s:.3g} s{beside}; "
        f"the node of rank 0 was {_percent(found[-1].drift)} away from the average of all at the last, "
        f"{_percent(max(d.drift for d in found))} at most"
    ]


def _form(run: Run) -> str:
    """Returns how exchanges were made, unless plainly."""
    started = run.last(RunStarted)
    if started is None or started.plan is None or started.plan.exchange.is_plain:
        return ""
    made = started.plan.exchange
    outside = [f"with {made.outer.name} outside"] if made.outer is not None else []
    return f" ({', '.join([*travel_words(made), *outside])})"


def _series(numbers: Sequence[float]) -> str:
    return ", ".join(map(str, numbers))


def _sum(parts: Sequence[Phases]) -> Phases:
    numbers = [name for name in Phases.model_fields if name not in ("rank", "node")]
    return parts[0].model_copy(update={name: sum(getattr(part, name) for part in parts) for name in numbers})


def _row(phases: Phases) -> tuple[str, ...]:
    seconds = [phases.compute_s, phases.gradients_s, phases.exchange_s, phases.waiting_s, phases.other_s]
    size = [f"{count / 1e6:.1f}" for count in (phases.gradient_bytes, phases.exchange_bytes)]
    return (str(phases.rank), str(phases.node), *_parts(seconds), *size)


def _parts(seconds: Sequence[float]) -> list[str]:
    total = sum(seconds)
    return [f"{100 * second / total:.1f} %" if total else "-" for second in seconds]


def _percent(part: float) -> str:
    return f"{100 * part:.2g} %"
