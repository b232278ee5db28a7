"""Compares a cut network with the uncut one: outputs, gradients, buffers, parameters after a step."""

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
from evenly._torch.compiler import uncompiled
from evenly._torch.modules import Dropout, buffer_table
from evenly.errors import MismatchError, SpecError
from evenly.graph import Example
from evenly.shards.parts.local_shards import local_shard_of
from evenly.shards.run.program import Program
from evenly.shards.run.sharded import Sharded, sharded_of
from evenly.shards.verification.layer_trace import LayerComparison, LayerRecorder, backward, dropout_modes
from evenly.shards.verification.tolerance import Differences, noise_of

RTOL = {8: 1e-9, 4: 1e-4}  # by bytes of a number; 2e-2 for smaller ones
LR = 1e-2
RESTORED_ATTRIBUTES = ("training", "p", "dropout")  # of modules: a verification changes them

Loss = Callable[[Any], torch.Tensor | None]  # of the network's outputs, in the form that its forward gives them
BuildOptimizer = Callable[[list[nn.Parameter]], Optimizer]
DifferencesByKind = dict[str, dict[str, float]]  # kind -> name -> difference
StepTensors = dict[str, dict[str, torch.Tensor]]  # kind -> name -> tensor


@dataclass(frozen=True)
class ReportRow:
    """The worst difference of one kind of tensor, and the name of the tensor."""

    what: str
    count: int
    worst: float
    where: str


@dataclass(frozen=True)
class Report:
    """The result of `verify`: whether all tensors agree, the worst relative difference, the first differing layer."""

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
    optimizer: BuildOptimizer | None = None,
    rtol: float | None = None,
) -> Report:
    """Compares a cut network with the uncut one: outputs, every gradient and buffer, parameters after a step.

    Both run in training mode with dropout off. All ranks call it together and get the same report. Both networks, their
    gradients and torch's random states are restored.

    Args:
        model: the uncut network with the same weights; a copy of it is used.
        sharded: the cut one.
        example: a batch as forward takes it: a tensor, a tuple of arguments, or a dict of named arguments.
        loss: maps the outputs to a number; by default a weighted sum of all of them.
        optimizer: maps a list of parameters to the optimizer of the step; by default plain SGD.
        rtol: the largest relative difference that passes; by default 1e-9 for float64, 1e-4 for float32, 2e-2 for
            smaller types.
    """
    report, model, sharded = None, uncompiled(model), sharded_of(uncompiled(sharded))
    with sharded.shard_group.reporting():
        program = sharded._program_for_both_modes(_bind(sharded, example))
        if program is not None:
            comparison = _Comparison(model, sharded, program, example, loss or _weighted_sum, optimizer, rtol)
            report = comparison.report()
    if report is not None and not sharded._has_idle_ranks:
        return report
    received = sharded._all_ranks_group.broadcast_object(None if report is None else asdict(report), sharded._source)
    return Report(
        **{**received, "rows": tuple(ReportRow(**row) for row in received["rows"]), "notes": tuple(received["notes"])}
    )


