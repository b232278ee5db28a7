"""The events of a run across interruptions."""

from evenly.spec import Event, ExchangeDone, Run, RunFinished, RunStarted


def since_fresh_start(run: Run) -> Run:
    """Returns the events since the last start that did not resume, without later starts that trained nothing."""
    fresh = [n for n, event in enumerate(run.events) if isinstance(event, RunStarted) and not event.resumed_step]
    starts = _starts(run.events[fresh[-1] :] if fresh else run.events)
    trained = [events for events in starts if not _has_trained_nothing(events)]
    return Run(events=tuple(event for events in trained or starts for event in events))


def exchanges_of(run: Run) -> list[ExchangeDone]:
    """Returns the exchanges of all models since the last fresh start.

    What a resumed run repeats counts as it was the second time. Models number their exchanges by themselves, so that
    numbers do not tell them apart.
    """
    exchanges: list[ExchangeDone] = []
    for event in since_fresh_start(run).events:
        if isinstance(event, RunStarted):
            exchanges = [done for done in exchanges if (done.merged or done.step) <= event.resumed_step]
        elif isinstance(event, ExchangeDone):
            exchanges.append(event)
    return exchanges


def _starts(events: tuple[Event, ...]) -> list[list[Event]]:
    starts: list[list[Event]] = []
    for event in events:
        if isinstance(event, RunStarted) or not starts:
            starts.append([])
        starts[-1].append(event)
    return starts


def _has_trained_nothing(events: list[Event]) -> bool:
    """Whether a start ended in order without a step: the run had ended before."""
    return any(isinstance(event, RunFinished) and not event.steps for event in events)
