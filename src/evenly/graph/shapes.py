"""Shapes, dtypes and flops of every operation for the example, computed on the meta device."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.fx.node import Argument, Target
from torch.utils.flop_counter import flop_registry

from evenly._torch import pytree
from evenly._torch.autograd import version_of
from evenly._torch.modules import RunningNorm
from evenly._torch.operators import OpOverload, TorchDispatchMode, argument_names
from evenly.errors import SpecError
from evenly.graph.torch_code import function_name, is_torch_function

MetaValue: TypeAlias = Any
"""What a node computes for the example: a meta tensor, a number, a container of these, or what else forward uses."""


class Shapes(fx.Interpreter):
    """Runs a graph on meta tensors and keeps the value and flops of every node, in `values` and `flops`."""

    def __init__(self, program: fx.GraphModule, *, may_overwrite: bool = False) -> None:
        super().__init__(program)
        self.extra_traceback = False  # fx would append several lines to our error
        self._may_overwrite = may_overwrite  # whether an operation may change its input in place
        self.values: dict[str, MetaValue] = {}
        self.flops: dict[str, int] = {}
        self.random_nodes: set[str] = set()  # those that draw random numbers

    def run_node(self, n: fx.Node) -> MetaValue:
        """Runs one node and keeps its value."""
        recorder = _OperationRecorder()
        input_tensors = [x for m in n.all_input_nodes if isinstance(x := self.values[m.name], torch.Tensor)]
        before = [version_of(x) for x in input_tensors]
        try:
            with recorder, torch.device("meta"):
                value = super().run_node(n)
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            raise SpecError(
                f"the operation {n.name!r} cannot be run on meta tensors, which have a shape but no values: {reason}. "
                "Shapes must not depend on values, and the example must fit the network."
            ) from error
        overwrites = not self._may_overwrite and [version_of(x) for x in input_tensors] != before
        if overwrites and not self._is_lowered(n):
            raise SpecError(
                f"the operation {n.name!r} changes its input in place, which has no rule for a network whose layers "
                "are cut. Make it return a new tensor."
            )
        self.values[n.name], self.flops[n.name] = value, recorder.flops
        if recorder.draws_random:
            self.random_nodes.add(n.name)
        return value

    def _is_lowered(self, n: fx.Node) -> bool:
        """Whether a change in place has a rule: of statistics, of a buffer, or in a module whose copy is not so."""
        if n.op == "call_function" and function_name(n.target) in ("batch_norm", "assign"):
            return True
        return n.op == "call_module" and bool(getattr(self.fetch_attr(str(n.target)), "inplace", False))

    def get_attr(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, object]) -> MetaValue:
        """Returns an attribute; tensors on the meta device."""
        value = super().get_attr(target, args, kwargs)
        return shape_of(value) if isinstance(value, torch.Tensor) else value

    def call_module(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, object]) -> MetaValue:
        """Runs a module with its parameters on the meta device."""
        module = self.fetch_attr(str(target))
        return call_on_meta(module, *args, **kwargs)

    def call_function(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, object]) -> MetaValue:
        """Runs a function; `device` arguments become the meta device."""
        kwargs = _without_device(kwargs)
        if is_torch_function(target):
            return super().call_function(target, args, kwargs)
        try:
            return super().call_function(target, args, kwargs)
        except RuntimeError:
            return _on_zeros(target, args, kwargs)  # type: ignore[arg-type]  # of a call_function it is a function

    def call_method(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, object]) -> MetaValue:
        """Runs a method; `device` arguments become the meta device."""
        return super().call_method(target, args, _without_device(kwargs))


def is_random(func: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
    """Whether an operation of torch draws random numbers; attention does so only with dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = argument_names(func)
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" not in names or bool(arguments.get("dropout_p"))


class _OperationRecorder(TorchDispatchMode):
    """Adds the flops of the operations that run, and records whether one draws random numbers.

    torch's FlopCounterMode counts the same flops, but it also puts hooks on all modules of the process: networks that
    other threads run meanwhile would get them, too.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation here
        self.flops = 0
        self.draws_random = False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Runs an operation, as the simpler ones that it is made of if it is a composite."""
        kwargs = kwargs or {}
        self.draws_random |= is_random(func, args, kwargs)
        with self:
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            result = func(*args, **kwargs)
            if (flops_of := flop_registry.get(func.overloadpacket)) is not None:
                self.flops += flops_of(*args, **kwargs, out_val=result)
        return result


def shape_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a meta tensor of the same shape, dtype and requires_grad."""
    return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)


def call_on_meta(module: nn.Module, *args: MetaValue, **kwargs: MetaValue) -> MetaValue:
    """Returns what a module gives for meta tensors; the module is not changed."""
    if isinstance(module, RunningNorm) and args:  # counts batches by value
        requires_grad = args[0].requires_grad or any(p.requires_grad for p in module.parameters())
        return torch.empty_like(args[0]).requires_grad_(requires_grad).clone()
    try:
        return copy.deepcopy(module).to("meta").forward(*args, **kwargs)
    except RuntimeError:  # it uses values: zeros will do
        return _on_zeros(_on_cpu(module).forward, args, kwargs)


def _on_zeros(run: Callable[..., MetaValue], args: tuple[MetaValue, ...], kwargs: Mapping[str, MetaValue]) -> MetaValue:
    """Returns what a function gives for zeros on the CPU, as meta tensors."""
    with torch.device("cpu"):
        cpu_arguments = pytree.tree_map_only(
            torch.Tensor,
            lambda x: torch.zeros_like(x, device="cpu").requires_grad_(x.requires_grad),
            (args, dict(kwargs)),
        )
        tensors = [x for x in pytree.tree_leaves(cpu_arguments) if isinstance(x, torch.Tensor)]
        before = [version_of(x) for x in tensors]
        outputs = run(*cpu_arguments[0], **cpu_arguments[1])
        if [version_of(x) for x in tensors] != before:
            name = type(run.__self__).__name__ if hasattr(run, "__self__") else getattr(run, "__name__", str(run))
            raise SpecError(f"{name} changes its input in place, which has no rule.") from None
    return pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), outputs)


def _on_cpu(module: nn.Module) -> nn.Module:
    """Returns a copy on the CPU; meta tensors become zeros."""
    cpu_copy = copy.deepcopy(module)
    if not any(x.is_meta for x in (*cpu_copy.parameters(), *cpu_copy.buffers())):
        return cpu_copy.to("cpu")
    cpu_copy.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*cpu_copy.parameters(), *cpu_copy.buffers()):
            tensor.zero_()
    return cpu_copy


def _without_device(kwargs: dict[str, object]) -> dict[str, object]:
    return {**kwargs, "device": torch.device("meta")} if kwargs.get("device") is not None else kwargs
