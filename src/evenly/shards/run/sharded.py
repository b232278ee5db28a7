"""The module to call: a network of which every rank holds its parts of the layers."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import nn

from evenly._torch import pytree
from evenly._torch.autograd import in_transform
from evenly._torch.compiler import disable_compile
from evenly._torch.modules import WatchedModule, child_names, is_registered, share_tables
from evenly.comm import ShardGroup, Traffic, close_groups, first_line
from evenly.errors import SpecError
from evenly.graph import Traced, refuse_strange_tensors
from evenly.shards.parts.guard import apart, guard, unguarded
from evenly.shards.parts.local_shards import local_shard_of, place
from evenly.shards.run.dropout import DropoutStream
from evenly.shards.run.ops import hollow
from evenly.shards.run.program import Program
from evenly.shards.run.rank_check import RankCheck
from evenly.shards.run.retrace import TracedProgram
from evenly.spec.layout import Layout

OWN = {
    "layout",
    "shard_group",
    "_dropout_stream",
    "_signature",
    "_shapes",
    "_stage",
    "_source",
    "_has_audience",
    "_program",
    "_plain",
}
OWN |= {"_stand", "_passes", "_is_closed", "_network", "_traced_program", "_rank_check", "on_close"}
OWN |= {"on_first_batch"}


class Sharded(WatchedModule):
    """A network whose layers are cut over the ranks of a wire; parameters are plain local tensors under their names.

    `stage` joins all ranks, also those without a share, to whom rank `source` tells the outputs.
    """

    def __init__(
        self,
        traced: Traced,
        layout: Layout,
        shard_group: ShardGroup,
        local: nn.Module,
        *,
        seed: int,
        stage: ShardGroup,
        source: int,
    ) -> None:
        super().__init__()
        taken = [name for name in child_names(local) if hasattr(Sharded, name) or name in OWN]
        if taken:
            raise SpecError(
                f"a part of the network is called {taken[0]!r}, which a cut network needs itself. Rename it."
            )
        share_tables(self, local)
        self.training = local.training
        self.layout, self.shard_group = layout, shard_group
        self._dropout_stream = DropoutStream(seed)
        self._signature = signature(traced.model.forward)
        self._shapes = traced.example
        self._stage, self._source = stage, source
        self._has_audience = len(layout.members) < len(layout.shares)
        self._program: Program | None = None
        hollowed = _without_data(traced)
        if stage.rank in layout.members:
            self._program = Program(hollowed, layout, self, shard_group, self._dropout_stream)
        self._traced_program = TracedProgram(hollowed, local, given=traced.model)
        draws = any(choice.op in ("dropout", "attention") for choice in layout.choices)
        self._plain = (
            [local] if shard_group.size == 1 and not draws and not self._has_audience else []
        )  # no child of this one
        self._rank_check = RankCheck(self, shard_group)
        self._passes = 0
        self._stand = (0, False, 0)  # the samples, the mode and the trace of the last pass
        self._is_closed = False
        self.on_first_batch: Callable[[Mapping[str, Any]], None] | None = None  # is given the arguments of forward
        self.on_close: list[Callable[[], None]] = []
        self._network = [local]  # no child of this one; it keeps the attributes of the network

    def __getattr__(self, name: str) -> Any:
        """Returns a parameter, a module, or a setting of the network; its methods would see parts of tensors."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            for network in vars(self).get("_network", ()):
                value = getattr(network, name, None)
                if name in vars(network) or (value is not None and isinstance(value, bool | int | float | str)):
                    return value
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a part of the network, or one of its settings, where its forward reads it."""
        own = vars(self)
        is_part = is_registered(self, name) or isinstance(value, nn.Parameter | nn.Module)
        if "_network" not in own or name in own or name in OWN or is_part or hasattr(Sharded, name):
            super().__setattr__(name, value)
        else:
            setattr(own["_network"][0], name, value)

    def __delattr__(self, name: str) -> None:
        """Removes a part of the network, or one of its settings."""
        network = vars(self).get("_network", [None])[0]
        if name in vars(self) or network is None or name not in vars(network):
            super().__delattr__(name)
        else:
            delattr(network, name)

    @property
    def traffic(self) -> Traffic:
        """What the ranks have sent so far: messages and bytes."""
        return self.shard_group.traffic

    @disable_compile
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the network returns for these arguments, on every rank; torch.compile leaves it as it is."""
        for plain in self._plain:  # one rank has everything
            plain.training = self.training
            return plain(*args, **kwargs)
        self._require_open()
        with self.shard_group.telling(), unguarded(self._traced_program.cut):
            bound = self._bind(args, kwargs)
            self._check(bound)
            asks = any(isinstance(value, torch.Tensor) and value.requires_grad for value in bound.values())
            if self._program is None and asks and torch.is_grad_enabled():
                raise SpecError(
                    "an input requires a gradient, but this rank has no share of the network and cannot give one. "
                    "Give the rank a share, or leave it out of the group."
                )
            if self._program is not None:
                self._keep_current(bound)
            self._agree_on_batch(bound)
            self._meet_first_batch(bound)
            result = self._run(bound) if self._program is not None else None
            return self._tell(result) if self._has_audience else result

    def _run(self, given: Mapping[str, Any]) -> Any:
        self._rank_check.before_pass(self._passes)
        result = self._program.run(given) if self._program is not None else None
        self._rank_check.watch_outputs(pytree.tree_leaves(result), self._passes)
        return result

    def _meet_first_batch(self, given: Mapping[str, Any]) -> None:
        """Does what waits for a batch, once; on all ranks, as all see the same batches."""
        if self.on_first_batch is not None and not torch.is_inference_mode_enabled():
            act, self.on_first_batch = self.on_first_batch, None
            act(given)

    def _agree_on_batch(self, given: Mapping[str, Any]) -> None:
        """Compares the size of the batch with the other ranks' whenever it is another one than before."""
        self._passes += 1
        tensors = [given[name] for name in self._shapes if self._shapes[name]]
        if self._program is None or self.shard_group.size == 1 or not tensors:
            return
        samples = tensors[0].shape[0]
        stand = (samples, self.training, self._traced_program.stamp_of(self._program.traced))
        asks = stand != self._stand
        self.shard_group.batch = (self._passes, [*stand, *(_look(tensors[0]) if asks else [])])
        if asks:
            self.shard_group.agree_on_batch(self.layout.members)
            self._stand = stand

    def _keep_current(self, given: Mapping[str, Any]) -> None:
        """Takes the program that holds for the network as it is now, and for this batch; raises if there is none."""
        traced = self._traced_program.update(given, training=self.training)
        if self._program is not None and traced is not self._program.traced:
            self._program = Program(traced, self.layout, self, self.shard_group, self._dropout_stream)

    def _program_for_both_modes(self, given: Mapping[str, Any]) -> Program | None:
        """Returns the program of the network as it is now, whatever the modes of its modules are."""
        if self._program is None:
            return None
        self._traced_program.update(given, training=self.training)
        traced = self._traced_program.traced
        is_taken = traced is self._program.traced
        return self._program if is_taken else Program(traced, self.layout, self, self.shard_group, self._dropout_stream)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise SpecError(
                f"the network was called with arguments that forward{self._signature} does not take: {error}."
            ) from None

    @contextmanager
    def while_moved(self) -> Iterator[None]:
        """Has tensors that torch moves or casts inside stay parts of the same tensors."""
        named = [*self.named_parameters(remove_duplicate=False), *self.named_buffers(remove_duplicate=False)]
        known = {name: local_shard_of(tensor) for name, tensor in named}
        yield
        named = [*self.named_parameters(remove_duplicate=False), *self.named_buffers(remove_duplicate=False)]
        for name, tensor in named:
            found = known[name]
            if found is not None:
                place(tensor, found)
        guard(apart(tensor for _, tensor in named))

    def left_out_by_ddp(self) -> list[str]:
        """Raises `SpecError` if there are several ranks: DDP would take parts for copies."""
        if self.shard_group.size == 1:
            return []
        raise SpecError(
            "DistributedDataParallel was put around a network that is cut over ranks; it would average parts of "
            "different layers. Use evenly.synchronize to average over several such networks."
        )

    def __deepcopy__(self, memo: Any) -> "Sharded":
        """A cut network has connections and cannot be copied."""
        raise SpecError(
            "a network cut over ranks was to be copied, but it has connections to other ranks. Copy its state: "
            "evenly.shards.full_state_dict."
        )

    def extra_repr(self) -> str:
        """Says what of the sizes below is here."""
        return (
            f"rank {self._stage.rank} of shares {', '.join(f'{s:g}' for s in self.layout.shares)}; full sizes are shown"
        )

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads what this rank's `state_dict()` gave; the state of the whole network is refused with a hint."""
        try:
            return super().load_state_dict(*args, **kwargs)
        except RuntimeError as error:
            raise SpecError(
                f"a state was to be loaded into this rank's parts of the network, but it does not fit them: "
                f"{str(error).splitlines()[-1].strip()} For the state of the whole network use "
                "evenly.shards.load_full_state_dict."
            ) from None

    def _require_open(self) -> None:
        """Raises if the ranks can no longer work together: closed, or after an error."""
        if self._is_closed:
            raise SpecError("a network cut over ranks was called after close(). Shard it anew, or close it later.")
        self.shard_group.monitor.check()
        if self.shard_group.failed is not None:
            raise SpecError(
                f"a network cut over ranks was called again after an error ({first_line(self.shard_group.failed)}); "
                "its ranks "
                "may stand at different places. Shard it anew."
            )

    def close(self) -> None:
        """Ends the connections; the module can no longer be called, nor its full state be collected."""
        self._is_closed = True
        self._rank_check.end()
        for act in self.on_close:
            act()
        if self._stage is not self.shard_group:
            close_groups([self._stage.group], failed=self.shard_group.monitor.has_failed)
        self.shard_group.close()

    def _tell(self, result: Any) -> Any:
        """Returns the outputs, sent to the ranks without a share."""
        stage, source = self._stage, self._source
        flat, form = pytree.tree_flatten(result)
        leaves = [x for x in flat if isinstance(x, torch.Tensor)]
        shapes = [[list(x.shape), str(x.dtype)] if isinstance(x, torch.Tensor) else x for x in flat]
        text = stage.tell([shapes, pytree.treespec_dumps(form) if stage.rank == source else ""], source)
        if self._program is not None:
            if stage.rank == source:
                for leaf in leaves:
                    stage.broadcast(leaf.detach().contiguous(), source)
            else:
                for leaf in leaves:
                    stage.broadcast(leaf.detach().clone(memory_format=torch.contiguous_format), source)
            return result
        parameters = [p for p in self.parameters() if p.requires_grad]
        device = parameters[0].device if parameters else torch.device("cpu")
        told: list[Any] = []
        for entry in text[0]:
            if not isinstance(entry, list):
                told.append(entry)
                continue
            shape, kind = entry
            received = torch.empty(shape, dtype=getattr(torch, kind.removeprefix("torch.")), device=device)
            stage.broadcast(received, source)
            hangs = received.is_floating_point() and torch.is_grad_enabled() and bool(parameters)
            told.append(received + hollow(shape, *parameters).to(received.dtype) if hangs else received)
        return pytree.tree_unflatten(told, pytree.treespec_loads(text[1]))

    def _check(self, given: Mapping[str, Any]) -> None:
        _refuse_transforms()
        refuse_strange_tensors(given)
        for name, shape in self._shapes.items():
            value = given.get(name)
            if not isinstance(value, torch.Tensor) or value.shape[1:] != shape[1:] or value.ndim != len(shape):
                case = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise SpecError(
                    f"the input {name!r} is {case}, but the network was sharded with an example of shape {shape}; only "
                    "the batch may differ. Shard it with an example of this shape."
                )
        self._check_batches(given)
        strange = [n for n in given if n not in self._shapes and given[n] is not None]
        if strange:
            raise SpecError(
                f"the argument {strange[0]!r} was not in the example with which the network was sharded. "
                "Give an example with all arguments."
            )

    def _check_batches(self, given: Mapping[str, Any]) -> None:
        """Inputs that are cut along the batch together must have one number of samples."""
        if not any(cut.rows for cut in self.layout.cuts):
            return
        batch = next((shape[0] for shape in self._shapes.values() if shape), 0)
        sizes = {name: given[name].shape[0] for name, shape in self._shapes.items() if shape[:1] == (batch,)}
        if len(set(sizes.values())) > 1:
            raise SpecError(
                f"the inputs have {sizes} samples, but in the example they had {batch} each, and the network is cut "
                "along the batch. Give equal numbers, or shard it with an example of unequal ones."
            )


