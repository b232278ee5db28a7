"""The one agreed counter: how many steps were made, and whether an exchange is due."""

from dataclasses import dataclass

from evenly.spec import EveryEpoch, EveryGradient, EverySteps


@dataclass
class Schedule:
    """Counts steps from 1; skipped steps count, so that no node can shift the schedule of the others."""

    period: EverySteps | EveryEpoch | EveryGradient
    step: int = 0
    since: int = 0  # steps since the last exchange
    exchanges: int = 0

    def advance(self) -> bool:
        """Counts one step; returns whether an exchange is due after it."""
        self.step += 1
        self.since += 1
        match self.period:
            case EverySteps(steps=steps, warmup=warmup):
                return self.step <= warmup or (self.step - warmup) % steps == 0
            case EveryEpoch(warmup=warmup):
                return self.step <= warmup
            case EveryGradient():
                return False

    def due_at_epoch_end(self) -> bool:
        """Returns whether the end of an epoch calls for an exchange."""
        return self.since > 0 and not isinstance(self.period, EverySteps)

    def exchanged(self) -> None:
        """Notes that an exchange was made."""
        self.since = 0
        self.exchanges += 1
