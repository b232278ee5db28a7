"""Random numbers that depend on (seed, epoch, index of a sample, which number) and on nothing else.

A word of 32 bits is absorbed by adding it to the state and mixing that, with the function of C. Wellons ("lowbias32").
Words are kept in int64, where no product overflows, so that every device computes the same bits; the same code mixes
Python's integers.

Reference: Salmon et al., *Parallel random numbers: as easy as 1, 2, 3*, SC 2011 (numbers as a function of a counter).
"""

from typing import TypeVar

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - 2**32  # the second as a negative number: products stay within 63 bits
Word = TypeVar("Word", int, Tensor)


class SampleRandom:
    """The random numbers of the samples of a batch in an epoch. `number` says which one; each place uses its own."""

    def __init__(self, indices: Tensor, *, seed: int, epoch: int) -> None:
        state = 0
        for word in (seed & _WORD, seed >> 32 & _WORD, epoch & _WORD):
            state = _mix(state + word & _WORD)
        self._states = _absorb(_absorb(indices.long() >> 32, state), indices.long())  # [n]

    def bits(self, number: int) -> Tensor:
        """Returns integers [n], uniform in 0 to 2^32 - 1."""
        return _absorb(torch.full_like(self._states, number), self._states)

    def below(self, bound: int, number: int) -> Tensor:
        """Returns integers [n], uniform in 0 to bound - 1; bound is below 2^31."""
        return self.bits(number) * bound >> 32

    def uniform(self, number: int) -> Tensor:
        """Returns float32 [n], uniform in [0, 1), multiples of 2^-24."""
        return (self.bits(number) >> 8).float() * 2.0**-24


def _absorb(words: Tensor, state: int | Tensor) -> Tensor:
    return _mix((words + state) & _WORD)


def _mix(word: Word) -> Word:
    word = word ^ (word >> 16)
    word = word * _FIRST & _WORD
    word = word ^ (word >> 15)
    word = word * _SECOND & _WORD
    return word ^ (word >> 16)
