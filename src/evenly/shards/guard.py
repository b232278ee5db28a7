"""Gradients of cut parameters that refuse what one rank's part cannot give: norms, sums, single elements.

Between backward and the optimizer's step such a gradient is of a class of its own. What treats each element alone works
as ever; what looks at several raises. The optimizer itself gets plain tensors: what it does was tried.
"""

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from evenly._errors import SpecError
from evenly.shards.placement import Placement, placement_of

Apart = list[tuple[torch.Tensor, Placement]]
_MARK = "_evenly_part_of"

COPIES = {  # operations that are not called pointwise, but leave each element alone
    "_to_copy", "_unsafe_view", "alias", "cat", "contiguous", "copy", "copy_", "detach", "detach_", "empty_like",
    "expand", "fill", "fill_", "flatten", "full_like", "lift_fresh", "masked_fill", "masked_fill_", "ones_like",
    "permute", "reshape", "scalar_tensor", "squeeze", "stack", "t", "transpose", "unsqueeze", "view", "view_as_complex",
    "view_as_real", "zero", "zero_", "zeros_like",
}  # fmt: skip
FACTORIES = {"arange", "empty", "full", "new_empty", "new_full", "new_ones", "new_zeros", "ones", "zeros"}
LEAVE = {"__repr__", "__format__", "__deepcopy__", "__reduce_ex__", "as_subclass", "tolist", "numpy", "__array__"}


class Trial(threading.local):
    """Whether this thread tries out a copy of an optimizer: what sums over ranks then does nothing."""

    is_on = False

    @contextmanager
    def on(self) -> Iterator[None]:
        """Tries inside."""
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False


trial = Trial()


class PartGradient(torch.Tensor):
    """A rank's part of a gradient; an operation on it that would look at several elements raises `SpecError`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():  # as torch's own subclasses do it
            if called_by_us():
                return func(*args, **kwargs)
            if func.__name__ in LEAVE:  # what leaves torch, or comes out plain, is this rank's part: that is seen
                return func(*pytree.tree_map(_plain, args), **kwargs)
            with _OnlyElementwise(_marks((args, kwargs))):
                result = func(*args, **kwargs)
        return _as_parts(result, args, kwargs)


class _OnlyElementwise(TorchDispatchMode):
    """Raises `SpecError` at an operation that does not treat each element alone."""

    def __init__(self, marks: list[Placement]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation here
        self._marks = marks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_elementwise(func):
            of = f"the gradient of {self._marks[0].name!r}" if self._marks else "a gradient"
            raise SpecError(
                f"{func} was asked for on {of}, but the parameter is cut over ranks and this rank holds only a part: "
                "the result would be another one than on one device. To clip, call torch.nn.utils.clip_grad_norm_ "
                "or evenly.shards.clip_grad_norm_ on all ranks. placement_of(parameter).full(parameter.grad), on all "
                "ranks, is the whole gradient (evenly.shards.placement_of); parameter.grad.as_subclass(torch.Tensor) "
                "is this rank's part. torch's GradScaler must be evenly.shards.GradScaler."
            )
        return func(*args, **(kwargs or {}))


@cache
def _is_elementwise(op: torch._ops.OpOverload) -> bool:
    space, _, name = op._schema.name.partition("::")
    if space != "aten" or torch.Tag.nondeterministic_seeded in op.tags:
        return False
    if name in COPIES | FACTORIES or torch.Tag.pointwise in op.tags:
        return True
    single = name.removeprefix("_foreach_")
    packet = getattr(torch.ops.aten, single.removesuffix("_"), None)
    if single == name or packet is None:
        return False
    tags = [getattr(packet, overload).tags for overload in packet.overloads()]
    return single in COPIES or any(torch.Tag.pointwise in own for own in tags)


def called_by_us(*, directly: bool = False) -> bool:
    """Returns whether the code that called torch is this library's; not `directly`, it may have called torch's code."""
    frame = sys._getframe(2)
    while frame is not None:
        room = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if room != "torch" or directly:
            return room == "evenly"
        frame = frame.f_back  # type: ignore[assignment]  # None at the end
    return False


def apart(parameters: Iterable[torch.Tensor]) -> Apart:
    """Returns the parameters that are cut over several ranks, with their placements."""
    found = ((parameter, placement_of(parameter)) for parameter in parameters)
    return [(p, own) for p, own in found if own is not None and own.is_cut and own.wire.size > 1]


def guard(parameters: Apart) -> None:
    """Has the gradients of these parameters refuse what their parts cannot give."""
    for parameter, placement in parameters:
        _as_part(parameter.grad, placement)


def unguard(parameters: Iterable[torch.Tensor]) -> None:
    """Has the gradients be plain tensors."""
    for parameter in parameters:
        if type(parameter.grad) is PartGradient:
            vars(parameter.grad).pop(_MARK, None)  # a plain tensor can be copied, a placement cannot
            parameter.grad.__class__ = torch.Tensor  # type: ignore[assignment]  # as torch does with lazy buffers


def guard_after_backward(outputs: Any, parameters: Apart) -> None:
    """Has the gradients of `parameters` guarded at the end of every backward that goes through `outputs`."""

    def arrive(_: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(finish)  # what torch's DDP ends a backward with

    def finish() -> None:
        guard(parameters)

    for leaf in [outputs] if isinstance(outputs, torch.Tensor) else pytree.tree_leaves(outputs):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaf.register_hook(arrive)  # type: ignore[no-untyped-call]  # torch has no annotation here


def part_of(gradient: torch.Tensor) -> Placement | None:
    """Returns where a guarded gradient lies in the full one; None if that is not known, or it is not guarded."""
    return vars(gradient).get(_MARK) if type(gradient) is PartGradient else None


def _as_parts(result: Any, args: Any, kwargs: Any) -> Any:
    """Returns what an operation on parts gives, as parts; of lists that are treated one by one, those from parts."""
    if isinstance(result, torch.Tensor):
        alike = [own for own in _parts((args, kwargs)) if own.shape == result.shape]
        return _as_part(result, part_of(alike[0]) if alike else None)
    if isinstance(result, list | tuple):
        given = args[0] if args and isinstance(args[0], list | tuple) and len(args[0]) == len(result) else None
        for number, own in enumerate(result):
            if given is None or type(given[number]) is PartGradient:
                _as_part(own, None if given is None else part_of(given[number]))
    return result


def _as_part(value: Any, placement: Placement | None) -> Any:
    if type(value) is torch.Tensor and value.ndim > 0 and value.layout is torch.strided:
        value.__class__ = PartGradient
        if placement is not None:
            vars(value)[_MARK] = placement
    return value


def _plain(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if type(value) is PartGradient else value


def _parts(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if type(leaf) is PartGradient]


def _marks(values: Any) -> list[Placement]:
    return [own for part in _parts(values) if (own := part_of(part)) is not None]
