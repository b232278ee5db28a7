"""torch.export without its own output: graphs that it prints and warnings that it logs before it raises.

Written for torch 2.11 and 2.13, where `torch.export._trace` prints the graph as far as it was traced to stderr, and
`torch.fx.graph_module` the line of generated code that failed; there is no setting for either.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch.export import _trace
from torch.fx import graph_module

from evenly._torch.patching import replaced


class _Quiet(logging.Filter):
    """Drops the warnings and errors that torch logs in one thread; what was asked for with TORCH_LOGS stays."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        is_of_torch = record.name == "torch" or record.name.startswith("torch.")
        return not (is_of_torch and record.thread == self._thread and record.levelno >= logging.WARNING)


@contextmanager
def quiet_export() -> Iterator[None]:
    """Drops what torch prints and logs by itself inside the block; what the network prints stays."""
    quiet = _Quiet()
    with ExitStack() as stack:
        for module in (_trace, graph_module):  # a name in the module comes before the built-in function
            stack.enter_context(replaced(module, "print", _print_nothing))
        for handler in _handlers():
            handler.addFilter(quiet)
            stack.callback(handler.removeFilter, quiet)
        yield


def _handlers() -> list[logging.Handler]:
    """Returns the handlers that messages of torch may reach; several of its loggers have their own."""
    loggers = [logging.getLogger(), logging.getLogger("torch")]
    loggers += [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith("torch.")]
    last_resort = [] if logging.lastResort is None else [logging.lastResort]
    return list(dict.fromkeys([*(handler for logger in loggers for handler in logger.handlers), *last_resort]))


def _print_nothing(*values: object, **options: object) -> None:
    pass
