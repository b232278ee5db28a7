"""The program of a cut network, kept true: what its network read when it was traced is looked at before every call."""

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from evenly._torch.tracing import is_constant
from evenly.errors import MismatchError, SpecError
from evenly.graph import Change, ChangeWatch, Traced, follow, refuse_hooks_on_all
from evenly.shards.parts.guard import Apart, apart, guard
from evenly.shards.parts.local_shards import local_shard_of, place
from evenly.shards.run.cutting import hollow_tree

Modes = tuple[bool, ...]  # of all modules, in order


class TracedProgram:
    """Which trace of a network holds for the next call.

    Args:
        traced: what the network was cut by, without data.
        network: this rank's part of it.
        given: the network that was cut.
    """

    def __init__(self, traced: Traced, network: nn.Module, *, given: nn.Module) -> None:
        self._network = network
        self._graph = traced.graph.fingerprint
        self._model = type(network).__name__
        self._inputs = traced.inputs
        self._trainable = {name for name, p in given.named_parameters() if p.requires_grad}
        self._sources = _sources(given, traced)
        self.place()
        self._take(traced)

    def place(self) -> None:
        """Remembers the tensors as they lie now, and guards those that are parts."""
        named = _named(self._network)
        self.cut: Apart = apart({id(tensor): tensor for tensor in named.values()}.values())
        guard(self.cut)
        self._placements = {name: local_shard_of(tensor) for name, tensor in named.items()}
        self._shapes = [(name, tensor, tensor.shape) for name, tensor in named.items()]

    def _take(self, traced: Traced) -> None:
        self.traced = traced
        self._watch = ChangeWatch(self._network, traced.reads)
        self._variants: dict[Modes, Traced] = {}
        self._batches: set[Any] = set()
        self._flags = [vars(module) for module in self._network.modules()]
        self._stamps = {id(traced): _stamp(traced, ())}

    def update(self, given: Mapping[str, Any], *, training: bool) -> Traced:
        """Returns the trace that holds for a call with these arguments, or raises an error that says why none does."""
        refuse_hooks_on_all()
        self._network.training = training
        for name, tensor, shape in self._shapes:
            if tensor.shape != shape:
                raise _misfit(name, shape, tensor.shape)
        if not self._watch.is_still():
            self._adopt()
            changes = self._watch.changes()
            if changes:
                self._retrace(changes)
        self._check_sources()
        traced = self.traced
        if any(flags["training"] is not training for flags in self._flags):
            traced = self._variant(tuple(flags["training"] for flags in self._flags))
        self._check_batch(traced, given)
        return traced

    def _adopt(self) -> None:
        """Lets tensors that were put in place of others be parts of the same full tensors."""
        named, known = _named(self._network), {name: shape for name, _, shape in self._shapes}
        for name in {**known, **named}:
            tensor = named.get(name)
            if tensor is None or known.get(name) != tensor.shape:
                raise _misfit(name, known.get(name), None if tensor is None else tensor.shape)
            home = self._placements[name]
            if local_shard_of(tensor) is None and home is not None:
                place(tensor, home)
        self.place()

    def _retrace(self, changes: Sequence[Change]) -> None:
        name, before, now = changes[0]
        case = f"{name!r} of {self._model} was {_short(before)} when the network was cut and is {_short(now)} now"
        try:
            traced = self._followed(None)
        except SpecError as error:
            raise SpecError(f"{case}, and the network cannot be traced again: {error}") from error
        if traced.graph.fingerprint != self._graph:
            raise SpecError(
                f"{case}, with which its forward does other things than those that were cut. Change it before "
                "evenly.shard, or shard the network anew."
            )
        self._take(traced)

    def _variant(self, modes: Modes) -> Traced:
        """Returns the trace of a network of which some modules are in training and others are not."""
        if modes not in self._variants:
            paths = [name for name, _ in self._network.named_modules()]
            traced = self._followed(dict(zip(paths, modes, strict=True)))
            if traced.graph.fingerprint != self._graph:
                raise SpecError(
                    f"some modules of {self._model} are in training and others in evaluation, with which its forward "
                    "does other things than those that were cut. Give all modules one mode."
                )
            self._variants[modes] = traced
            self._stamps[id(traced)] = _stamp(traced, modes)
        return self._variants[modes]

    def _followed(self, modes: Mapping[str, bool] | None) -> Traced:
        full = hollow_tree(self._network, self._placements, self._trainable)
        with torch.inference_mode(False), torch.enable_grad():  # as when it was cut
            traced = follow(full, dict(self._inputs), modes=modes)
        for name, value in vars(traced.program).items():
            if is_constant(name) and isinstance(value, torch.Tensor) and value.is_meta:
                raise SpecError(
                    f"forward of {self._model} makes a tensor on the device of a parameter, which is not known when it "
                    "is traced again. Shard the network anew, or use x.device."
                )
        return traced

    def _check_sources(self) -> None:
        """Raises `SpecError` if the network that was given to be cut was changed, and the cut one was not."""
        for ref, path, names in self._sources:
            source = ref()
            if source is None:
                continue
            held = vars(source)
            for name, value in names.items():
                now = held.get(name)
                if now is not value and not _equal(now, value):
                    own = vars(self._network.get_submodule(path)).get(name)
                    if not _equal(own, now):
                        raise SpecError(
                            f"{'.'.join(filter(None, (path, name)))!r} of the network that was given to be cut is "
                            f"{_short(now)} now, but {_short(own)} in the cut one, which has its own. Set it on the "
                            "network that evenly.shard returned."
                        )

    def _check_batch(self, traced: Traced, given: Mapping[str, Any]) -> None:
        """Raises `SpecError` if forward would do other things for a batch like this."""
        tensors = {name: given[name] for name in self._inputs}
        grad = torch.is_grad_enabled()
        looks = [(x.shape, x.dtype, x.requires_grad) for x in tensors.values()]
        key = (id(traced), grad, *looks)
        if key in self._batches:
            return
        inputs = {
            name: torch.empty(shape, dtype=kind, device="meta", requires_grad=needs)
            for name, (shape, kind, needs) in zip(tensors, looks, strict=True)
        }
        for decisions in traced.decisions:
            decisions.require(self._model, inputs)
        self._batches.add(key)

    def stamp_of(self, traced: Traced) -> int:
        """Returns a number that ranks must have in common to run a trace together."""
        return self._stamps[id(traced)]


