"""Operators of torch's dispatcher, and operations without a public name.

torch.library, torch.export and torch's own tensor subclasses use the same classes and attributes in torch 2.11 and
2.13.
"""

from types import ModuleType

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "FUNCTIONAL",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "add_all_",
    "argument_names",
    "arguments_of",
    "assert_async",
    "copy_all_",
    "operator_name",
    "out_of_place",
    "packet_name",
    "safe_softmax",
    "without_torch_function",
]

FUNCTIONAL: ModuleType = torch._C._nn
"""The module of the functions of torch.nn.functional that are written in C++."""

without_torch_function = torch._C.DisableTorchFunctionSubclass
"""Treats tensor subclasses as plain tensors inside a block, as torch's own subclasses do in __torch_function__."""

add_all_ = torch._foreach_add_
"""Adds a list of tensors to another one in place, with few kernel launches; torch.optim uses it."""

copy_all_ = torch._foreach_copy_
"""Copies a list of tensors into another one, with few kernel launches."""

assert_async = torch._assert_async
"""Raises an error if a tensor is false; on a GPU asynchronously, without waiting for the value."""


def safe_softmax(scores: torch.Tensor) -> torch.Tensor:
    """Returns softmax along the last dim, zeros where a row is -inf: as torch's own attention computes it."""
    shares: torch.Tensor = torch.ops.aten._safe_softmax(scores, -1)
    return shares


def operator_name(op: OpOverload) -> str:
    """Returns the name of an operator with its namespace, such as aten::add_."""
    return str(op._schema.name)


def packet_name(packet: OpOverloadPacket) -> str:
    """Returns the name of all overloads of an operator together, with its namespace."""
    return str(packet._qualified_op_name)


def arguments_of(target: object) -> list[torch.Argument]:
    """Returns the arguments of an operator as its schema describes them; an empty list if it is no operator."""
    schema = getattr(target, "_schema", None)
    return [] if schema is None else list(schema.arguments)


def argument_names(op: OpOverload) -> list[str]:
    """Returns the names of an operator's arguments."""
    return [argument.name for argument in op._schema.arguments]


def out_of_place(op: OpOverload) -> OpOverload | None:
    """Returns the out-of-place form of an in-place operator of aten; None if `op` is not in place."""
    name = operator_name(op).split("::")[1]
    return getattr(getattr(torch.ops.aten, name[:-1]), op._overloadname) if name[-1] == "_" else None
