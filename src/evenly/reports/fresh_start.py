"""The events of a run across interruptions."""

from evenly.spec import Event, Run, RunFinished, RunStarted


def since_fresh_start(run: Run) -> Run:
    """Returns the events since the last start that did not resume, without later starts that trained nothing."""
    fresh = [n for n, event in enumerate(run.events) if isinstance(event, RunStarted) and not event.resumed_step]
    starts = _starts(run.events[fresh[-1] :] if fresh else run.events)
    trained = [events for events in starts if not _has_trained_nothing(events)]
    return Run(events=tuple(event for events in trained or starts for event in events))


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
