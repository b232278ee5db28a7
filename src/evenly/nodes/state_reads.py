"""Warns when the state of a network is read while nodes hold different parameters."""

import logging
from collections.abc import Callable
from contextlib import nullcontext

import torch

logger = logging.getLogger(__name__)


class StateReadWarning:
    """A `state_dict` hook that warns once if `steps_apart` is not 0; copies of the network have no warning."""

    def __init__(self, steps_apart: Callable[[], int]) -> None:
        self._steps_apart: Callable[[], int] | None = steps_apart

    def __call__(self, module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        """Warns if nodes differ now."""
        steps = 0 if self._steps_apart is None else self._steps_apart()
        if steps:
            self._steps_apart = None
            logger.warning(
                "state_dict() of a synchronized network was called %s after the last exchange: it is the state of this "
                "node, and nodes differ. Call it inside `with model.agreed():` for the average of all nodes, or after "
                "finish()",
                "1 step" if steps == 1 else f"{steps} steps",
            )

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles as a function that does nothing, so that other programs can read them."""
        return getattr, (nullcontext(), "__exit__")
