"""Private tables of torch.nn.Module for tensors, children and hooks, and torch's module classes without public names.

The names are the same in torch 2.11 and 2.13, and since torch 1.x. torch's own wrappers (torch.func, torch.export,
torch.nn.utils.parametrize) read and write the same tables.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as RunningNorm
from torch.nn.modules.conv import _ConvNd as Convolution
from torch.nn.modules.dropout import _DropoutNd as Dropout

__all__ = [
    "CALL_METHODS",
    "HARMLESS_METHODS",
    "HOOKS",
    "SPECTRAL_NORM",
    "STATE_METHODS",
    "TABLES",
    "UNIT_VECTORS",
    "BatchNorm",
    "Convolution",
    "Dropout",
    "RunningNorm",
    "WatchedModule",
    "add_load_hook",
    "buffer_table",
    "child_names",
    "copy_versions",
    "forward_pre_hooks",
    "global_module_hooks",
    "is_extra_state",
    "is_registered",
    "own_persistent_buffers",
    "own_tensors",
    "remove_load_hook",
    "renew_weight_list",
    "replace_tables",
    "set_versions",
    "share_tables",
    "tensor_reader",
    "tensor_tables",
    "uses_one_projection",
    "versions_of",
]

TABLES = ("_modules", "_parameters", "_buffers")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = tuple(f"_global{kind}" for kind in HOOKS)  # of torch.nn.modules.module; there is no public access
LOAD_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
CALL_METHODS = ("__call__", "_call_impl", "_wrapped_call_impl")  # methods that run forward with its hooks
STATE_METHODS = frozenset({"_load_from_state_dict", "_save_to_state_dict"})  # a subclass may override them
HARMLESS_METHODS = frozenset({"_get_name", "_version", "_reset_parameters"})  # these do not change forward either
SPECTRAL_NORM = "torch.nn.utils.parametrizations._SpectralNorm"  # the class, by its full name
UNIT_VECTORS = ("_u", "_v")  # its buffers
CUT_WEIGHTS = "cut_weights"  # in a recurrent module's list of weights: the name of no tensor


def is_registered(module: nn.Module, name: str) -> bool:
    """Returns whether a module has a child, parameter or buffer of this name."""
    attributes = vars(module)
    return any(name in attributes.get(table, ()) for table in TABLES)


def child_names(module: nn.Module) -> list[str]:
    """Returns the names of a module's own children, parameters and buffers, including those that are None."""
    return [*module._modules, *module._parameters, *module._buffers]


def own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor | None]]:
    """Returns a module's own parameters and buffers by name; `named_parameters` omits those that are None."""
    return [*module._parameters.items(), *module._buffers.items()]


def tensor_tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the tables of a module's own parameters and buffers; a change of a table changes the module.

    `setattr` would go through a `__setattr__` of the module's class.
    """
    return module._parameters, module._buffers


def tensor_reader(module: nn.Module, name: str) -> Callable[[], torch.Tensor | None] | None:
    """Returns a function that reads a module's own parameter or buffer, faster than `getattr`; None for others."""
    attributes = vars(module)  # a table may be replaced, as `__setstate__` does
    if name in module._parameters:
        return lambda: attributes["_parameters"][name]
    if name in module._buffers:
        return lambda: attributes["_buffers"][name]
    return None


