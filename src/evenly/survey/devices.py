"""Times one device with one network: a step against samples, and each form of layer against its width."""

import copy
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import mean
from typing import Any, TypeGuard

import psutil
import torch
from torch import fx, nn

from evenly._torch import pytree
from evenly.errors import SpecError
from evenly.graph import Traced
from evenly.spec import Curve, Graph, Layer, LayerCurves, Tensor
from evenly.spec.plan import counted
from evenly.survey.stopwatch import ROW_S, Stopwatch, interquartile_mean, relative_spread

PARTS = (1.0, 0.25, 0.5, 0.75, 0.125)  # fractions of a layer, the most informative first
BATCHES = (1 / 32, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)  # fractions of the batch, for a whole step
ENOUGH_SIZES = 3  # that make a curve
SAFE = 0.75  # fraction of the budget that is planned, so that slightly slower work still fits
PATIENCE = 1.5  # times the budget that a slow device may take for enough sizes
Tell = Callable[[str], None]


class DeviceSurvey:
    """Times a network on one device, within a budget of seconds; what does not fit is estimated."""

    def __init__(self, traced: Traced, device: torch.device, *, budget_s: float, tell: Tell = lambda _: None) -> None:
        self._traced = traced
        self._device = device
        self._tell = tell
        self._graph = traced.graph
        self._batch = max(1, traced.graph.batch_size)
        self._budget_s = budget_s
        self._few, self._most = min(2, self._batch), self._batch  # samples; `_most` is what fits in memory
        self._saved_bytes: dict[int, int] = {}  # bytes that autograd saves for a batch, by its samples
        self._began = 0.0
        self._watch = Stopwatch(device, enough_s=min(0.5, budget_s / 60))
        self.spread: float | None = None

    def step(self) -> Curve:
        """Returns the seconds of a training step against samples."""
        model = copy.deepcopy(self._traced.model).to(self._device).train()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0, momentum=0.9)
        self._few = few = self._smallest_batch(model, optimizer)

        def timed(samples: int) -> list[float]:
            return self._watch.readings(functools.partial(train_step, model, optimizer, self._inputs(samples)))

        self._began = began = time.perf_counter()
        first_readings = timed(few)
        ladder = self._affordable_batches(interquartile_mean(first_readings) / few)
        sizes, timings = sorted({few, *ladder, self._batch}), {few: first_readings}
        while True:  # in rounds, so that a short disturbance does not hit one size alone
            for size in [size for size in sizes if size not in timings] or sizes:
                enough = all(count in timings for count in ladder[:ENOUGH_SIZES])  # else a slow device gets more time
                until = began + (0.5 if enough else PATIENCE) * self._budget_s
                if time.perf_counter() + _expected(timings, size) > until:
                    return self._curve(timings)
                self._tell(f"a step with {size} samples")
                try:
                    timings.setdefault(size, []).extend(timed(size))
                except torch.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    self._most = max(few, size - 1)
                    ladder, sizes = ([count for count in batches if count <= self._most] for batches in (ladder, sizes))
                    timings = {
                        count: readings for count, readings in timings.items() if count <= self._most and readings
                    }
                    break

    def _smallest_batch(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Returns the smallest batch to time: one sample if two take long and the network accepts one, else two.

        It also makes the first steps, which are slower than all others.
        """
        few = self._few
        forward = functools.partial(require_any_batch, model, self._inputs(few), few, self._batch)
        seconds = 0.0
        if few != self._batch:
            with self._record_saved_bytes(model, few):
                seconds = self._watch.once(forward)
        if seconds > self._budget_s / 16 and self._device.type != "cpu":  # the first call may have loaded libraries
            seconds = self._watch.once(forward)
        if seconds > self._budget_s / 16 and self._can_step_with_one(model, optimizer):
            return 1
        require_a_step(model, optimizer, self._inputs(few), few)
        return few

    def _can_step_with_one(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Makes a step with one sample, if possible: normalization over a single value raises or gives NaN."""
        try:
            require_a_step(model, optimizer, self._inputs(1), 1)
        except (SpecError, torch.OutOfMemoryError):  # another cause raises again with more samples
            return False
        return True

    def _affordable_batches(self, sample_s: float) -> list[int]:
        """Returns the batches to time, small ones first, so that the budget allows a few of them.

        At 0.3 s a sample, a batch of 256 does not fit into a budget of 4 s; batches of 1, 2 and 4 show the speed of
        such a device as well.
        """
        steps = ([round(self._few * growth**power) for power in range(9)] for growth in (4, 2, 1.5))
        ladders = [self._sizes(), *(sorted(set(sizes)) for sizes in steps)]
        fit = (ladder for ladder in ladders if sum(ladder[:ENOUGH_SIZES]) * sample_s <= SAFE * self._budget_s)
        return [size for size in next(fit, ladders[-1]) if size <= self._most] or self._sizes()

    def _curve(self, readings_by_size: dict[int, list[float]]) -> Curve:
        repeated = [readings for readings in readings_by_size.values() if len(readings) > 1]
        self.spread = relative_spread(repeated[-1]) if repeated else None  # of the largest repeated batch
        seconds = non_decreasing([max(1e-9, interquartile_mean(readings)) for readings in readings_by_size.values()])
        return Curve(sizes=tuple(readings_by_size), seconds=tuple(seconds))

    def layers(self, step: Curve) -> dict[str, LayerCurves]:
        """Returns the curves of every form of convolution and linear layer that the budget allows to time."""
        forms = dict(self._forms())
        left_s = self._budget_s - (time.perf_counter() - self._began)  # less if the steps took longer
        deadline = time.perf_counter() + min(self._budget_s / 2, max(self._budget_s / 4, left_s))
        samples = self._probe_batch(step)
        scale = step.at(self._batch) / step.at(samples)
        enough_s, row_s = self._budget_s / 4 / max(1, 13 * len(forms)), min(ROW_S, self._budget_s / 400)
        watch = Stopwatch(self._device, enough_s=enough_s, most=7, row_s=row_s)
        probes = {
            form: Probe(node, layer, self._graph.tensors, samples, self._device)
            for form, (node, layer) in forms.items()
        }
        seconds_by_form: dict[str, dict[str, dict[int, float]]] = {form: {} for form in forms}
        for part in PARTS:
            for form, probe in probes.items():
                if time.perf_counter() > deadline:
                    continue
                self._tell(f"{part:.0%} of {form}")
                for mode, size, work in probe.timed_calls(part):
                    seconds_by_form[form].setdefault(mode, {})[size] = watch.read(work) * scale
        return {
            form: _curves(seconds_by_form[form], probe.sizes) for form, probe in probes.items() if seconds_by_form[form]
        }

    def free_bytes(self, ranks_here: int) -> int:
        """Returns the memory that this rank may use of a device shared by `ranks_here`; the network's own memory counts
        as free."""
        if self._device.type == "cuda":
            cached_bytes = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
            model_bytes = sum(
                p.numel() * p.element_size() for p in self._traced.model.parameters() if p.device.type == "cuda"
            )
            return (int(torch.cuda.mem_get_info(self._device)[0]) + cached_bytes + model_bytes) // max(1, ranks_here)
        return int(psutil.virtual_memory().available) // max(1, ranks_here)

    def sample_bytes(self) -> int:
        """Returns the bytes that autograd saves for each sample, from two batches of different size."""
        model = copy.deepcopy(self._traced.model).to(self._device).train()
        few, many = 2, 3 if self._few < min(2, self._batch) else 4  # not one sample: its memory format may differ
        for size in {few, many} - self._saved_bytes.keys():
            with self._record_saved_bytes(model, size):
                model(**self._inputs(size))
        return max(0, self._saved_bytes[many] - self._saved_bytes[few]) // (many - few)

    @contextmanager
    def _record_saved_bytes(self, model: nn.Module, samples: int) -> Iterator[None]:
        """Records the bytes that autograd saves in a forward with `samples`, parameters and buffers left out."""
        bytes_by_pointer: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            bytes_by_pointer[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        model_storages = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            yield
        self._saved_bytes[samples] = sum(
            size for pointer, size in bytes_by_pointer.items() if pointer not in model_storages
        )

    def _inputs(self, samples: int) -> dict[str, torch.Tensor]:
        return inputs_of(self._graph, samples, self._device)

    def _sizes(self) -> list[int]:
        """Returns the batches to try, small ones first."""
        sizes = {max(self._few, round(self._batch * part)) for part in BATCHES}
        return sorted(size for size in sizes if size <= self._most)

    def _probe_batch(self, step: Curve) -> int:
        """Returns the samples with which layers are timed: fewer on a slow device, so that all parts get timed."""
        limit_s = self._budget_s / 40
        return max((size for size in self._sizes() if step.at(size) <= limit_s), default=min(2, self._batch))

    def _forms(self) -> Iterator[tuple[str, tuple[fx.Node, Layer]]]:
        nodes = {node.name: node for node in self._traced.program.graph.nodes}
        for layer in self._graph.layers:
            if layer.is_measurable:
                yield self._graph.form_of(layer), (nodes[layer.name], layer)


def _expected(readings_by_size: dict[int, list[float]], size: int) -> float:
    """Returns how long a step of this size should take, by the steps so far."""
    nearest = size if size in readings_by_size else max(readings_by_size)
    return readings_by_size[nearest][-1] * size / nearest


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, torch.Tensor]) -> None:
    """Makes one step on these inputs, with a loss that uses every output."""
    loss_of(model(**inputs)).backward()
    optimizer.step()
    optimizer.zero_grad()


