"""Keeps the trace of a cut network valid: attributes that forward read when traced are checked before every call."""

import hashlib
import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from evenly._torch.autograd import outside_user_contexts
from evenly._torch.tracing import is_constant
from evenly.errors import MismatchError, SpecError
from evenly.graph import Change, ChangeWatch, Traced, refuse_global_hooks, shape_of, trace_module
from evenly.shards.parts.guard import CutTensors, cut_tensors_of, guard
from evenly.shards.parts.local_shards import local_shard_of, set_local_shard
from evenly.shards.run.cutting import meta_tree

Modes = tuple[bool, ...]  # of all modules, in order
Sizes = tuple[torch.Size, ...]  # of the inputs, without their leading dim
MOST_TRACES = 16  # for other sizes and modes than the example's; the one used longest ago is dropped


class TracedProgram:
    """Selects the trace of a network that is valid for the next call.

    Args:
        traced: the trace that the network was cut by, without data.
        network: this rank's part of it.
        original: the network that was cut.
    """

    def __init__(self, traced: Traced, network: nn.Module, *, original: nn.Module) -> None:
        self._network = network
        self._graph = traced.graph.fingerprint
        self._model = type(network).__name__
        self._inputs = traced.inputs
        self._sizes = _sizes(traced.inputs)
        self._trainable = {name for name, p in original.named_parameters() if p.requires_grad}
        self._sources = _sources(original, traced)
        self.record_local_shards()
        self._set_trace(traced)

    def record_local_shards(self) -> None:
        """Records the tensors and their local shards, and guards the cut ones."""
        named = _named(self._network)
        self.cut: CutTensors = cut_tensors_of({id(tensor): tensor for tensor in named.values()}.values())
        guard(self.cut)
        self._local_shards = {name: local_shard_of(tensor) for name, tensor in named.items()}
        self._shapes = [(name, tensor, tensor.shape) for name, tensor in named.items()]

    def _set_trace(self, traced: Traced) -> None:
        self.traced = traced
        self._watch = ChangeWatch(self._network, traced.reads)
        self._variants: dict[tuple[Sizes, Modes | None], Traced] = {}  # the one used last is the last
        self._checked_batches: set[tuple[object, ...]] = set()
        self._flags = [vars(module) for module in self._network.modules()]
        self._stamps: dict[int, int] = {}
        self._stamp(traced, ())

    def update(self, inputs: Mapping[str, torch.Tensor], *, training: bool) -> Traced:
        """Returns the trace that is valid for a call with these tensors; raises an error if there is none."""
        refuse_global_hooks()
        if self._network.training is not training:
            self._network.training = training
        for name, tensor, shape in self._shapes:
            if tensor.shape != shape:
                raise _misfit(name, shape, tensor.shape)
        if not self._watch.is_unchanged():
            self._adopt_replaced_tensors()
            changes = self._watch.changes()
            if changes:
                self._retrace(changes)
        self._check_sources()
        traced = self.traced_for(inputs)
        if any(flags["training"] is not training for flags in self._flags):
            traced = self._variant(inputs, tuple(flags["training"] for flags in self._flags))
        elif not training and traced.evaluation is not None:
            traced = traced.evaluation
        self._check_batch(traced, inputs)
        return traced

    def traced_for(self, inputs: Mapping[str, torch.Tensor]) -> Traced:
        """Returns the trace, for training and evaluation, for inputs of these sizes."""
        return self.traced if _sizes(self._tensors(inputs)) == self._sizes else self._variant(inputs, None)

    def _tensors(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: inputs[name] for name in self._inputs}

    def _adopt_replaced_tensors(self) -> None:
        """Gives tensors that replaced others the local shards of those, if their shapes are equal."""
        named, known_shapes = _named(self._network), {name: shape for name, _, shape in self._shapes}
        closed = tuple(f"{path}." for path in self.traced.reads.closed_modules)  # they may replace their own buffers
        for name in {**known_shapes, **named}:
            tensor = named.get(name)
            if name.startswith(closed) and closed and tensor is not None:
                continue
            if tensor is None or known_shapes.get(name) != tensor.shape:
                raise _misfit(name, known_shapes.get(name), None if tensor is None else tensor.shape)
            local_shard = self._local_shards[name]
            if local_shard_of(tensor) is None and local_shard is not None:
                set_local_shard(tensor, local_shard)
        self.record_local_shards()

    def _retrace(self, changes: Sequence[Change]) -> None:
        name, before, now = changes[0]
        case = f"{name!r} of {self._model} was {_short(before)} when the network was cut and is {_short(now)} now"
        try:
            traced = self._trace_again(None, self._inputs)
        except SpecError as error:
            raise SpecError(f"{case}, and the network cannot be traced again: {error}") from error
        if traced.graph.fingerprint != self._graph:
            raise SpecError(
                f"{case}, and its forward does other things than when it was cut. Change it before "
                "evenly.shard, or shard the network anew."
            )
        self._set_trace(traced)

    def _variant(self, inputs: Mapping[str, torch.Tensor], modes: Modes | None) -> Traced:
        """Returns the trace for other sizes than the example's, or for modules in different modes."""
        key = (_sizes(self._tensors(inputs)), modes)
        traced = self._variants.pop(key, None)
        if traced is None:
            paths = [name for name, _ in self._network.named_modules()]
            is_example = key[0] == self._sizes
            example = self._inputs if is_example else {n: shape_of(x) for n, x in self._tensors(inputs).items()}
            try:
                traced = self._trace_again(None if modes is None else dict(zip(paths, modes, strict=True)), example)
            except SpecError as error:
                sizes = [(tuple(x.shape), tuple(self._inputs[name].shape)) for name, x in example.items()]
                case = " and ".join(f"an input is {now}, in the example it was {before}" for now, before in sizes)
                raise SpecError(f"{self._model} was called where {case}. It cannot be traced so: {error}") from error
            self._stamp(traced, modes or ())
        self._variants[key] = traced
        if len(self._variants) > MOST_TRACES:
            self._forget(self._variants.pop(next(iter(self._variants))))
        return traced

    def _forget(self, traced: Traced) -> None:
        """Removes what is known of a trace: another one may get its identity."""
        for other in filter(None, (traced, traced.evaluation)):
            del self._stamps[id(other)]
            self._checked_batches = {key for key in self._checked_batches if key[0] != id(other)}

    def _trace_again(self, modes: Mapping[str, bool] | None, example: Mapping[str, torch.Tensor]) -> Traced:
        full = meta_tree(self._network, self._local_shards, self._trainable)
        with outside_user_contexts(), torch.enable_grad():  # as when it was cut
            traced = trace_module(full, dict(example), modes=modes)
        for name, value in vars(traced.program).items():
            if is_constant(name) and isinstance(value, torch.Tensor) and value.is_meta:
                raise SpecError(
                    f"forward of {self._model} makes a tensor on the device of a parameter, which is unknown when it "
                    "is traced again. Shard the network anew, or use x.device."
                )
        return traced

    def _check_sources(self) -> None:
        """Raises `SpecError` if the original network was changed and the cut one was not."""
        for ref, path, names in self._sources:
            source = ref()
            if source is None:
                continue
            attributes = vars(source)
            for name, value in names.items():
                now = attributes.get(name)
                if now is not value and not _equal(now, value):
                    cut_value = vars(self._network.get_submodule(path)).get(name)
                    if not _equal(cut_value, now):
                        raise SpecError(
                            f"{'.'.join(filter(None, (path, name)))!r} of the network that was given to be cut is "
                            f"{_short(now)} now, but {_short(cut_value)} in the cut one, which has its own copy. Set "
                            "it on the network that evenly.shard returned."
                        )

    def _check_batch(self, traced: Traced, inputs: Mapping[str, torch.Tensor]) -> None:
        """Raises `SpecError` if forward would branch differently for a batch of these shapes and dtypes."""
        grad = torch.is_grad_enabled()
        tensors = (inputs[name] for name in self._inputs)
        signatures = [(x.shape, x.dtype, x.requires_grad) for x in tensors]
        key = (id(traced), grad, *signatures)
        if key in self._checked_batches:
            return
        with outside_user_contexts(), torch.set_grad_enabled(grad):
            meta_inputs = {
                name: torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)
                for name, (shape, dtype, requires_grad) in zip(self._inputs, signatures, strict=True)
            }
            for decisions in traced.decisions:
                decisions.require(self._model, meta_inputs)
        self._checked_batches.add(key)

    def stamp_of(self, traced: Traced) -> int:
        """Returns a checksum of a trace, which must be equal on all ranks."""
        return self._stamps[id(traced)]

    def _stamp(self, traced: Traced, modes: Modes) -> None:
        self._stamps[id(traced)] = _stamp(traced, modes)
        if traced.evaluation is not None:
            self._stamps[id(traced.evaluation)] = _stamp(traced.evaluation, modes)


