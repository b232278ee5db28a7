"""Random numbers that are the same on every rank and independent of the program's generators."""

import random
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from torch.utils.data import get_worker_info

PythonState = tuple[object, ...]
NumpyState = tuple[str, np.typing.NDArray[np.uint32], int, int, float] | dict[str, object]
Generators = tuple[torch.Tensor, PythonState, NumpyState]  # of torch, Python and numpy

_ONE_AT_A_TIME = threading.RLock()  # ranks may be threads, and they share the global generators


def seed_of(seed: int, epoch: int, *, salt: int = 0) -> int:
    """Returns the seed of an epoch; another salt gives another one."""
    return ((seed * 1_000_003 + epoch) * 65_537 + salt) % 2**63


def generator_of(seed: int, epoch: int, *, offset: int, rank: int) -> torch.Generator:
    """Returns the generator for the seeds of a loader's workers; the global generator is not used."""
    number = seed_of(seed, epoch, salt=rank + 1) + offset * 1_000_003
    return torch.Generator().manual_seed(number % 2**63)


class RngState:
    """The state of torch's, Python's and numpy's global generators, starting from a seed."""

    def __init__(self, seed: int) -> None:
        self._state: Generators = (
            torch.Generator().manual_seed(seed).get_state(),
            random.Random(seed).getstate(),  # noqa: S311  # an order, not a secret
            np.random.RandomState(seed % 2**32).get_state(),
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Uses this state for the global generators inside the block; restores theirs afterwards."""
        with _exclusive():
            outside = torch.get_rng_state(), random.getstate(), np.random.get_state()
            _set_states(self._state)
            try:
                yield
            finally:
                self._state = torch.get_rng_state(), random.getstate(), np.random.get_state()
                _set_states(outside)


def _set_states(state: Generators) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


def _exclusive() -> AbstractContextManager[object]:
    """Returns the lock; none in a worker, which has one thread and may have been forked while the lock was taken."""
    return _ONE_AT_A_TIME if get_worker_info() is None else nullcontext()
