"""Tells how a `for` loop over a generator was left: by `break` or `return`, or by an exception.

Python closes the generator in each case, before the block around the loop sees an exception, and tells it no reason.
What differs is the instruction at which the frame of the loop stands (CPython 3.11 to 3.14): after `break` and `return`
it is the one that drops the iterator, and an exception leaves it at the one that raised.
"""

import inspect
import sys
from opcode import opmap

DROPS_ITERATOR = {opmap[name] for name in ("POP_TOP", "POP_ITER") if name in opmap}


def was_left_by_break() -> bool:
    """Returns whether the generator that calls this while it is closed was left by `break` or `return`.

    Generators in between, such as tqdm's, are closed by the same instruction of the loop's frame.
    """
    frame = sys._getframe(1).f_back
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_code[frame.f_lasti] in DROPS_ITERATOR
