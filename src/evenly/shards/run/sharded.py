"""The module that `evenly.shard` returns: a network of which every rank holds parts of the layers."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from inspect import Parameter, Signature, signature
from typing import Any

import torch
from torch import nn

from evenly._torch import pytree
from evenly._torch.autograd import in_transform, is_saving_hooked, outside_user_contexts
from evenly._torch.compiler import disable_compile
from evenly._torch.modules import WatchedModule, child_names, is_registered, share_tables
from evenly.comm import ShardGroup, Traffic, close_groups, first_line
from evenly.errors import SpecError
from evenly.graph import Traced, refuse_strange_tensors
from evenly.layouts import lay_out
from evenly.shards.parts.guard import cut_tensors_of, guard, unguarded
from evenly.shards.parts.local_shards import local_shard_of, set_local_shard
from evenly.shards.run.cutting import refuse_cut_modules
from evenly.shards.run.dropout import RANDOM_OPS, DropoutStream
from evenly.shards.run.ops import linked_zeros, save_last
from evenly.shards.run.program import Program
from evenly.shards.run.rank_check import RankCheck, digest
from evenly.shards.run.retrace import MOST_TRACES, TracedProgram
from evenly.spec.graph import Graph
from evenly.spec.layout import Layout

RESERVED_NAMES = {
    "layout",
    "shard_group",
    "_dropout_stream",
    "_signature",
    "_shapes",
    "_all_ranks_group",
    "_source",
    "_has_idle_ranks",
    "_program",
    "_running",
    "_variant_programs",
    "_plain",
    "_agreed_batch",
    "_positional",
    "_is_closed",
    "_network",
    "_traced_program",
    "_rank_check",
    "on_close",
    "on_first_batch",
}


class Sharded(WatchedModule):
    """A network whose layers are cut over the ranks of a shard group; parameters are local tensors under their names.

    `shard_group` holds the ranks with a share, `all_ranks_group` also those without one; rank `source` broadcasts the
    outputs to these.
    """

    def __init__(
        self,
        traced: Traced,
        layout: Layout,
        shard_group: ShardGroup,
        local: nn.Module,
        *,
        seed: int,
        all_ranks_group: ShardGroup,
        source: int,
    ) -> None:
        super().__init__()
        reserved = [name for name in child_names(local) if hasattr(Sharded, name) or name in RESERVED_NAMES]
        if reserved:
            raise SpecError(
                f"a part of the network is called {reserved[0]!r}, which a cut network needs itself. Rename it."
            )
        share_tables(self, local)
        self.training = local.training
        self.layout, self.shard_group = layout, shard_group
        self._dropout_stream = DropoutStream(seed)
        self._signature = signature(traced.model.forward)
        self._positional = _positional_names(self._signature)
        self._shapes = traced.example
        self._all_ranks_group, self._source = all_ranks_group, source
        self._has_idle_ranks = len(layout.members) < len(layout.shares)
        self._program: Program | None = None  # of training, for inputs of the example's sizes
        self._variant_programs: dict[int, Program] = {}  # by the identity of their trace; the one built last is last
        traced_without_data = _without_data(traced)
        if all_ranks_group.rank in layout.members:
            self._program = Program(traced_without_data, layout, self, shard_group, self._dropout_stream)
        self._running = self._program  # the one for the current call
        self._traced_program = TracedProgram(traced_without_data, local, original=traced.model)
        has_dropout = any(choice.op in RANDOM_OPS for choice in layout.choices)
        runs_plain = shard_group.size == 1 and not has_dropout and not self._has_idle_ranks
        self._plain = [local] if runs_plain else []  # in a list, so that it is no child
        self._rank_check = RankCheck(self, shard_group)
        self._agreed_batch = (0, False, 0)  # samples, mode and trace that the ranks agreed on last
        self._is_closed = False
        self.on_first_batch: Callable[[Mapping[str, object]], None] | None = (
            None  # called with the arguments of forward
        )
        self.on_close: list[Callable[[], None]] = []
        self._network = [local]  # in a list, so that it is no child; it holds the network's attributes

    def __getattr__(self, name: str) -> Any:
        """Returns a parameter, a module or a setting of the network, not its methods, which need full tensors."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            for network in vars(self).get("_network", ()):
                value = getattr(network, name, None)
                if name in vars(network) or (value is not None and isinstance(value, bool | int | float | str)):
                    return value
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a parameter, a module or a setting where the network's forward reads it."""
        attributes = vars(self)
        is_part = is_registered(self, name) or isinstance(value, nn.Parameter | nn.Module)
        if (
            "_network" not in attributes
            or name in attributes
            or name in RESERVED_NAMES
            or is_part
            or hasattr(Sharded, name)
        ):
            super().__setattr__(name, value)
        else:
            setattr(attributes["_network"][0], name, value)

    def __delattr__(self, name: str) -> None:
        """Removes a parameter, a module or a setting of the network."""
        network = vars(self).get("_network", [None])[0]
        if name in vars(self) or network is None or name not in vars(network):
            super().__delattr__(name)
        else:
            delattr(network, name)

    @property
    def traffic(self) -> Traffic:
        """Messages and bytes that all ranks of the shard group have sent so far, together."""
        return self.shard_group.traffic

    def forward(self, *args: object, **kwargs: object) -> object:
        """Returns the network's outputs on every rank; torch.compile does not trace into it."""
        if torch.compiler.is_compiling():
            return self._forward_uncompiled(*args, **kwargs)
        return self._forward(*args, **kwargs)

    @disable_compile
    def _forward_uncompiled(self, *args: object, **kwargs: object) -> object:
        return self._forward(*args, **kwargs)

    def _forward(self, *args: object, **kwargs: object) -> object:
        for plain in self._plain:  # one rank holds the whole network
            plain.training = self.training
            self._rank_check.count_gradients()
            return plain(*args, **kwargs)
        self._require_open()
        with self.shard_group.reporting(), unguarded(self._traced_program.cut):
            bound = self._bind(args, kwargs)
            inputs = self._check(bound)
            needs_input_gradient = any(
                isinstance(value, torch.Tensor) and value.requires_grad for value in bound.values()
            )
            if self._program is None and needs_input_gradient and torch.is_grad_enabled():
                raise SpecError(
                    "an input requires a gradient, but this rank has no share of the network and cannot give one. "
                    "Give the rank a share, or leave it out of the group."
                )
            if self._program is not None:
                self._update_program(inputs)
            self._agree_on_batch(inputs)
            self._run_first_batch_callback(bound)
            result = self._run(bound) if self._program is not None else None
            result = self._broadcast_outputs(result) if self._has_idle_ranks else result
            return save_last(result) if is_saving_hooked() and torch.is_grad_enabled() else result

    def _run(self, arguments: Mapping[str, object]) -> object:
        self._rank_check.before_pass()
        result = self._running.run(arguments) if self._running is not None else None
        self._rank_check.watch_outputs(result)
        return result

    def _run_first_batch_callback(self, arguments: Mapping[str, object]) -> None:
        """Calls `on_first_batch` once; all ranks do, since all get the same batches."""
        if self.on_first_batch is not None and not torch.is_inference_mode_enabled():
            callback, self.on_first_batch = self.on_first_batch, None
            with outside_user_contexts():
                callback(arguments)

    def _agree_on_batch(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Compares the batch with the other ranks' whenever its size, the mode or the trace has changed."""
        self._rank_check.begin_pass()
        tensors = [inputs[name] for name in self._shapes if self._shapes[name]]
        if self._running is None or self.shard_group.size == 1 or not tensors:
            return
        samples = tensors[0].shape[0]
        batch_state = (samples, self.training, self._traced_program.stamp_of(self._running.traced))
        has_changed = batch_state != self._agreed_batch
        self.shard_group.batch = (self._rank_check.passes, [*batch_state, *(digest(tensors[0]) if has_changed else [])])
        if has_changed:
            self.shard_group.agree_on_batch(self.layout.members)
            self._agreed_batch = batch_state

    def _update_program(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Selects the program for this call; raises if the network cannot be traced for it."""
        self._running = self._program_in_current_modes(inputs)

    def _program_of(self, traced: Traced) -> Program:
        """Returns the program of a trace; other traces than the first use the parameters as they are cut already."""
        if self._program is None or self._program.traced is not self._traced_program.traced:
            self._program = self._new_program(self._traced_program.traced, self.layout)
            self._variant_programs.clear()
        if traced is self._program.traced:
            return self._program
        if id(traced) not in self._variant_programs:
            layout = self.layout if traced.graph.fingerprint == self.layout.graph else self._layout_for(traced)
            self._variant_programs[id(traced)] = self._new_program(traced, layout)
            if len(self._variant_programs) > 2 * MOST_TRACES:  # of training and of evaluation
                del self._variant_programs[next(iter(self._variant_programs))]
        return self._variant_programs[id(traced)]

    def _new_program(self, traced: Traced, layout: Layout) -> Program:
        return Program(traced, layout, self, self.shard_group, self._dropout_stream)

    def _layout_for(self, traced: Traced) -> Layout:
        """Returns the layout of another trace of the network, whose parameters and buffers stay as they are cut."""
        refuse_cut_modules(traced, self._network[0])
        named = [*self.named_parameters(remove_duplicate=False), *self.named_buffers(remove_duplicate=False)]
        local_shards = {name: local_shard_of(tensor) for name, tensor in named}
        placed = {
            name: None if shard is None or shard.dim is None else (shard.dim, shard.segments)
            for name, shard in local_shards.items()
        }
        cut_batch = any(cut.rows for cut in self.layout.cuts) and traced.graph.batch_size > 1
        modes = _recurrent_modes(traced.graph, self.layout)
        return lay_out(traced.graph, self.layout.shares, modes=modes, cut_batch=cut_batch, placed=placed)

    def _program_for_both_modes(self, arguments: Mapping[str, Any]) -> Program | None:
        """Returns the program for the network's current attributes, whatever the modes of its modules.

        The arguments are those of forward, and are not checked here.
        """
        if self._program is None:
            return None
        self._traced_program.update(arguments, training=self.training)
        return self._program_of(self._traced_program.traced_for(arguments))

    def _program_in_current_modes(self, arguments: Mapping[str, Any]) -> Program:
        """Returns the program for the current modes of all modules; the arguments are not checked here."""
        return self._program_of(self._traced_program.update(arguments, training=self.training))

    def _bind(self, args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, object]:
        if self._positional is not None and not kwargs and len(args) == len(self._positional):  # faster than `bind`
            return dict(zip(self._positional, args, strict=True))
        try:
            return self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise SpecError(
                f"the network was called with arguments that forward{self._signature} does not take: {error}. Call it "
                "as the uncut network."
            ) from None

    @contextmanager
    def while_moved(self) -> Iterator[None]:
        """Keeps the local shards of tensors that torch moves or casts inside the block."""
        named = [*self.named_parameters(remove_duplicate=False), *self.named_buffers(remove_duplicate=False)]
        local_shards = {name: local_shard_of(tensor) for name, tensor in named}
        yield
        named = [*self.named_parameters(remove_duplicate=False), *self.named_buffers(remove_duplicate=False)]
        for name, tensor in named:
            local_shard = local_shards[name]
            if local_shard is not None:
                set_local_shard(tensor, local_shard)
        guard(cut_tensors_of(tensor for _, tensor in named))

    def ignored_by_ddp(self) -> list[str]:
        """Raises `SpecError` if there are several ranks: DDP would average parts as if they were copies."""
        if self.shard_group.size == 1:
            return []
        raise SpecError(
            "DistributedDataParallel was put around a network that is cut over ranks; it would average parts of "
            "different layers. Use evenly.synchronize to average over several such networks."
        )

    def __deepcopy__(self, memo: object) -> "Sharded":
        """Raises `SpecError`: a cut network has connections and cannot be copied."""
        raise SpecError(
            "a network cut over ranks was to be copied, but it has connections to other ranks. Copy its state: "
            "evenly.shards.full_state_dict."
        )

    def extra_repr(self) -> str:
        """Returns this rank and the shares; the sizes that torch prints are full ones."""
        shares = ", ".join(f"{share:g}" for share in self.layout.shares)
        return f"rank {self._all_ranks_group.rank} of shares {shares}; full sizes are shown"

    def load_state_dict(self, state_dict: Mapping[str, object], strict: bool = True, assign: bool = False) -> Any:
        """Loads a `state_dict()` of this rank; the state of the whole network raises `SpecError`."""
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as error:
            raise SpecError(
                f"a state was to be loaded into this rank's parts of the network, but it does not fit them: "
                f"{str(error).splitlines()[-1].strip()} For the state of the whole network use "
                "evenly.shards.load_full_state_dict."
            ) from None

    def _require_open(self) -> None:
        """Raises an error if the network is closed, or if a rank has failed."""
        if self._is_closed:
            raise SpecError("a network cut over ranks was called after close(). Shard it anew, or close it later.")
        self.shard_group.monitor.check()
        if self.shard_group.failed is not None:
            raise SpecError(
                f"a network cut over ranks was called again after an error ({first_line(self.shard_group.failed)}); "
                "its ranks may have stopped at different points. Shard it anew."
            )

    def close(self) -> None:
        """Closes the connections; forward and full_state_dict can no longer be called."""
        self._is_closed = True
        self._rank_check.end()
        for callback in self.on_close:
            callback()
        if self._all_ranks_group is not self.shard_group:
            close_groups([self._all_ranks_group.group], failed=self.shard_group.monitor.has_failed)
        self.shard_group.close()

    def _broadcast_outputs(self, result: object) -> object:
        """Returns the outputs on all ranks: those without a share receive them by broadcast."""
        all_ranks_group, source = self._all_ranks_group, self._source
        values, structure = pytree.tree_flatten(result)
        leaves = [x for x in values if isinstance(x, torch.Tensor)]
        shapes = [[list(x.shape), str(x.dtype)] if isinstance(x, torch.Tensor) else x for x in values]
        description = all_ranks_group.broadcast_object(
            [shapes, pytree.treespec_dumps(structure) if all_ranks_group.rank == source else ""], source
        )
        if self._program is not None:
            if all_ranks_group.rank == source:
                for leaf in leaves:
                    all_ranks_group.broadcast(leaf.detach().contiguous(), source)
            else:
                for leaf in leaves:
                    all_ranks_group.broadcast(leaf.detach().clone(memory_format=torch.contiguous_format), source)
            return result
        parameters = [p for p in self.parameters() if p.requires_grad]
        device = parameters[0].device if parameters else torch.device("cpu")
        outputs: list[object] = []
        for entry in description[0]:
            if not isinstance(entry, list):
                outputs.append(entry)
                continue
            shape, dtype = entry
            received = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
            all_ranks_group.broadcast(received, source)
            needs_graph = received.is_floating_point() and torch.is_grad_enabled() and bool(parameters)
            outputs.append(received + linked_zeros(shape, *parameters).to(received.dtype) if needs_graph else received)
        return pytree.tree_unflatten(outputs, pytree.treespec_loads(description[1]))

    def _check(self, arguments: Mapping[str, object]) -> dict[str, torch.Tensor]:
        """Returns the tensors among the arguments; raises `SpecError` unless they are as in the example."""
        _refuse_transforms()
        refuse_strange_tensors(arguments)
        inputs: dict[str, torch.Tensor] = {}
        for name, shape in self._shapes.items():
            value = arguments.get(name)
            if not isinstance(value, torch.Tensor) or value.ndim != len(shape):
                case = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise SpecError(
                    f"the input {name!r} is {case}, but the network was sharded with an example of shape {shape}; "
                    "sizes may differ, the number of dims may not. Shard it with an example of this shape."
                )
            inputs[name] = value
        self._check_batches(inputs)
        unexpected = [n for n in arguments if n not in self._shapes and arguments[n] is not None]
        if unexpected:
            raise SpecError(
                f"the argument {unexpected[0]!r} was not in the example with which the network was sharded. "
                "Give an example with all arguments."
            )
        return inputs

    def _check_batches(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Raises `SpecError` if inputs that are cut along the batch have unequal numbers of samples."""
        if not any(cut.rows for cut in self.layout.cuts):
            return
        batch = next((shape[0] for shape in self._shapes.values() if shape), 0)
        sizes = {name: inputs[name].shape[0] for name, shape in self._shapes.items() if shape[:1] == (batch,)}
        if len(set(sizes.values())) > 1:
            raise SpecError(
                f"the inputs have {sizes} samples, but in the example they had {batch} each, and the network is cut "
                "along the batch. Give equal numbers, or shard it with an example of unequal ones."
            )


def sharded_of(model: nn.Module) -> Sharded:
    """Returns the cut network, unwrapped from `evenly.synchronize`; raises `SpecError` for any other module."""
    inner = getattr(model, "module", model)
    if not isinstance(inner, Sharded):
        raise SpecError(
            f"{type(model).__name__} was given, but a network cut by evenly.shard is needed. Give the network that "
            "evenly.shard returned."
        )
    return inner


def _positional_names(forward: Signature) -> tuple[str, ...] | None:
    """Returns the names of the parameters of forward if all of them can be given by position; otherwise None."""
    parameters = forward.parameters.values()
    is_simple = all(parameter.kind is Parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
    return tuple(forward.parameters) if is_simple else None


def _refuse_transforms() -> None:
    """Raises `SpecError` inside a function transform: collectives have no batched or forward-mode form."""
    if in_transform():
        raise SpecError(
            "a network cut over ranks was called inside of torch.func (vmap, grad, jvp, ...) or forward-mode autograd, "
            "which cannot trace communication between ranks. Call it plainly, and use backward or torch.autograd.grad."
        )


def _recurrent_modes(graph: Graph, layout: Layout) -> dict[str, list[str]]:
    """Returns the modes that recurrent layers may have for other inputs: by units those that have it in `layout`.

    That was decided by what messages cost, which is not known here.
    """
    by_units = {choice.layer for choice in layout.choices if choice.mode == "units"}
    layers = [layer.name for layer in graph.layers if layer.op == "recurrent"]
    return {name: ["units"] if name in by_units else ["whole", "bystander"] for name in layers}


def _without_data(traced: Traced) -> Traced:
    """Returns the trace with meta tensors for parameters and buffers: only their shapes are needed."""
    memo: dict[int, object] = {}
    for tensor in (*traced.model.parameters(), *traced.model.buffers()):
        meta_tensor = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = (
            nn.Parameter(meta_tensor, requires_grad=tensor.requires_grad) if is_parameter else meta_tensor
        )

    def copied(one: Traced) -> Traced:
        decisions = tuple(
            replace(decision, program=copy.deepcopy(decision.program, memo)) for decision in one.decisions
        )
        program = copy.deepcopy(one.program, memo)
        evaluation = None if one.evaluation is None else copied(one.evaluation)
        return replace(one, model=nn.Module(), program=program, decisions=decisions, evaluation=evaluation)

    return copied(traced)
