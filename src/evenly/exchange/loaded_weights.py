"""Detects that `load_state_dict` replaced values of a network or its optimizer."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from weakref import ref

import torch

from evenly._torch.modules import add_load_hook, own_tensors, remove_load_hook
from evenly.comm import local_tensor
from evenly.errors import SpecError
from evenly.exchange.buffers import same


@dataclass(frozen=True)
class _LoadedTensor:
    """A tensor that was loaded `times` times, and its values before the first load."""

    tensor: torch.Tensor
    before: torch.Tensor
    times: int
    is_undone: bool = False  # the last load restored these values; later writes by hand do not count

    def is_same(self, now: torch.Tensor | None) -> bool:
        """Returns whether a tensor has the values from before the first load."""
        if now is None:
            return False
        part = local_tensor(now).detach()
        return part.shape == self.before.shape and same(part, self.before)


class LoadedWeights:
    """What `load_state_dict` of the network, a submodule or the optimizer replaced since the last `take`."""

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._module = module
        self._loaded: dict[str, _LoadedTensor] = {}  # by name
        self._is_optimizer_loaded = False
        self._handle = optimizer.register_load_state_dict_post_hook(_OptimizerHook(self))
        self._hooks = [
            _ModuleHook(self, part, f"{prefix}." if prefix else "") for prefix, part in module.named_modules()
        ]

    @property
    def any(self) -> bool:
        """Whether anything may have been loaded."""
        return self._is_optimizer_loaded or bool(self._loaded)

    def changed(self) -> set[str]:
        """Returns the names of parameters and buffers that were loaded.

        Values that a later load restored, without a step between, do not count as loaded.
        """
        tensors: dict[str, torch.Tensor] = dict(self._module.named_buffers(remove_duplicate=False))
        tensors |= self._module.named_parameters(remove_duplicate=False)
        for name, loaded in self._loaded.items():
            if isinstance(loaded.tensor, torch.nn.Parameter) and tensors.get(name) is not loaded.tensor:
                raise SpecError(
                    f"load_state_dict(assign=True) has replaced the parameter {name!r}, which the optimizer and the "
                    "averaging of gradients do not know. Load without assign, or load before synchronize."
                )
        parameters = {
            name: loaded for name, loaded in self._loaded.items() if isinstance(loaded.tensor, torch.nn.Parameter)
        }
        decisive = parameters or self._loaded  # a forward may have changed buffers since
        if all(loaded.is_undone for loaded in decisive.values()):
            return set()
        first_names = {id(tensor): name for name, tensor in reversed(tensors.items())}  # the first of tied tensors
        return {first_names[id(tensors[name])] for name in self._loaded if name in tensors}

    def take(self) -> tuple[set[str], bool]:
        """Returns the loaded names and whether the optimizer was loaded, then forgets them."""
        result = self.changed(), self._is_optimizer_loaded
        self.forget()
        return result

    def forget(self) -> None:
        """Forgets all loads so far."""
        self._loaded, self._is_optimizer_loaded = {}, False

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Ignores loads inside: the caller restores the values at the end."""
        before = dict(self._loaded)
        try:
            yield
        finally:
            self._loaded = before

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
                earlier = self._loaded.get(name)
                before = local_tensor(tensor).detach().clone() if earlier is None else earlier.before
                self._loaded[name] = _LoadedTensor(tensor, before, 1 if earlier is None else earlier.times + 1)

    def note_end(self, prefix: str, part: torch.nn.Module) -> None:
        """Records whether a load restored the former values of the tensors of `part`."""
        for key, tensor in own_tensors(part):
            if (loaded := self._loaded.get(f"{prefix}{key}")) is not None:
                self._loaded[f"{prefix}{key}"] = replace(loaded, is_undone=loaded.times > 1 and loaded.is_same(tensor))

    def note_optimizer(self) -> None:
        """Remembers that the optimizer was loaded."""
        self._is_optimizer_loaded = True


class _ModuleHook:
    """Called before a module loads its own tensors, and with two arguments after it.

    Copies and pickles of the network get a standard library function that does nothing instead, so that they depend
    neither on this run nor on this library.
    """

    def __init__(self, owner: LoadedWeights, part: torch.nn.Module, prefix: str) -> None:
        self._owner = ref(owner)
        self._part = ref(part)
        self._prefix = prefix
        add_load_hook(part, self)

    def __call__(self, state: object, prefix: object, *rest: object) -> None:
        owner, part = self._owner(), self._part()
        if owner is None or part is None:
            return
        if not rest:
            owner.note_end(self._prefix, part)
        elif isinstance(state, Mapping) and isinstance(prefix, str):
            keys = {key.removeprefix(prefix) for key in state if key.startswith(prefix)}
            owner.note(self._prefix, part, keys)

    def remove(self) -> None:
        """Removes itself from the module."""
        part = self._part()
        if part is not None:
            remove_load_hook(part, self)

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (nullcontext(), "__exit__")


class _OptimizerHook:
    def __init__(self, owner: LoadedWeights) -> None:
        self._owner = ref(owner)

    def __call__(self, optimizer: torch.optim.Optimizer) -> None:
        owner = self._owner()
        if owner is not None:
            owner.note_optimizer()
