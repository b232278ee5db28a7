"""Whether a cut network computes what the uncut one does: outputs, gradients, buffers, parameters after a step."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from evenly._torch import pytree
from evenly._torch.autograd import without_hooks
from evenly._torch.modules import Dropout, buffer_table
from evenly.errors import MismatchError, SpecError
from evenly.graph import Example
from evenly.shards.parts.local_shards import local_shard_of
from evenly.shards.run.program import Program
from evenly.shards.run.sharded import Sharded, sharded_of
from evenly.shards.verification.layer_trace import LayerRecorder, Trace, backward, chances
from evenly.shards.verification.tolerance import Differences, noise_of

RTOL = {8: 1e-9, 4: 1e-4}  # by bytes of a number; 2e-2 for shorter ones
LR = 1e-2
SWITCHES = ("training", "p", "dropout")  # what is changed of modules

Loss = Callable[[Any], torch.Tensor | None]
Build = Callable[[list[nn.Parameter]], Optimizer]
Found = dict[str, dict[str, float]]  # kind -> name -> difference
Played = dict[str, dict[str, torch.Tensor]]  # kind -> name -> tensor


@dataclass(frozen=True)
class ReportRow:
    """The worst difference of one kind of tensor, and the name of the tensor."""

    what: str
    count: int
    worst: float
    where: str


@dataclass(frozen=True)
class Report:
    """What `verify` found: whether all is the same, the worst relative difference, the first layer that differs."""

    ok: bool
    worst: float
    rtol: float
    layer: str | None
    rows: tuple[ReportRow, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        """The report as a small table."""
        verdict = "the same as" if self.ok else "not the same as"
        first = "" if self.layer is None else f" first at {self.layer!r},"
        head = f"the cut network is {verdict} the uncut one:{first} worst difference {self.worst:.1e}"
        table = [f"  {row.what:10} {row.count:5} tensors {row.worst:9.1e}  {row.where}".rstrip() for row in self.rows]
        return [f"{head}, limit {self.rtol:.1e}", *table, *(f"  {note}" for note in self.notes)]

    def __str__(self) -> str:
        return "\n".join(self.lines)


def verify(
    model: nn.Module,
    sharded: Sharded,
    example: Example,
    *,
    loss: Loss | None = None,
    optimizer: Build | None = None,
    rtol: float | None = None,
) -> Report:
    """Returns whether a cut network is the uncut one: outputs, every gradient and buffer, parameters after a step.

    Both run in training mode with dropout off. All ranks call it together and get the same report; both networks stay
    as they were, and so do their gradients and torch's random numbers.

    Args:
        model: the uncut network with the same weights; a copy of it is used.
        sharded: the cut one.
        example: a batch as forward takes it: a tensor, a tuple of arguments, or a dict of named arguments.
        loss: gives a number for the outputs; by default a weighted sum of all of them.
        optimizer: makes the optimizer of the step from a list of parameters; by default plain SGD.
        rtol: the largest relative difference that is none; by default 1e-9 for float64, 1e-4 for float32, 2e-2 for
            shorter numbers.
    """
    report, sharded = None, sharded_of(sharded)
    with sharded.shard_group.telling():
        program = sharded._program_for_both_modes(_bound(sharded, example))
        if program is not None:
            trial = _Comparison(model, sharded, program, example, loss or _weighted_sum, optimizer, rtol)
            report = trial.report()
    if report is not None and not sharded._has_audience:
        return report
    told = sharded._stage.tell(None if report is None else asdict(report), sharded._source)
    return Report(**{**told, "rows": tuple(ReportRow(**row) for row in told["rows"]), "notes": tuple(told["notes"])})


class _Comparison:
    """One comparison."""

    def __init__(
        self,
        model: nn.Module,
        sharded: Sharded,
        program: Program,
        example: Example,
        loss: Loss,
        optimizer: Build | None,
        rtol: float | None,
    ) -> None:
        _require_same_form(model, sharded)
        self._model = model
        self._sharded = sharded
        self._program = program
        self._loss, self._optimizer = loss, optimizer
        self._device = _device(sharded)
        bound = _bound(sharded, example)
        self._arguments = _moved(bound, _device(model)), _moved(bound, self._device)
        floats = [x for x in (*model.parameters(), *model.buffers()) if x.is_floating_point()]
        self._eps = max((torch.finfo(x.dtype).eps for x in floats), default=2.0**-52)
        shortest = min((x.dtype.itemsize for x in floats), default=8)
        self._is_short = shortest < 8
        self._rtol = RTOL.get(shortest, 2e-2) if rtol is None else rtol
        self._traced = program.traced
        self._owners, always = chances(self._traced)
        if always:
            raise SpecError(
                f"a network was to be verified whose dropout at {always[0]!r} is on in every mode, so that two runs "
                "never agree. Let it follow the module's mode (training=self.training), or build it with p=0."
            )

    def report(self) -> Report:
        """Returns what was found."""
        with self._left_as_it_was():
            found = self._compare()
        rows = tuple(_row(what, differences) for what, differences in found.items())
        worst = max((row.worst for row in rows), default=0.0)
        layer = None if worst <= self._rtol else self._layer(found)
        return Report(worst <= self._rtol, worst, self._rtol, layer, rows, tuple(self._notes(worst <= self._rtol)))

    def _compare(self) -> Found:
        plain, own = self._plain(), _named(self._sharded)
        differences = self._gaps()
        for name, tensor in _named(plain).items():
            differences.add(name, _full(own[name], own[name]), tensor)
        found = {"state": self._settled(differences)}
        truth, exact = self._play(plain, self._arguments[0]), self._play_exact()
        _switch(self._sharded, self._owners)
        mine = self._play(self._sharded, self._arguments[1])
        noise = noise_of(list(truth["gradients"].values()), self._eps)
        for what, tensors in truth.items():
            differences = self._gaps()
            for name, tensor in tensors.items():
                value = mine[what][name] if what == "outputs" else _full(own[name], mine[what][name])
                if what == "parameters" and self._optimizer is not None:  # it may blow up a gradient that is only noise
                    value = torch.where(truth["gradients"][name].abs() <= noise, tensor, value.to(tensor.device))
                differences.add(name, value, tensor, exact[what].get(name) if exact else None)
            found[what] = self._settled(differences)
        return found

    def _plain(self) -> nn.Module:
        """Returns a copy of the uncut network, ready to run."""
        plain = copy.deepcopy(self._model)
        plain.zero_grad()
        _switch(plain, self._owners)
        return plain

    def _play_exact(self) -> Played | None:
        """Returns what the uncut network makes in float64; None if it has that already, or cannot."""
        if not self._is_short:
            return None
        try:
            return self._play(self._plain().double(), _lengthened(self._arguments[0]))
        except (RuntimeError, TypeError, ValueError):  # a network may insist on its type
            self._is_short = False
            return None

    def _play(self, network: nn.Module, arguments: Mapping[str, Any]) -> Played:
        """Returns the outputs, the gradients, the buffers and the parameters after a step."""
        torch.manual_seed(0)  # for what draws in spite of all
        arguments = pytree.tree_map_only(torch.Tensor, torch.clone, dict(arguments))  # a network may change them
        with torch.enable_grad():
            outputs = self._program.run(arguments) if network is self._sharded else network(**arguments)
            backward(self._loss(outputs))
        leaves = [torch.as_tensor(x) for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor | float | int)]
        parameters = dict(network.named_parameters())
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in parameters.items()}
        buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
        build = self._optimizer or _sgd
        build(list(parameters.values())).step()
        return {
            "outputs": {"output" if len(leaves) == 1 else f"output {i}": x.detach() for i, x in enumerate(leaves)},
            "gradients": grads,
            "buffers": buffers,
            "parameters": {name: parameter.detach() for name, parameter in parameters.items()},
        }

    def _layer(self, found: Found) -> str | None:
        """Returns the layer that differs first."""

        def bad(what: str) -> list[str]:
            return [name for name, difference in found[what].items() if not difference <= self._rtol]

        layer = None
        if not bad("state"):
            with self._left_as_it_was():
                _switch(self._sharded, self._owners)
                truth = self._record(self._plain(), self._arguments[0])
                exact = (
                    self._record(self._plain().double(), _lengthened(self._arguments[0])) if self._is_short else None
                )
                trace = Trace(self._sharded, self._program, truth, exact)
                backward(self._loss(trace.run(self._arguments[1], forward := self._gaps())))
                layer = trace.first([forward, trace.gradients(self._gaps())], self._settled, self._rtol)
        # backward goes from the last layer to the first
        names = [*bad("state"), *reversed(bad("gradients")), *bad("buffers"), *bad("parameters")]
        return layer or next((name.rpartition(".")[0] or name for name in names), None)

    def _record(self, plain: nn.Module, arguments: Mapping[str, Any]) -> LayerRecorder:
        """Returns all tensors of the uncut network, with their gradients."""
        recorder = LayerRecorder(plain, self._traced)
        backward(self._loss(recorder.run(*[arguments.get(name) for name in recorder.inputs])))
        return recorder

    @contextmanager
    def _left_as_it_was(self) -> Iterator[None]:
        """Puts everything back at the end: tensors, gradients, modes, dropout, random numbers."""
        sharded = self._sharded
        tensors = {tensor: tensor.detach().clone() for tensor in (*sharded.parameters(), *sharded.buffers())}
        grads = [(parameter, parameter.grad) for parameter in sharded.parameters()]
        for parameter in sharded.parameters():
            parameter.grad = None
        settings = [(module, {k: v for k, v in vars(module).items() if k in SWITCHES}) for module in sharded.modules()]
        passes = sharded._dropout_stream.passes
        devices = {device for device in (self._device, _device(self._model)) if device.type == "cuda"}
        try:
            with torch.random.fork_rng(devices=list(devices)), without_hooks(sharded.parameters()):
                yield
        finally:
            with torch.no_grad():
                for tensor, value in tensors.items():
                    tensor.copy_(value)
            for parameter, grad in grads:
                parameter.grad = grad
            for module, values in settings:
                vars(module).update(values)
            sharded._dropout_stream.passes = passes

    def _gaps(self) -> Differences:
        return Differences(self._rtol, self._eps)

    def _settled(self, differences: Differences) -> dict[str, float]:
        return differences.settle(self._sharded.shard_group, self._device)

    def _notes(self, ok: bool) -> Iterator[str]:
        if self._owners:
            paths = [repr(path or "the network itself") for path in sorted(self._owners)]
            names = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
            yield f"dropout functions were switched off by the evaluation mode of {names}"
        if self._eps > torch.finfo(torch.float64).eps and not self._is_short:
            yield "what rounding does alone is not known: the uncut network does not run in float64"
        elif not ok and self._is_short:
            yield "where a network has bends, short numbers may be the cause: be sure with copies in float64"


def _row(what: str, differences: Mapping[str, float]) -> ReportRow:
    where = max(differences, key=lambda name: differences[name], default="")
    worst = differences.get(where, 0.0)
    return ReportRow(what, len(differences), worst, where if worst else "")


def _weighted_sum(outputs: Any) -> torch.Tensor | None:
    """Returns the sum of all outputs, each element with a weight of its own; None if there is no gradient to take."""
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    total: torch.Tensor | None = None
    for leaf in leaves:
        wide = leaf.float() if leaf.dtype.itemsize < 4 else leaf
        weights = torch.cos(torch.arange(leaf.numel(), device=leaf.device, dtype=torch.float32)).view(leaf.shape)
        part = (wide * weights).sum()
        part = part.abs() if part.is_complex() else part
        total = part if total is None else total + part
    return total


def _switch(network: nn.Module, owners: set[str]) -> None:
    """Puts a network into training mode, without dropout."""
    network.train()
    for module in network.modules():
        if isinstance(module, Dropout):
            module.p = 0.0
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0
    for path in owners:
        network.get_submodule(path).training = False


@torch.no_grad()
def take_weights(model: nn.Module, sharded: Sharded) -> None:
    """Gives an uncut network the weights of the cut one; all ranks that have a share call it together."""
    own = _named(sharded)
    for name, tensor in _named(model).items():
        if name in own:
            tensor.copy_(_full(own[name], own[name]))


@contextmanager
def in_float64(sharded: Sharded) -> Iterator[None]:
    """Has a cut network compute in float64 inside, and gives it back its own numbers after."""
    kept = [(p, p.data, p.grad) for p in sharded.parameters()]
    buffers = [(held, dict(held)) for held in map(buffer_table, sharded.modules())]
    for parameter in sharded.parameters():
        parameter.grad = None
    try:
        sharded.double()
        yield
    finally:
        for parameter, data, grad in kept:
            parameter.data, parameter.grad = data, None
            parameter.grad = grad
        for held, values in buffers:
            held.update(values)


def _require_same_form(model: nn.Module, sharded: Sharded) -> None:
    mine = {name: tuple(_shape(tensor)) for name, tensor in _named(sharded).items()}
    truth = {name: tuple(tensor.shape) for name, tensor in _named(model).items()}
    for name in (*truth, *mine):
        if mine.get(name) != truth.get(name):
            raise MismatchError(
                f"a cut network was to be compared with an uncut one, but {name!r} is {mine.get(name, 'absent')} in "
                f"the cut one and {truth.get(name, 'absent')} in the other. Give the network that was cut."
            )


def _shape(tensor: torch.Tensor) -> torch.Size:
    placement = local_shard_of(tensor)
    return tensor.shape if placement is None else placement.shape


def _full(owner: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns the full tensor of which `value` is a part as `owner` is; all ranks call it together."""
    placement = local_shard_of(owner)
    return value if placement is None else placement.full(value)


def _sgd(parameters: list[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=LR)


def _lengthened(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments in float64."""
    return {k: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for k, x in arguments.items()}


def _named(network: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}


def _bound(sharded: Sharded, example: Example) -> dict[str, Any]:
    if isinstance(example, Mapping):
        return dict(sharded._signature.bind(**example).arguments)
    return dict(sharded._signature.bind(*(example if isinstance(example, tuple | list) else (example,))).arguments)


def _moved(arguments: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {key: x.detach().to(device) if isinstance(x, torch.Tensor) else x for key, x in arguments.items()}


def _device(network: nn.Module) -> torch.device:
    return next((x.device for x in (*network.parameters(), *network.buffers())), torch.device("cpu"))