class _Comparison:
    """One comparison of a cut network with the uncut one."""

    def __init__(
        self,
        model: nn.Module,
        sharded: Sharded,
        program: Program,
        example: Example,
        loss: Loss,
        optimizer: BuildOptimizer | None,
        rtol: float | None,
    ) -> None:
        _require_same_form(model, sharded)
        self._model = model
        self._sharded = sharded
        self._program = program
        self._loss, self._optimizer = loss, optimizer
        self._device = _device(sharded)
        bound = _bind(sharded, example)
        self._arguments = _on_device(bound, _device(model)), _on_device(bound, self._device)
        floats = [x for x in (*model.parameters(), *model.buffers()) if x.is_floating_point()]
        self._eps = max((torch.finfo(x.dtype).eps for x in floats), default=2.0**-52)
        shortest = min((x.dtype.itemsize for x in floats), default=8)
        self._is_below_float64 = shortest < 8
        self._rtol = RTOL.get(shortest, 2e-2) if rtol is None else rtol
        self._traced = program.traced
        self._dropout_owners, always = dropout_modes(self._traced)
        if always:
            raise SpecError(
                f"verify was called, but the network's dropout at {always[0]!r} is on in every mode, so two runs never "
                "agree. Let it follow the module's mode (training=self.training), or build it with p=0."
            )
        if self._traced.evaluation is not None:  # without dropout it runs other operations
            with self._state_restored():
                sharded.train()
                for path in self._dropout_owners:
                    sharded.get_submodule(path).training = False
                self._program = sharded._program_in_current_modes(bound)
                self._traced = self._program.traced

    def report(self) -> Report:
        """Runs the comparison and returns its report."""
        with self._state_restored():
            differences_by_kind = self._compare()
        rows = tuple(_row(kind, differences) for kind, differences in differences_by_kind.items())
        worst = max((row.worst for row in rows), default=0.0)
        layer = None if worst <= self._rtol else self._layer(differences_by_kind)
        return Report(worst <= self._rtol, worst, self._rtol, layer, rows, tuple(self._notes(worst <= self._rtol)))

    def _compare(self) -> DifferencesByKind:
        uncut, local_tensors = self._uncut_copy(), _named_tensors(self._sharded)
        differences = self._new_differences()
        for name, tensor in _named_tensors(uncut).items():
            differences.add(name, _full(local_tensors[name], local_tensors[name]), tensor)
        differences_by_kind = {"state": self._reduced(differences)}
        uncut_results, exact = self._run_step(uncut, self._arguments[0]), self._run_step_in_float64()
        _train_without_dropout(self._sharded, self._dropout_owners)
        cut_results = self._run_step(self._sharded, self._arguments[1])
        noise = noise_of(list(uncut_results["gradients"].values()), self._eps)
        for kind, tensors in uncut_results.items():
            differences = self._new_differences()
            for name, tensor in tensors.items():
                value = (
                    cut_results[kind][name]
                    if kind == "outputs"
                    else _full(local_tensors[name], cut_results[kind][name])
                )
                if kind == "parameters" and self._optimizer is not None:  # it may amplify rounding noise
                    value = torch.where(
                        uncut_results["gradients"][name].abs() <= noise, tensor, value.to(tensor.device)
                    )
                differences.add(name, value, tensor, exact[kind].get(name) if exact else None)
            differences_by_kind[kind] = self._reduced(differences)
        return differences_by_kind

    def _uncut_copy(self) -> nn.Module:
        """Returns a copy of the uncut network, ready to run."""
        uncut = copy.deepcopy(self._model)
        uncut.zero_grad()
        _train_without_dropout(uncut, self._dropout_owners)
        return uncut

    def _run_step_in_float64(self) -> StepTensors | None:
        """Returns the tensors of the uncut network in float64; None if it is in float64 already, or cannot be."""
        if not self._is_below_float64:
            return None
        try:
            return self._run_step(self._uncut_copy().double(), _arguments_in_float64(self._arguments[0]))
        except (RuntimeError, TypeError, ValueError):  # a network may require its dtype
            self._is_below_float64 = False
            return None

    def _run_step(self, network: nn.Module, arguments: Mapping[str, object]) -> StepTensors:
        """Returns the outputs, the gradients, the buffers and the parameters after a step."""
        torch.manual_seed(0)  # for random numbers that are still drawn
        arguments = pytree.tree_map_only(
            torch.Tensor, torch.clone, dict(arguments)
        )  # a network may change them in place
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

    def _layer(self, differences_by_kind: DifferencesByKind) -> str | None:
        """Returns the layer that differs first."""

        def differing(kind: str) -> list[str]:
            return [name for name, difference in differences_by_kind[kind].items() if not difference <= self._rtol]

        layer = None
        if not differing("state"):
            with self._state_restored():
                _train_without_dropout(self._sharded, self._dropout_owners)
                truth = self._record(self._uncut_copy(), self._arguments[0])
                exact = (
                    self._record(self._uncut_copy().double(), _arguments_in_float64(self._arguments[0]))
                    if self._is_below_float64
                    else None
                )
                layers = LayerComparison(self._sharded, self._program, truth, exact)
                backward(self._loss(layers.run(self._arguments[1], forward := self._new_differences())))
                layer = layers.first([forward, layers.gradients(self._new_differences())], self._reduced, self._rtol)
        # backward runs from the last layer to the first
        names = [
            *differing("state"),
            *reversed(differing("gradients")),
            *differing("buffers"),
            *differing("parameters"),
        ]
        return layer or next((name.rpartition(".")[0] or name for name in names), None)

    def _record(self, uncut: nn.Module, arguments: Mapping[str, object]) -> LayerRecorder:
        """Returns all tensors of the uncut network, with their gradients."""
        recorder = LayerRecorder(uncut, self._traced)
        backward(self._loss(recorder.run(*[arguments.get(name) for name in recorder.inputs])))
        return recorder

    @contextmanager
    def _state_restored(self) -> Iterator[None]:
        """Restores tensors, gradients, modes, dropout and random states at the end of the block."""
        sharded = self._sharded
        tensors = {tensor: tensor.detach().clone() for tensor in (*sharded.parameters(), *sharded.buffers())}
        grads = [(parameter, parameter.grad) for parameter in sharded.parameters()]
        for parameter in sharded.parameters():
            parameter.grad = None
        settings = [
            (module, {k: v for k, v in vars(module).items() if k in RESTORED_ATTRIBUTES})
            for module in sharded.modules()
        ]
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

    def _new_differences(self) -> Differences:
        return Differences(self._rtol, self._eps)

    def _reduced(self, differences: Differences) -> dict[str, float]:
        return differences.reduce(self._sharded.shard_group, self._device)

    def _notes(self, ok: bool) -> Iterator[str]:
        if self._dropout_owners:
            paths = [repr(path or "the network itself") for path in sorted(self._dropout_owners)]
            names = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
            yield f"dropout functions were switched off by the evaluation mode of {names}"
        if self._eps > torch.finfo(torch.float64).eps and not self._is_below_float64:
            yield "the rounding error of the uncut network is not known: it does not run in float64"
        elif not ok and self._is_below_float64:
            yield "rounding may be the cause at kinks such as that of ReLU: verify copies in float64 to be sure"


