"""Operators of torch as their dispatcher knows them, and operations without a public name.

The classes and attributes are those that torch.library, torch.export and torch's own tensor subclasses use, of torch
2.11 and 2.13.
"""

from types import ModuleType
from typing import Any

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
    "assert_later",
    "copy_all_",
    "operator_name",
    "out_of_place",
    "packet_name",
    "safe_softmax",
    "without_torch_function",
]

FUNCTIONAL: ModuleType = torch._C._nn
"""Where functions of torch.nn.functional come from that are written in C++."""

without_torch_function = torch._C.DisableTorchFunctionSubclass
"""Has subclasses of tensors be plain tensors inside of a block, as torch's own subclasses do in __torch_function__."""

add_all_ = torch._foreach_add_
"""Adds a list of tensors to another one in place, in few launches of a GPU; torch.optim uses it."""

copy_all_ = torch._foreach_copy_
"""Copies a list of tensors into another one, in few launches of a GPU."""

assert_later = torch._assert_async
"""Fails if a tensor is false; on a GPU it does so without a stall, some time later."""


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


def arguments_of(target: Any) -> list[Any]:
    """Returns the arguments of an operator as its schema describes them; none of what is no operator."""
    schema = getattr(target, "_schema", None)
    return [] if schema is None else list(schema.arguments)


def argument_names(op: Any) -> list[str]:
    """Returns the names of an operator's arguments."""
    return [argument.name for argument in op._schema.arguments]


def out_of_place(op: OpOverload) -> Any:
    """Returns the operator of aten that gives a new tensor where `op` changes one; None if it changes none."""
    name = operator_name(op).split("::")[1]
    return getattr(getattr(torch.ops.aten, name[:-1]), op._overloadname) if name[-1] == "_" else None
