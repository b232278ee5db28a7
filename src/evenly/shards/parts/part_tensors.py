"""Tensors that hold one rank's part and raise an error for norms, sums, single elements and layers.

Parameters and buffers of a cut network, their gradients, and elementwise results of these are such tensors. Elementwise
operations work as usual; all others raise. This library itself, and an optimizer in its step, get plain tensors.
"""

import sys
from collections.abc import Callable, Iterable
from functools import cache
from inspect import getattr_static
from types import GetSetDescriptorType
from typing import Any, SupportsIndex, TypeGuard

import torch
from torch import nn

from evenly._torch import pytree
from evenly._torch.operators import OpOverload, TorchDispatchMode, operator_name, without_torch_function
from evenly._torch.optimizers import ZERO_GRAD_CODE
from evenly._torch.tensors import set_class
from evenly.comm import first_line
from evenly.errors import EvenlyError, SpecError
from evenly.shards.parts.local_shards import LocalShard, local_shard_of, set_local_shard

_MARK = "_evenly_part_of"
_KIND = "_evenly_kind_of_part"

COPIES = {  # operations without the tag pointwise that treat each element alone
    "_to_copy", "_unsafe_view", "alias", "cat", "contiguous", "copy", "copy_", "detach", "detach_", "empty_like",
    "expand", "fill", "fill_", "flatten", "full_like", "lift_fresh", "masked_fill", "masked_fill_", "ones_like",
    "permute", "reshape", "scalar_tensor", "squeeze", "stack", "t", "transpose", "unsqueeze", "view", "view_as_complex",
    "view_as_real", "zero", "zero_", "zeros_like",
}  # fmt: skip
FACTORIES = {"arange", "empty", "full", "new_empty", "new_full", "new_ones", "new_zeros", "ones", "zeros"}
PLAIN_RESULTS = {"__repr__", "__format__", "__reduce_ex__", "as_subclass", "tolist", "numpy", "__array__"}
GRADIENT, PARAMETER, BUFFER = "the gradient of", "the parameter", "the buffer"
_GRAD: GetSetDescriptorType = getattr_static(torch.Tensor, "grad")
ACCESS = {"__get__", "__set__", "__delete__"}  # of attributes such as p.shape, p.data, p.grad

TorchFunction = Callable[..., Any]  # returns a tensor, a list of tensors, a number, a shape, ...
Args = tuple[Any, ...]  # the arguments of a torch function: tensors, numbers, hooks, and containers of these
KeywordArgs = dict[str, Any]  # the same by name


class PartTensor(torch.Tensor):
    """A rank's part of a tensor; an operation on it that is not elementwise raises `SpecError`."""

    @classmethod
    def __torch_function__(
        cls, func: TorchFunction, types: object, args: Args = (), kwargs: KeywordArgs | None = None
    ) -> object:
        return _guarded(func, args, kwargs or {})


class PartParameter(nn.Parameter):
    """A rank's part of a parameter; an operation on it that is not elementwise raises `SpecError`."""

    @classmethod
    def __torch_function__(
        cls, func: TorchFunction, types: object, args: Args = (), kwargs: KeywordArgs | None = None
    ) -> object:
        return _guarded(func, args, kwargs or {})

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, guarded too; a property here is faster than through `__torch_function__`."""
        with without_torch_function():
            grad: torch.Tensor | None = _GRAD.__get__(self)
        if type(grad) is not torch.Tensor or sys._getframe(1).f_code in ZERO_GRAD_CODE or called_by_us():
            return grad
        make_part(grad, local_shard_of(self), GRADIENT)
        return grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        with without_torch_function():
            _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        with without_torch_function():
            _GRAD.__delete__(self)

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Parameter:
        """Returns a parameter that is the same part of the same tensor."""
        copied = nn.Parameter(self.as_subclass(torch.Tensor).detach().clone(), requires_grad=self.requires_grad)
        local_shard = local_shard_of(self)
        if local_shard is not None:
            set_local_shard(copied, local_shard)
        make_part(copied, local_shard)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        """Saves this rank's part as a plain parameter."""
        plain = nn.Parameter(self.as_subclass(torch.Tensor).detach(), requires_grad=self.requires_grad)
        reduced: tuple[object, ...] = plain.__reduce_ex__(protocol)
        return reduced


