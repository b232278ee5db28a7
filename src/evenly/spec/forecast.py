"""The predicted times of a plan: computing, communicating and waiting of every device."""

from typing import Annotated, Literal

from pydantic import Field

from evenly.spec._value import Document, Value

Seconds = Annotated[float, Field(ge=0)]


class DeviceForecast(Value):
    """One rank over all simulated steps."""

    rank: Annotated[int, Field(ge=0)]
    node: Annotated[int, Field(ge=0)]
    samples: Annotated[int, Field(ge=0)] = 0
    compute_s: Seconds = 0.0
    wires_s: Seconds = Field(default=0.0, description="averaging inside the node and exchanges across nodes")
    wait_s: Seconds = Field(default=0.0, description="for others")
    sent_bytes: Annotated[float, Field(ge=0)] = 0.0


class Forecast(Document):
    """A simulated run of a plan."""

    version: Literal[1] = 1
    steps: Annotated[int, Field(ge=1)]
    seconds: Seconds
    samples_per_s: Seconds
    exchanges: Annotated[int, Field(ge=0)] = 0
    exchange_s: Seconds = Field(default=0.0, description="of all exchanges together")
    devices: tuple[DeviceForecast, ...]

    @property
    def step_s(self) -> float:
        """The mean time of a step, exchanges included."""
        return self.seconds / self.steps

    @property
    def worst_wait(self) -> float:
        """The largest part of the time that a rank with work waits for others."""
        return max((d.wait_s / self.seconds for d in self.devices if d.samples), default=0.0)
