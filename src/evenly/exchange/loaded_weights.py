"""Notices that `load_state_dict` has put other values into a network or its optimizer."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import torch

from evenly._torch.modules import add_load_hook, own_tensors, remove_load_hook
from evenly.errors import SpecError
from evenly.exchange.buffers import same


@dataclass(frozen=True)
class _Noted:
    """A tensor that was loaded some `times`, and its values before the first of them."""

    tensor: torch.Tensor
    before: torch.Tensor
    times: int
    is_undone: bool = False  # the last load has put these values back; what is written by hand later is no load

    def is_same(self, now: torch.Tensor | None) -> bool:
        """Returns whether a tensor has the values from before."""
        return now is not None and now.shape == self.before.shape and same(now.detach(), self.before)


class LoadedWeights:
    """What `load_state_dict` of the network, of any part of it, or of its optimizer has replaced since it was taken."""

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._module = module
        self._noted: dict[str, _Noted] = {}  # by name
        self._of_optimizer = False
        self._handle = optimizer.register_load_state_dict_post_hook(_OptimizerHook(self))
        self._hooks = [
            _ModuleHook(self, part, f"{prefix}." if prefix else "") for prefix, part in module.named_modules()
        ]

    @property
    def any(self) -> bool:
        """Whether anything may have been loaded."""
        return self._of_optimizer or bool(self._noted)

    def changed(self) -> set[str]:
        """Returns the names of parameters and buffers that were loaded.

        What was put in for a while and taken out again, by two loads or more without a step between, was not.
        """
        every: dict[str, torch.Tensor] = dict(self._module.named_buffers(remove_duplicate=False))
        every |= self._module.named_parameters(remove_duplicate=False)
        for name, noted in self._noted.items():
            if isinstance(noted.tensor, torch.nn.Parameter) and every.get(name) is not noted.tensor:
                raise SpecError(
                    f"load_state_dict(assign=True) has replaced the parameter {name!r}, which the optimizer and the "
                    "averaging of gradients do not know. Load without assign, or load before synchronize."
                )
        parameters = {
            name: noted for name, noted in self._noted.items() if isinstance(noted.tensor, torch.nn.Parameter)
        }
        telling = parameters or self._noted  # a forward may have changed buffers since
        if all(noted.is_undone for noted in telling.values()):
            return set()
        first_names = {id(tensor): name for name, tensor in reversed(every.items())}  # of tied ones the first
        return {first_names[id(every[name])] for name in self._noted if name in every}

    def take(self) -> tuple[set[str], bool]:
        """Returns what has changed and whether the optimizer was loaded, and notices anew from here on."""
        taken = self.changed(), self._of_optimizer
        self.forget()
        return taken

    def forget(self) -> None:
        """Notices anew from here on."""
        self._noted, self._of_optimizer = {}, False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leaves out what is loaded inside: values are put back at the end."""
        before = dict(self._noted)
        try:
            yield
        finally:
            self._noted = before

    def close(self) -> None:
        """Removes the hooks."""
        self._handle.remove()
        for hook in self._hooks:
            hook.remove()

    def note(self, prefix: str, part: torch.nn.Module, keys: set[str]) -> None:
        """Remembers the values of the tensors of `part` that are about to be replaced."""
        for key, tensor in own_tensors(part):
            if tensor is not None and key in keys:
                name = f"{prefix}{key}"
                known = self._noted.get(name)
                before = tensor.detach().clone() if known is None else known.before
                self._noted[name] = _Noted(tensor, before, 1 if known is None else known.times + 1)

    def note_end(self, prefix: str, part: torch.nn.Module) -> None:
        """Looks at what a load has put into the tensors of `part`."""
        for key, tensor in own_tensors(part):
            if (noted := self._noted.get(f"{prefix}{key}")) is not None:
                self._noted[f"{prefix}{key}"] = replace(noted, is_undone=noted.times > 1 and noted.is_same(tensor))

    def note_optimizer(self) -> None:
        """Remembers that the optimizer was loaded."""
        self._of_optimizer = True


class _ModuleHook:
    """Called before a module loads its own tensors, and with two arguments after it.

    In copies and pickles of the network it becomes a function of the standard library that does nothing, so that they
    know neither this run nor this library.
    """

    def __init__(self, owner: LoadedWeights, part: torch.nn.Module, prefix: str) -> None:
        self._owner = ref(owner)
        self._part = ref(part)
        self._prefix = prefix
        add_load_hook(part, self)

    def __call__(self, state: Any, prefix: Any, *rest: Any) -> None:
        owner, part = self._owner(), self._part()
        if owner is None or part is None:
            return
        if not rest:
            owner.note_end(self._prefix, part)
        else:
            keys = {key.removeprefix(prefix) for key in state if key.startswith(prefix)}
            owner.note(self._prefix, part, keys)

    def remove(self) -> None:
        """Takes itself out of the module."""
        part = self._part()
        if part is not None:
            remove_load_hook(part, self)

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")


class _OptimizerHook:
    def __init__(self, owner: LoadedWeights) -> None:
        self._owner = ref(owner)

    def __call__(self, optimizer: torch.optim.Optimizer) -> None:
        owner = self._owner()
        if owner is not None:
            owner.note_optimizer()
