"""Records what a network reads while it is traced: attributes of its modules, and the Python functions that run."""

import gc
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType

from torch import nn

from evenly._torch.tracing import reading_attributes

OF_TORCH = frozenset(vars(nn.Module())) | {"__dict__", "__class__"}  # attributes of every module
ALL = "*"  # read through __dict__: any attribute may have been used
QUIET = sys.stdlib_module_names | {"torch", "functorch", "torchgen", "evenly", "numpy", "sympy", "mpmath", "networkx"}
QUIET |= {"triton", "typing_extensions", "optree", "jinja2", "fsspec", "torchvision", "torchaudio", "transformers"}


@dataclass
class Reads:
    """Attributes that were read, by module path, and functions that ran, with their globals."""

    names: dict[str, set[str]] = field(default_factory=dict)
    codes: dict[CodeType, dict[str, object]] = field(default_factory=dict)
    closed: frozenset[str] = frozenset()  # modules that are not traced, but called as they are
    leaves: frozenset[str] = frozenset()  # torch modules that are single operations

    def joined(self, other: "Reads") -> "Reads":
        """Returns the union of both."""
        paths = {**self.names, **other.names}
        names = {path: self.names.get(path, set()) | other.names.get(path, set()) for path in paths}
        return Reads(names, {**self.codes, **other.codes}, self.closed & other.closed, self.leaves | other.leaves)


@contextmanager
def reading(model: nn.Module) -> Iterator[Reads]:
    """Records which attributes of a network this thread reads, and which functions it calls."""
    reads = Reads()
    paths = {id(module): path for path, module in model.named_modules()}
    thread = threading.get_ident()

    def reader(plain: Callable[..., object]) -> Callable[..., object]:
        def read(module: nn.Module, name: str) -> object:
            is_dict = name == "__dict__" and is_users(sys._getframe(1).f_globals)  # private: the caller's globals
            if (is_dict or name not in OF_TORCH) and threading.get_ident() == thread:
                path = paths.get(id(module))
                if path is not None:
                    reads.names.setdefault(path, set()).add(ALL if is_dict else name)
            return plain(module, name)

        return read

    gc_callback_codes = {getattr(act, "__code__", None) for act in gc.callbacks}  # they can run at any time
    ignored_frames: list[FrameType] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            if ignored_frames or frame.f_code in gc_callback_codes or frame.f_code.co_name == "__del__":
                ignored_frames.append(frame)
            else:
                reads.codes.setdefault(frame.f_code, frame.f_globals)
        elif event == "return" and ignored_frames and ignored_frames[-1] is frame:
            ignored_frames.pop()

    before = sys.getprofile()
    with reading_attributes(reader):
        sys.setprofile(note)
        try:
            yield reads
        finally:
            sys.setprofile(before)
    reads.codes = {code: names for code, names in reads.codes.items() if is_users(names)}


def is_users(names: Mapping[str, object]) -> bool:
    """Whether a Python module with these globals may be the user's."""
    return str(names.get("__name__", "")).split(".")[0] not in QUIET
