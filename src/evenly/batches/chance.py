"""Random numbers that are the same on every rank, and leave those of the program alone."""

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
    """Returns what a loader draws the seeds of its workers from; it leaves the global generator to the program."""
    number = seed_of(seed, epoch, salt=rank + 1) + offset * 1_000_003
    return torch.Generator().manual_seed(number % 2**63)


class Chance:
    """The global generators of torch, Python and numpy as a seed leaves them, and as they are used from there on."""

    def __init__(self, seed: int) -> None:
        self._state: Generators = (
            torch.Generator().manual_seed(seed).get_state(),
            random.Random(seed).getstate(),  # noqa: S311  # an order, not a secret
            np.random.RandomState(seed % 2**32).get_state(),
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The global generators are these inside the block, and what they were after it."""
        with _alone():
            outside = torch.get_rng_state(), random.getstate(), np.random.get_state()
            _put(self._state)
            try:
                yield
            finally:
                self._state = torch.get_rng_state(), random.getstate(), np.random.get_state()
                _put(outside)


def _put(state: Generators) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


def _alone() -> AbstractContextManager[object]:
    """A worker has one thread, and may have been forked while a thread of its parent held the lock."""
    return _ONE_AT_A_TIME if get_worker_info() is None else nullcontext()