def _named(network: nn.Module) -> dict[str, torch.Tensor]:
    parameters = dict(network.named_parameters(remove_duplicate=False))
    return parameters | dict(network.named_buffers(remove_duplicate=False))


def _sources(given: nn.Module, traced: Traced) -> list[tuple[weakref.ref[nn.Module], str, dict[str, Any]]]:
    """Returns the modules that were given to be cut, with what was read of them; they are not kept alive."""
    found = []
    for path, module in given.named_modules():
        names = {name: vars(module)[name] for name in traced.reads.names.get(path, ()) if name in vars(module)}
        names = {name: value for name, value in names.items() if isinstance(value, bool | int | float | str | None)}
        if names:
            found.append((weakref.ref(module), path, names))
    return found


def _equal(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other))


def _stamp(traced: Traced, modes: Modes) -> int:
    lines = [traced.program.code, repr(modes)]
    for name, value in vars(traced.program).items():
        if is_constant(name) and isinstance(value, torch.Tensor):
            lines.append(f"{name} {value.tolist()}")
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:6], "big") + 1


def _misfit(name: str, before: torch.Size | None, now: torch.Size | None) -> MismatchError:
    return MismatchError(
        f"the parameter {name!r} was {_said(before)} when the network was sharded, and now is {_said(now)}. Change the "
        "network first, then shard it."
    )


def _said(shape: torch.Size | None) -> str:
    return "not there" if shape is None else f"of shape {tuple(shape)}"


def _short(value: Any) -> str:
    text = repr(value).splitlines()[0]
    return text if len(text) < 60 else f"{text[:57]}..."