def loss_of(result: object) -> torch.Tensor:
    """Returns a loss that uses every output."""
    outputs = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not outputs:
        raise SpecError("a training step was to be made, but no output has a gradient. Return one that has.")
    return torch.stack([x.float().square().mean() for x in outputs]).sum()


def inputs_of(graph: Graph, samples: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Returns the inputs of forward, like the example but with `samples` samples; the same on every rank."""
    inputs, generator = {}, torch.Generator().manual_seed(0)
    for layer in graph.layers:
        if layer.op == "input" and layer.outputs:
            tensor = layer.outputs[0]
            shape = (samples, *tensor.shape[1:]) if tensor.shape[:1] == (graph.batch_size,) else tensor.shape
            inputs[layer.where] = _filled(shape, getattr(torch, tensor.dtype), generator).to(device)
    return inputs


class Probe:
    """One convolution or linear layer by itself, of any width."""

    def __init__(
        self, node: fx.Node, layer: Layer, tensors: Mapping[str, Tensor], samples: int, device: torch.device
    ) -> None:
        self._node = node
        self._layer = layer
        self._device = device
        input_tensor, weight_tensor = (tensors[name] for name in layer.inputs[:2])
        self._input = (samples, *input_tensor.shape[1:])
        self._weight, self._dtype = tuple(weight_tensor.shape), getattr(torch, weight_tensor.dtype)
        self._has_grad = input_tensor.has_grad
        self._batch = input_tensor.shape[0]
        transposed = bool(layer.options.get("transposed"))
        self._out, self._in = (1, 0) if transposed else (0, 1)
        self._channel = 1 if layer.op == "conv" else len(input_tensor.shape) - 1

    def timed_calls(self, part: float) -> Iterator[tuple[str, int, Callable[[], None]]]:
        """Yields what to time for this fraction of the layer: of its outputs, its inputs or the samples."""
        if part == 1.0:
            yield "whole", 0, self._forward_backward(self._input, self._weight)
            return
        outputs, inputs = (max(1, round(self._weight[dim] * part)) for dim in (self._out, self._in))
        if self._layer.options.get("groups", 1) == 1:
            yield "outputs", outputs, self._forward_backward(self._input, _with(self._weight, self._out, outputs))
            narrow = _with(self._input, self._channel, inputs)
            yield "inputs", inputs, self._forward_backward(narrow, _with(self._weight, self._in, inputs))
        samples = max(1, round(self._input[0] * part))
        full_samples = max(1, round(self._batch * samples / self._input[0]))
        yield "samples", full_samples, self._forward_backward((samples, *self._input[1:]), self._weight)

    @property
    def sizes(self) -> dict[str, int]:
        """The outputs, inputs and samples of the whole layer."""
        return {"outputs": self._weight[self._out], "inputs": self._weight[self._in], "samples": self._batch}

    def _forward_backward(self, input_shape: tuple[int, ...], weight_shape: tuple[int, ...]) -> Callable[[], None]:
        x = _filled(input_shape, self._dtype).to(self._device).requires_grad_(self._has_grad)
        weight = _filled(weight_shape, self._dtype).to(self._device).requires_grad_()
        target: Any = self._node.target
        settings, keywords = self._node.args[2:], self._node.kwargs
        differentiated = [x, weight] if self._has_grad else [weight]

        def work() -> None:
            y = target(x, weight, *settings, **keywords)
            torch.autograd.grad(y, differentiated, y.detach())

        return work


def require_training(traced: Traced) -> None:
    """Raises `SpecError` for a network that cannot make a training step."""
    name = type(traced.model).__name__
    if not any(parameter.requires_grad for parameter in traced.model.parameters()):
        raise SpecError(f"{name} was to be measured in training, but has no parameter that is trained. Give it one.")
    if traced.graph.batch_size < 1:
        raise SpecError(f"{name} was to be measured with an example of no samples. Give at least 1, in its first dim.")
    results = _results(traced.graph)  # those that are plain tensors
    if results and not any(tensor.has_grad for tensor in results):
        raise SpecError(f"{name} was to be measured in training, but no output has a gradient. Return one that has.")


def require_a_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, torch.Tensor], samples: int
) -> None:
    """Makes a training step; raises `SpecError` if the network cannot."""
    request = (
        f"{type(model).__name__} was to be measured in training with {counted(samples, 'sample')} of random numbers"
    )
    try:
        loss_of(model(**inputs)).backward()
        is_finite = all(bool(p.grad.isfinite().all()) for p in model.parameters() if _is_dense(p.grad))
        if is_finite:
            optimizer.step()
    except (torch.OutOfMemoryError, SpecError):
        raise
    except Exception as error:  # whatever the user's code raises
        raise SpecError(
            f"{request}, but raised {type(error).__name__}: {(str(error).splitlines() or [''])[0].rstrip('.')}. Give a "
            "network and a batch that train by themselves."
        ) from error
    finally:
        optimizer.zero_grad()
    if not is_finite:
        raise SpecError(
            f"{request} between 0 and 1, but its gradients became NaN or infinite. Give a network that is finite there."
        )


def _is_dense(gradient: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return gradient is not None and gradient.layout is torch.strided


def require_any_batch(model: nn.Module, inputs: dict[str, torch.Tensor], samples: int, batch: int) -> None:
    """Raises `SpecError` for a network that accepts only the example's number of samples."""
    try:
        model(**inputs)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        raise SpecError(
            f"{type(model).__name__} was to be measured with {samples} samples of random numbers instead of the "
            f"example's {batch}, but raised {type(error).__name__}: {(str(error).splitlines() or [''])[0]}. The first "
            "size of an example is its samples, and a network must take any number of them."
        ) from error


def _results(graph: Graph) -> list[Tensor]:
    """Returns the tensors that forward returns."""
    tensors = graph.tensors
    names = [name for layer in graph.layers if layer.kind == "output" for name in layer.inputs]
    return [tensors[name] for name in names if name in tensors]


def non_decreasing(values: Sequence[float]) -> list[float]:
    """Returns the nearest non-decreasing values: more samples take less time only by chance.

    >>> non_decreasing([1.0, 3.0, 2.0, 4.0])
    [1.0, 2.5, 2.5, 4.0]
    """
    groups: list[list[float]] = []
    for value in values:
        groups.append([value])
        while len(groups) > 1 and mean(groups[-2]) > mean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    return [mean(group) for group in groups for _ in group]


def _curves(seconds_by_mode: dict[str, dict[int, float]], sizes: dict[str, int]) -> LayerCurves:
    """Returns the curves through the readings; each ends with the whole layer."""
    whole = seconds_by_mode["whole"][0]
    points_by_mode = {mode: {**seconds_by_mode.get(mode, {}), size: whole} for mode, size in sizes.items()}
    sorted_points = {mode: dict(sorted(points.items())) for mode, points in points_by_mode.items()}
    curves = {
        mode: Curve(sizes=tuple(points), seconds=tuple(points.values())) for mode, points in sorted_points.items()
    }
    return LayerCurves(**curves)


def _with(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _filled(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator | None = None) -> torch.Tensor:
    """Returns random numbers, or zeros for integers: an index that every embedding has."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.rand(shape, dtype=dtype, generator=generator)  # not negative: the network may use logarithms
    return torch.zeros(shape, dtype=dtype)
