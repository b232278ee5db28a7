"""Whether the gradients of a backward were finite: what is known of the last one, without making a device wait."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from evenly._torch.dtensor import is_dtensor
from evenly._torch.foreach import FinitenessOnHost, largest_magnitude
from evenly.comm import local_tensor


class Verdict(Protocol):
    """Whether the gradients of one backward were finite."""

    @property
    def step(self) -> int:
        """The step that the backward belongs to."""

    def nonfinite_members(self) -> list[int]:
        """Returns the members of the group whose gradients were not finite."""


class DelayedVerdict(Verdict, Protocol):
    """A verdict that a device may not have computed yet."""

    @property
    def is_immediate(self) -> bool:
        """Whether reading it makes no device wait."""

    def fetch(self) -> None:
        """Starts its copy to the host."""


class LastVerdicts:
    """The verdicts of the last backward, and of the one before if the last could not be read at once."""

    def __init__(self) -> None:
        self._latest: DelayedVerdict | None = None
        self._earlier: DelayedVerdict | None = None

    def record(self, verdict: DelayedVerdict) -> None:
        """Records the verdict of a backward that has just ended."""
        self._latest = verdict

    def take(self, *, may_stall: bool) -> Verdict | None:
        """Returns the verdict of the last backward, once.

        If reading it would stall a device, and it may not, returns that of the backward before.
        """
        latest, self._latest = self._latest, None
        if latest is None or may_stall or latest.is_immediate:
            earlier, self._earlier = self._earlier, None
            return latest or earlier
        latest.fetch()
        earlier, self._earlier = self._earlier, latest
        return earlier


@dataclass(frozen=True)
class HostVerdict:
    """The verdict on gradients of one rank in host memory."""

    step: int
    is_finite: bool
    is_immediate: bool = True

    def nonfinite_members(self) -> list[int]:
        """Returns [0], this rank, if its gradients were not finite."""
        return [] if self.is_finite else [0]

    def fetch(self) -> None:
        """Does nothing: it is there."""


class DeviceVerdict:
    """The verdict on gradients of one rank on a device, which computes it without anybody waiting."""

    is_immediate = False

    def __init__(self, step: int, largest: torch.Tensor) -> None:
        self.step = step
        self._largest = largest  # magnitude of any element; NaN or infinite if one is
        self._copied: torch.cuda.Event | None = None

    def fetch(self) -> None:
        """Starts the copy to pinned memory of the host."""
        if self._largest.is_cuda:
            stream = torch.cuda.current_stream(self._largest.device)
            self._largest = self._largest.to("cpu", non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(stream)

    def nonfinite_members(self) -> list[int]:
        """Returns [0], this rank, if its gradients were not finite."""
        if self._copied is not None:
            self._copied.synchronize()
        return [] if bool(torch.isfinite(self._largest)) else [0]


class GradientCheck:
    """Looks whether the gradients of parameters are finite, without waiting for a device."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self._has_dtensors = any(map(is_dtensor, parameters))
        self._is_on_host = all(parameter.device.type == "cpu" for parameter in parameters)
        self._is_finite_on_host = FinitenessOnHost()

    def verdict(self, step: int) -> HostVerdict | DeviceVerdict:
        """Returns the verdict on the gradients as they are now, those of `step`."""
        gradients = [gradient for parameter in self._parameters if (gradient := parameter.grad) is not None]
        if self._has_dtensors:
            gradients = [local_tensor(gradient) for gradient in gradients]
        if self._is_on_host or not gradients:
            return HostVerdict(step, self._is_finite_on_host(gradients))
        return DeviceVerdict(step, largest_magnitude(gradients))