def sharded_of(model: nn.Module) -> Sharded:
    """Returns the cut network itself, also out of what synchronizes it; raises `SpecError` for any other module."""
    inner = getattr(model, "module", model)
    if not isinstance(inner, Sharded):
        raise SpecError(f"{type(model).__name__} was given, but a network cut by evenly.shard is needed.")
    return inner


def _refuse_transforms() -> None:
    """Raises `SpecError` inside of a function transform: messages between ranks have no batched or forward form."""
    if in_transform():
        raise SpecError(
            "a network cut over ranks was called inside of torch.func (vmap, grad, jvp, ...) or forward-mode autograd, "
            "which cannot follow the messages between ranks. Call it plainly, and use backward or torch.autograd.grad."
        )


def _look(x: torch.Tensor) -> list[float]:
    """Returns two numbers that differ for different data."""
    few = x.detach().flatten()[:4096].cpu()
    few = torch.view_as_real(few).flatten() if few.is_complex() else few
    numbers = few.double()
    places = torch.arange(1, numbers.numel() + 1, dtype=torch.float64)
    return [float(numbers.abs().sum()), float((numbers * places.cos()).sum())] if numbers.numel() else []


def _without_data(traced: Traced) -> Traced:
    """Returns the same with parameters that have no data: only their shapes are asked for."""
    memo: dict[int, Any] = {}
    for tensor in (*traced.model.parameters(), *traced.model.buffers()):
        hollowed = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(hollowed, requires_grad=tensor.requires_grad) if is_parameter else hollowed
    decisions = tuple(replace(made, program=copy.deepcopy(made.program, memo)) for made in traced.decisions)
    program = copy.deepcopy(traced.program, memo)
    return replace(traced, model=nn.Module(), program=program, decisions=decisions)
