"""The end of a process in which threads of gloo may still call Python.

A thread of gloo that finishes a collective calls the Python callbacks of its future and frees them, for which it takes
Python's lock. Once Python is finalizing (3.11 to 3.13), taking the lock ends the thread by `pthread_exit`, whose
unwinding reaches a C++ function that must not throw: `std::terminate` aborts the process, and names the exception that
the thread was handling ("terminate called after throwing an instance of 'gloo::IoException'"), which was caught.
"""

import ctypes
import signal
import sys

LIMIT_S = 60  # of a process that would never end because its main thread waits, too


def let_threads_wait_instead_of_abort() -> bool:
    """Makes a thread in which C++ gives up wait until the process has ended; returns whether that could be done.

    For the last moments of a process: it holds for all threads, and is not undone. `std::set_terminate` is part of the
    C++ ABI of Linux; elsewhere nothing is done.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
        wait = ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p)
    except (OSError, AttributeError):
        return False
    set_terminate.argtypes, set_terminate.restype = [ctypes.c_void_p], ctypes.c_void_p
    if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
        signal.alarm(LIMIT_S)
    set_terminate(wait)
    return True