def _row(kind: str, differences: Mapping[str, float]) -> ReportRow:
    where = max(differences, key=lambda name: differences[name], default="")
    worst = differences.get(where, 0.0)
    return ReportRow(kind, len(differences), worst, where if worst else "")


def _weighted_sum(outputs: object) -> torch.Tensor | None:
    """Returns the sum of all outputs, each element with its own weight; None if no output requires a gradient."""
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    total: torch.Tensor | None = None
    for leaf in leaves:
        wide = leaf.float() if leaf.dtype.itemsize < 4 else leaf
        weights = torch.cos(torch.arange(leaf.numel(), device=leaf.device, dtype=torch.float32)).view(leaf.shape)
        part = (wide * weights).sum()
        part = part.abs() if part.is_complex() else part
        total = part if total is None else total + part
    return total


def _train_without_dropout(network: nn.Module, owners: set[str]) -> None:
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
    """Copies the weights of a cut network to an uncut one; all ranks that have a share call it together."""
    local_tensors = _named_tensors(sharded)
    for name, tensor in _named_tensors(model).items():
        if name in local_tensors:
            tensor.copy_(_full(local_tensors[name], local_tensors[name]))


@contextmanager
def in_float64(sharded: Sharded) -> Iterator[None]:
    """Makes a cut network compute in float64 inside the block, and restores its values after it."""
    saved = [(p, p.data, p.grad) for p in sharded.parameters()]
    buffers = [(table, dict(table)) for table in map(buffer_table, sharded.modules())]
    for parameter in sharded.parameters():
        parameter.grad = None
    try:
        sharded.double()
        yield
    finally:
        for parameter, data, grad in saved:
            parameter.data, parameter.grad = data, None
            parameter.grad = grad
        for table, values in buffers:
            table.update(values)


def _require_same_form(model: nn.Module, sharded: Sharded) -> None:
    cut_shapes = {name: tuple(_shape(tensor)) for name, tensor in _named_tensors(sharded).items()}
    uncut_shapes = {name: tuple(tensor.shape) for name, tensor in _named_tensors(model).items()}
    for name in (*uncut_shapes, *cut_shapes):
        if cut_shapes.get(name) != uncut_shapes.get(name):
            raise MismatchError(
                f"verify was called, but {name!r} is {cut_shapes.get(name, 'absent')} in the cut network and "
                f"{uncut_shapes.get(name, 'absent')} in the uncut one. Give the network that was cut."
            )


def _shape(tensor: torch.Tensor) -> torch.Size:
    local_shard = local_shard_of(tensor)
    return tensor.shape if local_shard is None else local_shard.shape


def _full(owner: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns the full tensor of `value`, which is cut as `owner` is; all ranks call it together."""
    local_shard = local_shard_of(owner)
    return value if local_shard is None else local_shard.full(value)


def _sgd(parameters: list[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=LR)


def _arguments_in_float64(arguments: Mapping[str, object]) -> dict[str, object]:
    """Returns the arguments in float64."""
    return {k: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for k, x in arguments.items()}


def _named_tensors(network: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}


def _bind(sharded: Sharded, example: Example) -> dict[str, object]:
    if isinstance(example, Mapping):
        return dict(sharded._signature.bind(**example).arguments)
    return dict(sharded._signature.bind(*(example if isinstance(example, tuple | list) else (example,))).arguments)


def _on_device(arguments: Mapping[str, object], device: torch.device) -> dict[str, object]:
    return {key: x.detach().to(device) if isinstance(x, torch.Tensor) else x for key, x in arguments.items()}


def _device(network: nn.Module) -> torch.device:
    return next((x.device for x in (*network.parameters(), *network.buffers())), torch.device("cpu"))
