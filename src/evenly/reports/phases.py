"""Run -> where the seconds and bytes of each rank went."""

from collections.abc import Sequence

from evenly.reports.fresh_start import exchanges_of, since_fresh_start
from evenly.reports.plan_table import by_reason, named
from evenly.spec import Phases, Rebalanced, Run, RunFinished, RunStarted, Straggler
from evenly.spec.plan import counted, travel_words

PHASE_HEADERS = ("rank", "node", "compute", "gradients", "exchange", "waiting", "other", "MB grad.", "MB exch.")
NOT_SUMMED = ("rank", "node", "step", "computing")  # of `Phases`; the last two are of one step
MOST_STRAGGLERS = 5  # lines of a report
LATE_S = 1e-3  # waiting less than this is no delay


def phase_rows(run: Run) -> list[tuple[str, ...]]:
    """Returns a row of texts for each rank, under `PHASE_HEADERS`; a resumed run is the sum of its parts that ended."""
    return [_row(phases) for phases in phase_sums(run)]


def phase_sums(run: Run) -> list[Phases]:
    """Returns where the seconds and bytes of each rank went; a resumed run is the sum of its parts that ended."""
    parts = [done.phases for done in since_fresh_start(run).of(RunFinished) if done.steps and done.phases]
    same = [part for part in parts if len(part) == len(parts[-1])]  # it may have resumed with other ranks
    return [_sum(rank) for rank in zip(*same, strict=True)]


def remarks(run: Run) -> list[str]:
    """Returns lines on the active ranks, on rebalancing, and on the cost of exchanges."""
    events, lines = since_fresh_start(run), []
    if (started := events.of(RunStarted)) and (ranks := started[-1].ranks):
        new_ranks = _series(range(len(ranks)))
        lines.append(f"of all that were started {named(ranks)} took part, counted here as {new_ranks}")
        reasons = by_reason(started[-1].left_out)
        lines += [f"{named(ranks)} took no part: {why}" for why, ranks in reasons.items()]
    changes = list({change.step: change for change in events.of(Rebalanced)}.values())  # a resumed run repeats some
    if changes:
        times = "once" if len(changes) == 1 else f"{len(changes)} times"
        cut = "".join(f"; shares {_series([round(share, 3) for share in shares])}" for shares in changes[-1].shares)
        last = f"after step {changes[-1].step}: {_series(changes[-1].samples)} samples{cut}"
        lines.append(f"work was rebalanced {times}, {'then' if len(changes) == 1 else 'last'} {last}")
    return [*lines, *_straggler_words(events), *_exchange_words(run)]


def _straggler_words(run: Run) -> list[str]:
    """Returns a line for each time that a rank took longer than the others; of many the first."""
    events = list({(event.rank, event.since_step, event.is_over): event for event in run.of(Straggler)}.values())
    ends = {(event.rank, event.since_step): event.step for event in events if event.is_over}
    begun = [event for event in events if not event.is_over]
    lines = []
    for event in begun[:MOST_STRAGGLERS]:
        until = ends.get((event.rank, event.since_step))
        lines.append(event.explain() + ("" if until is None else f", until step {until}"))
    if len(begun) > MOST_STRAGGLERS:
        lines.append(f"and {counted(len(begun) - MOST_STRAGGLERS, 'more time')} that a rank took longer than others")
    return lines


def _exchange_words(run: Run) -> list[str]:
    """Returns the cost of a run's exchanges and the drift of nodes between them, in one line."""
    exchanges = exchanges_of(run)
    if not exchanges:
        return []
    waited_s, seconds = sum(done.waited_s for done in exchanges), sum(done.seconds for done in exchanges)
    late = sum(done.merged > done.step and done.waited_s > LATE_S for done in exchanges)
    beside = f", {late} of them merged late" if any(done.merged > done.step for done in exchanges) else ""
    cost = f"took {seconds:.3g} s, training waited for {waited_s:.3g} s{beside}"
    drift = (
        f"; the node of rank 0 was {_percent(exchanges[-1].drift)} away from the average of all at the last, "
        f"{_percent(max(d.drift for d in exchanges))} at most"
    )
    is_simulated = any(started.settings.get("simulated") for started in run.of(RunStarted))  # then drift is not known
    return [f"{counted(len(exchanges), 'exchange')}{_form(run)} {cost}{'' if is_simulated else drift}"]


def _form(run: Run) -> str:
    """Returns the settings of exchanges that differ from plain averaging."""
    started = run.last(RunStarted)
    if started is None or started.plan is None or started.plan.exchange.is_plain:
        return ""
    exchange = started.plan.exchange
    outside = [f"with {exchange.outer.name} outside"] if exchange.outer is not None else []
    return f" ({', '.join([*travel_words(exchange), *outside])})"


def _series(numbers: Sequence[float]) -> str:
    return ", ".join(map(str, numbers))


def _sum(parts: Sequence[Phases]) -> Phases:
    numbers = [name for name in Phases.model_fields if name not in NOT_SUMMED]
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