def buffer_table(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Returns the table of a module's own buffers; a change of the table changes the module."""
    return module._buffers


def own_persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a module's own persistent buffers, those in its state_dict; torch has no public access to them."""
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def share_tables(module: nn.Module, other: nn.Module) -> None:
    """Makes a new module share the tables of another one: a change of either changes both."""
    module._parameters = other._parameters
    module._buffers = other._buffers
    module._modules = other._modules
    module._non_persistent_buffers_set = other._non_persistent_buffers_set


def replace_tables(
    module: nn.Module,
    *,
    tensor: Callable[[str, torch.Tensor | None], Any],
    child: Callable[[str, nn.Module | None], nn.Module | None],
) -> None:
    """Gives a shallow copy of a module its own tables, with the results of `tensor` and `child` for each entry.

    The copy keeps its hooks; a hook registered on the copy later is not registered on the original.
    """
    attributes = vars(module)
    module._parameters = {name: tensor(name, value) for name, value in module._parameters.items()}
    module._buffers = {name: tensor(name, value) for name, value in module._buffers.items()}
    module._modules = {name: child(name, value) for name, value in module._modules.items()}
    for kind in HOOKS:
        if kind in attributes:
            attributes[kind] = OrderedDict(attributes[kind])


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    """Returns the hooks before a module's forward; torch.nn.utils.spectral_norm exists only as such a hook."""
    return list(module._forward_pre_hooks.values())


def global_module_hooks() -> Iterator[tuple[str, Callable[..., object]]]:
    """Yields the global hooks, registered for all modules of the process, with the name of their table."""
    for kind in GLOBAL_HOOKS:
        for hook in list(getattr(nn.modules.module, kind).values()):
            yield kind, hook


def add_load_hook(module: nn.Module, hook: Callable[..., object]) -> None:
    """Calls `hook` before and after a module loads its own tensors; `remove_load_hook` undoes it.

    ScriptModules refuse `register_load_state_dict_pre_hook`. The tables are copied first: layers of cut networks are
    shallow copies, which share their hook tables with the uncut network.
    """
    for kind in LOAD_HOOKS:
        setattr(module, kind, OrderedDict(getattr(module, kind)))
        getattr(module, kind)[-id(hook)] = hook  # torch's keys count up from 0


def remove_load_hook(module: nn.Module, hook: Callable[..., object]) -> None:
    """Removes a hook that `add_load_hook` added; other hooks stay."""
    for kind in LOAD_HOOKS:
        getattr(module, kind).pop(-id(hook), None)


def uses_one_projection(attention: nn.MultiheadAttention) -> bool:
    """Returns whether queries, keys and values share one weight, `in_proj_weight`."""
    return bool(attention._qkv_same_embed_dim)


def renew_weight_list(module: nn.RNNBase, *, is_cut: bool) -> None:
    """Makes a recurrent module list its present parameters: it keeps a list of them beside its table.

    If they are cut, the list has a name without a tensor, so that `flatten_parameters`, which `to` calls, does nothing:
    cuDNN would refuse their shapes.
    """
    module._flat_weights_names = [name for name in module._flat_weights_names if name in module._parameters]
    module._flat_weights_names += [CUT_WEIGHTS] if is_cut else []
    module._flat_weights = [module._parameters.get(name) for name in module._flat_weights_names]


def is_extra_state(name: str) -> bool:
    """Returns whether an entry of a state_dict comes from `get_extra_state` and is no tensor of the network."""
    return name.rpartition(".")[2] == "_extra_state"


def copy_versions(state: Any, source: Mapping[str, object], *, if_missing: bool = False) -> None:
    """Copies the versions of modules from one state_dict to another; torch needs them to load old states.

    If the source has none, None is set only with `if_missing`.
    """
    if if_missing or hasattr(source, "_metadata"):
        state._metadata = getattr(source, "_metadata", None)


def versions_of(state: Mapping[str, object]) -> dict[str, dict[str, Any]] | None:
    """Returns what a state_dict says about each module, by the module's name: its version; None if it says nothing."""
    versions = getattr(state, "_metadata", None)
    return None if versions is None else {str(prefix): dict(entry) for prefix, entry in versions.items()}


def set_versions(state: OrderedDict[str, Any], versions: Mapping[str, Mapping[str, Any]] | None) -> None:
    """Writes the versions of modules into a state_dict; without them torch takes it for one of an early version."""
    if versions is not None:
        state._metadata = OrderedDict((prefix, dict(entry)) for prefix, entry in versions.items())  # type: ignore[attr-defined]  # torch's own attribute


class WatchedModule(nn.Module):
    """A module with callbacks for when torch moves, casts or wraps all of its tensors.

    A subclass overrides the two public methods; torch has no public callback.
    """

    def while_moved(self) -> AbstractContextManager[None]:
        """Returns a context manager around `to`, `cuda`, `double` and the like."""
        raise NotImplementedError

    def ignored_by_ddp(self) -> list[str]:
        """Returns the names of tensors that DistributedDataParallel ignores; DDP's constructor calls it."""
        raise NotImplementedError

    def _apply(self, fn: Callable[..., torch.Tensor], recurse: bool = True) -> Self:
        with self.while_moved():
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch has no annotation here
        return self

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        return self.ignored_by_ddp()
