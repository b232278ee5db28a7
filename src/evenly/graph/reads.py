"""Records what a network reads while it is traced: attributes of its modules, and the Python functions that run."""

import gc
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from torch import nn

from evenly._torch.tracing import reading_attributes
from evenly.errors import SpecError

MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) | {"__dict__", "__class__"}  # attributes of every module
ALL_ATTRIBUTES = "*"  # read through __dict__: any attribute may have been used
LIBRARIES = sys.stdlib_module_names | {"torch", "functorch", "torchgen", "evenly"}  # not the user's code
LIBRARIES |= {"numpy", "sympy", "mpmath", "networkx"}
LIBRARIES |= {"triton", "typing_extensions", "optree", "jinja2", "fsspec", "torchvision", "torchaudio", "transformers"}


@dataclass
class Reads:
    """What a network reads while it is traced."""

    attribute_names: dict[str, set[str]] = field(default_factory=dict)  # by the path of the module that has them
    code_globals: dict[CodeType, dict[str, object]] = field(default_factory=dict)  # of the functions that ran
    closed_modules: frozenset[str] = frozenset()  # modules that are not traced, but called as they are
    leaf_modules: frozenset[str] = frozenset()  # torch modules that are single operations

    def joined(self, other: "Reads") -> "Reads":
        """Returns the union of both."""
        paths = {**self.attribute_names, **other.attribute_names}
        return Reads(
            {path: self.attribute_names.get(path, set()) | other.attribute_names.get(path, set()) for path in paths},
            {**self.code_globals, **other.code_globals},
            self.closed_modules & other.closed_modules,
            self.leaf_modules | other.leaf_modules,
        )


@contextmanager
def recording_reads(model: nn.Module) -> Iterator[Reads]:
    """Records which attributes of a network this thread reads, and which functions it calls."""
    reads = Reads()
    paths = {id(module): path for path, module in model.named_modules()}
    thread = threading.get_ident()

    def recording_reader(plain: Callable[..., object]) -> Callable[..., object]:
        def read(module: nn.Module, name: str) -> object:
            is_dict = name == "__dict__" and is_user_code(sys._getframe(1).f_globals)  # private: the caller's globals
            if (is_dict or name not in MODULE_ATTRIBUTES) and threading.get_ident() == thread:
                path = paths.get(id(module))
                if path is not None:
                    reads.attribute_names.setdefault(path, set()).add(ALL_ATTRIBUTES if is_dict else name)
            return plain(module, name)

        return read

    gc_callback_codes = [getattr(act, "__code__", None) for act in gc.callbacks]  # they can run at any time
    ignored_frames: list[FrameType] = []
    called: dict[int, tuple[CodeType, dict[str, object]]] = {}  # by id: to hash a code object takes long

    def record_call(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            code = frame.f_code
            if ignored_frames or (id(code) not in called and (code in gc_callback_codes or code.co_name == "__del__")):
                ignored_frames.append(frame)
            elif id(code) not in called:
                called[id(code)] = (code, frame.f_globals)
        elif event == "return" and ignored_frames and ignored_frames[-1] is frame:
            ignored_frames.pop()

    profiler_before = _profiler()
    with reading_attributes(recording_reader):
        sys.setprofile(record_call)
        try:
            yield reads
        finally:
            _resume_profiler(profiler_before)
    reads.code_globals = {
        code: module_globals for code, module_globals in called.values() if is_user_code(module_globals)
    }


def _profiler() -> Any:
    """Returns the profiler of this thread; raises `SpecError` for one that could not be resumed after the trace."""
    profiler = sys.getprofile()
    if profiler is not None and not callable(profiler) and not hasattr(profiler, "enable"):
        raise SpecError(
            f"a network was to be traced while a profiler records Python's frames ({type(profiler).__name__}), which "
            "tracing needs to do itself. Call evenly.shard before the profiler starts, or use "
            "torch.profiler.profile(with_stack=False)."
        )
    return profiler


def _resume_profiler(profiler: Any) -> None:
    """Sets the profiler that ran before: a function, or a `cProfile.Profile`, which `sys.setprofile` cannot set."""
    if profiler is None or callable(profiler):
        sys.setprofile(profiler)
    else:
        sys.setprofile(None)
        profiler.enable()


def is_user_code(module_globals: Mapping[str, object]) -> bool:
    """Whether a Python module with these globals may be the user's."""
    return str(module_globals.get("__name__", "")).split(".")[0] not in LIBRARIES