def _guarded(func: TorchFunction, args: Args, kwargs: KeywordArgs) -> object:
    """Returns the result of a torch function of parts, as parts, or raises `SpecError`."""
    name = getattr(func, "__name__", "")
    with without_torch_function():
        if name in ACCESS:
            result = func(*args, **kwargs)
            if type(result) is not torch.Tensor or called_by_us(above=2):
                return result
            make_part(result, part_of(args[0]), _kind_of(args[0]))
            return result
        if called_by_us(above=2):
            return func(*args, **kwargs)
        if name in PLAIN_RESULTS:  # the result is plain, so the user sees that it is this rank's part
            return func(*pytree.tree_map(_plain, args), **kwargs)
        if name in SPECIAL:
            return SPECIAL[name](func, args, kwargs)
        parts = _parts((args, kwargs))
        try:
            with _OnlyElementwise(name, parts):
                result = func(*args, **kwargs)
        except EvenlyError:
            raise
        except Exception as error:  # torch checks shapes before it dispatches
            if any(part.shape != local_shard.shape for part in parts if (local_shard := part_of(part)) is not None):
                raise _refusal(f"{name} ({first_line(error)})", parts) from error
            raise
    return _as_parts(result, args, kwargs)


def _copied(func: TorchFunction, args: Args, kwargs: KeywordArgs) -> object:
    part = args[0]
    copied = func(_plain(part), *args[1:], **kwargs)
    make_part(copied, part_of(part), _kind_of(part))
    return copied


def _hooked(func: TorchFunction, args: Args, kwargs: KeywordArgs) -> object:
    """Registers a hook that is called with the gradient as a part."""
    part, hook, *rest = args

    def run(grad: torch.Tensor) -> object:
        grad_part = grad.detach()
        make_part(grad_part, part_of(part), GRADIENT)
        return _plain(hook(grad_part))

    return func(part, run, *rest, **kwargs)


def _differentiated(func: TorchFunction, args: Args, kwargs: KeywordArgs) -> tuple[torch.Tensor | None, ...]:
    """Returns the gradients of `torch.autograd.grad`, those of parts as parts."""
    inputs = kwargs["inputs"] if "inputs" in kwargs else args[1] if len(args) > 1 else ()
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    outputs = args[0] if args else kwargs["outputs"]
    _refuse_backward([outputs] if isinstance(outputs, torch.Tensor) else list(outputs))
    grads: tuple[torch.Tensor | None, ...] = func(*args, **kwargs)
    for tensor, grad in zip(inputs, grads, strict=True):
        if is_part(tensor) and grad is not None:
            make_part(grad, part_of(tensor), GRADIENT)
    return grads


def _refuse_backward(outputs: Iterable[torch.Tensor]) -> None:
    for output in outputs:
        if is_part(output):
            raise _refusal("backward", [output])


def _backward(func: TorchFunction, args: Args, kwargs: KeywordArgs) -> object:
    _refuse_backward(args[:1])
    return func(*args, **kwargs)


SPECIAL = {"__deepcopy__": _copied, "register_hook": _hooked, "grad": _differentiated, "backward": _backward}


class _OnlyElementwise(TorchDispatchMode):
    """Raises `SpecError` at an operation that does not treat each element alone."""

    def __init__(self, name: str, parts: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation here
        self._name, self._parts = name, parts

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: KeywordArgs | None = None
    ) -> object:
        if not _is_elementwise(func):
            raise _refusal(f"{func} (in {self._name})", self._parts)
        if _keeps_shape(func):
            self._require_shape(func, [x for x in args if isinstance(x, torch.Tensor)])
        return func(*args, **(kwargs or {}))

    def _require_shape(self, func: OpOverload, tensors: list[torch.Tensor]) -> None:
        """Raises `SpecError` if a part would be broadcast to a larger shape: the full tensor may not broadcast."""
        part_shapes = [x.shape for x in tensors if any(x is part for part in self._parts)]
        broadcast: Callable[..., torch.Size] = torch.broadcast_shapes
        if part_shapes and broadcast(*(x.shape for x in tensors)) not in part_shapes:
            case = " and ".join(str(list(x.shape)) for x in tensors)
            raise _refusal(f"{func} (in {self._name}) of {case}", self._parts)


def _refusal(operation: str, parts: list[torch.Tensor]) -> SpecError:
    local_shard = next((shard for part in parts if (shard := part_of(part)) is not None), None)
    kind = _kind_of(*parts)
    subject = f"{kind} {local_shard.name!r}" if local_shard is not None else f"{kind} a cut network"
    if kind == GRADIENT:
        advice = (
            "To clip, call torch.nn.utils.clip_grad_norm_ or evenly.shards.clip_grad_norm_ on all ranks. "
            "local_shard_of(parameter).full(parameter.grad), on all ranks, is the whole gradient "
            "(evenly.shards.local_shard_of); parameter.grad.as_subclass(torch.Tensor) is this rank's part. torch's "
            "GradScaler must be evenly.shards.GradScaler."
        )
    else:
        advice = (
            "A penalty in the loss: compute it inside forward, and return it with the output. A layer: call the whole "
            "network. Initial values: set them before evenly.shard. To inspect values, call on all ranks "
            "torch.nn.utils.get_total_norm(model.parameters()) for the norm of all parameters, or "
            "local_shard_of(parameter).full(parameter) (evenly.shards.local_shard_of) for the whole tensor; "
            "parameter.as_subclass(torch.Tensor) is this rank's part."
        )
    return SpecError(
        f"{operation} was asked for on {subject}, but the tensor is cut over ranks and this rank holds only a part: "
        f"the result would differ from that on one device. {advice}"
    )


