"""Warns when the state of a network is read while nodes hold different parameters."""

import logging
from collections.abc import Callable
from typing import Any

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

    def __deepcopy__(self, memo: object) -> "StateReadWarning":
        """Returns a hook that does nothing."""
        return _without_warning()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles a hook that does nothing."""
        return _without_warning, ()


def _without_warning() -> StateReadWarning:
    return StateReadWarning(_never)


def _never() -> int:
    return 0
