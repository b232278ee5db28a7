"""The events of a run across interruptions."""

from evenly.spec import Run, RunStarted


def since_fresh_start(run: Run) -> Run:
    """Returns the events since the last start that did not resume an earlier one."""
    fresh = [n for n, event in enumerate(run.events) if isinstance(event, RunStarted) and not event.resumed_step]
    return Run(events=run.events[fresh[-1] :]) if fresh else run