@cache
def _is_elementwise(op: OpOverload) -> bool:
    space, _, name = operator_name(op).partition("::")
    if space != "aten" or torch.Tag.nondeterministic_seeded in op.tags:
        return False
    if name in COPIES | FACTORIES or torch.Tag.pointwise in op.tags:
        return True
    single = name.removeprefix("_foreach_")
    packet = getattr(torch.ops.aten, single.removesuffix("_"), None)
    if single == name or packet is None:
        return False
    tags = [getattr(packet, overload).tags for overload in packet.overloads()]
    return single in COPIES or any(torch.Tag.pointwise in overload_tags for overload_tags in tags)


@cache
def _keeps_shape(op: OpOverload) -> bool:
    """Returns whether the result of an operation has the broadcast shape of its operands."""
    name = operator_name(op).partition("::")[2]
    return torch.Tag.pointwise in op.tags or name in {"copy", "copy_", "masked_fill", "masked_fill_"}


def called_by_us(*, directly: bool = False, above: int = 1) -> bool:
    """Returns whether this library called torch; unless `directly`, frames of torch in between are skipped."""
    frame = sys._getframe(above + 1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package != "torch" or directly:
            return package == "evenly"
        frame = frame.f_back  # type: ignore[assignment]  # None at the end
    return False


def is_part(value: object) -> TypeGuard[torch.Tensor]:
    """Returns whether a value is guarded."""
    return type(value) is PartTensor or type(value) is PartParameter


def part_of(value: torch.Tensor) -> LocalShard | None:
    """Returns the local shard of a guarded tensor; None if it is unknown, or the tensor is not guarded."""
    if type(value) is PartParameter:
        return local_shard_of(value)
    return vars(value).get(_MARK) if type(value) is PartTensor else None


def make_part(value: object, local_shard: LocalShard | None, kind: str = PARAMETER) -> None:
    """Guards a tensor, in place; anything but a dense plain tensor or parameter stays as it is."""
    if type(value) is nn.Parameter:
        set_class(value, PartParameter)
    elif type(value) is torch.Tensor and value.ndim > 0 and value.layout is torch.strided:
        set_class(value, PartTensor)
        vars(value)[_KIND] = kind
        if local_shard is not None:
            vars(value)[_MARK] = local_shard
    elif type(value) is PartTensor and kind == GRADIENT:  # a gradient was accumulated into it
        vars(value)[_KIND] = kind


def make_plain(value: torch.Tensor) -> None:
    """Ends the guard of a tensor, in place."""
    if type(value) is PartParameter:
        set_class(value, nn.Parameter)
    elif type(value) is PartTensor:
        vars(value).pop(_MARK, None)  # a plain tensor can be copied, a local shard cannot
        vars(value).pop(_KIND, None)
        set_class(value, torch.Tensor)


def _as_parts(result: object, args: Args, kwargs: KeywordArgs) -> object:
    """Returns the result of an operation on parts, guarded; of a list, the elements that come from parts."""
    if isinstance(result, torch.Tensor):
        parts = _parts((args, kwargs))
        same_shape = [part for part in parts if part.shape == result.shape]
        make_part(result, part_of(same_shape[0]) if same_shape else None, _kind_of(*parts))
    elif isinstance(result, list | tuple):
        operands = args[0] if args and isinstance(args[0], list | tuple) and len(args[0]) == len(result) else None
        for number, part in enumerate(result):
            if operands is None:
                make_part(part, None, _kind_of(*_parts((args, kwargs))))
            elif is_part(operands[number]):
                make_part(part, part_of(operands[number]), _kind_of(operands[number]))
    return result


def _kind_of(*parts: torch.Tensor) -> str:
    kinds = [vars(part).get(_KIND, PARAMETER) if type(part) is PartTensor else PARAMETER for part in parts]
    return GRADIENT if GRADIENT in kinds else str(kinds[0])


def _plain(value: object) -> object:
    """Returns an alias that is not guarded."""
    return value.as_subclass(torch.Tensor) if is_part(value) else value


def _parts(values: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if is_part(leaf)]