def _sizes(inputs: Mapping[str, torch.Tensor]) -> Sizes:
    return tuple(tensor.shape[1:] for tensor in inputs.values())


def _named(network: nn.Module) -> dict[str, torch.Tensor]:
    parameters = dict(network.named_parameters(remove_duplicate=False))
    return parameters | dict(network.named_buffers(remove_duplicate=False))


def _sources(original: nn.Module, traced: Traced) -> list[tuple[weakref.ref[nn.Module], str, dict[str, object]]]:
    """Returns weak references to the original modules, with their paths and the plain attributes that forward read."""
    sources = []
    for path, module in original.named_modules():
        names = {
            name: vars(module)[name] for name in traced.reads.attribute_names.get(path, ()) if name in vars(module)
        }
        names = {name: value for name, value in names.items() if isinstance(value, bool | int | float | str | None)}
        if names:
            sources.append((weakref.ref(module), path, names))
    return sources


def _equal(one: object, other: object) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other))


def _stamp(traced: Traced, modes: Modes) -> int:
    lines = [traced.program.code, repr(modes), repr(_sizes(traced.inputs))]
    for name, value in vars(traced.program).items():
        if is_constant(name) and isinstance(value, torch.Tensor):
            lines.append(f"{name} {value.tolist()}")
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:6], "big") + 1


def _misfit(name: str, before: torch.Size | None, now: torch.Size | None) -> MismatchError:
    return MismatchError(
        f"the parameter {name!r} was {_describe_shape(before)} when the network was sharded, and now is "
        f"{_describe_shape(now)}. Change the network first, then shard it."
    )


def _describe_shape(shape: torch.Size | None) -> str:
    return "not there" if shape is None else f"of shape {tuple(shape)}"


def _short(value: object) -> str:
    text = repr(value).splitlines()[0]
    return text if len(text) < 60 else f"{text[:57]}..."
