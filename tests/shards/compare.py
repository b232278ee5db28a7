"""One device is the truth: the same network trained plainly, and cut over ranks that are threads."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from evenly.comm import RankGroup
from evenly.graph import Example, Traced, trace_module
from evenly.layouts import TransferCosts, lay_out
from evenly.shards import Sharded, join_shards, local_shard_of
from evenly.spec.layout import Layout
from tests.ranks import run_ranks

Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
Batch = dict[str, Tensor] | tuple[Tensor, ...]
SGD: Optimizer = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
FLOOR = 1e-2  # of the network's largest gradient or parameter: below it, a tensor's own size is no measure


@dataclass
class History:
    """What a training run gave: outputs of each step and in evaluation, first gradients, and what is left behind."""

    outputs: list[list[Tensor]] = field(default_factory=list)
    inputs: list[Tensor | None] = field(default_factory=list)  # gradients of the inputs in the first step
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)


def compare(
    build: Callable[[], nn.Module],
    example: Example,
    shares: Sequence[float],
    *,
    steps: int = 3,
    rates: TransferCosts | None = None,
    layer_shares: Mapping[str, Sequence[float]] | None = None,
    cut_batch: bool = False,
    modes: Mapping[str, Sequence[str]] | None = None,
    smaller: bool = True,
    optimizer: Optimizer = SGD,
    seed: int = 0,
    tolerance: float = 1e-9,
) -> Layout:
    """Returns the layout with which the network, cut over `shares`, was found to train as on one device.

    Args:
        build: gives the network; the generator is seeded before.
        example: the batch to train on; gradients of inputs that require them are compared too.
        shares: one share a rank.
        steps: optimizer steps; the last one is on a smaller batch.
        rates: what moving costs.
        layer_shares: shares of single layers.
        cut_batch: whether layers may be cut along the batch.
        modes: the modes that single operations may have.
        smaller: whether the network can take a smaller batch than the example's.
        optimizer: gives an optimizer for parameters.
        seed: of the network.
        tolerance: the largest difference, relative to a tensor's largest element.
    """
    torch.manual_seed(seed)
    model = build()
    traced = trace_module(model, example)
    layout = lay_out(traced.graph, shares, rates=rates, layer_shares=layer_shares, cut_batch=cut_batch, modes=modes)
    full = _batch(example)
    batches = [full] * (steps - 1) + [_smaller(full) if smaller else full]
    results = run_ranks(len(shares), _together, traced, layout, batches, optimizer, limit_s=200.0)
    truth = _train(model, batches, optimizer, whole=lambda _, tensor: tensor.detach().clone())
    for rank, found in enumerate(results):
        _require_equal(found, truth, f"rank {rank}: ", tolerance, holds_state=rank in layout.members)
    return layout


def _together(
    rank_group: RankGroup, traced: Traced, layout: Layout, batches: Sequence[Batch], optimizer: Optimizer
) -> History:
    model = join_shards(traced, layout, rank_group=rank_group, timeout_s=150.0)
    counts = partial(_require_prediction, model) if rank_group.rank in layout.members else None
    try:
        return _train(model, batches, optimizer, whole=_whole, counts=counts)
    except BaseException as error:
        model.shard_group.monitor.report(error)
        raise
    finally:
        model.close()


def _whole(parameter: Tensor, tensor: Tensor) -> Tensor:
    placement = local_shard_of(parameter)
    assert placement is not None, "a parameter or buffer of a cut network does not say where it lies"
    if placement.shard_group.size > len(placement.segments) or any(placement.segments):
        return placement.full(tensor)
    return tensor.detach().clone()  # of a rank without a share


def _train(
    model: nn.Module,
    batches: Sequence[Batch],
    optimizer: Optimizer,
    *,
    whole: Callable[[Tensor, Tensor], Tensor],
    counts: Callable[[], None] | None = None,
) -> History:
    history = History()
    descend = optimizer([*model.parameters(), torch.zeros(0)])  # some networks have no parameters
    model.train()
    for step, batch in enumerate(batches):
        descend.zero_grad()
        if isinstance(model, Sharded):
            model.traffic.clear()
        given = _own(batch)
        outputs = _call(model, given)
        loss = _loss(outputs)
        if loss.requires_grad:
            loss.backward()
        if counts is not None and batch is batches[0]:
            counts()
        if step == 0:
            history.inputs = [x.grad for x in pytree.tree_leaves(given)]
            history.gradients = {
                name: None if parameter.grad is None else whole(parameter, parameter.grad)
                for name, parameter in model.named_parameters()
            }
        descend.step()
        history.outputs.append([output.detach().clone() for output in outputs])
    model.eval()
    with torch.no_grad():
        history.outputs += [_call(model, _own(batch)) for batch in (batches[0], batches[-1])]
    held = [*model.named_parameters(), *model.named_buffers()]
    history.state = {name: whole(tensor, tensor) for name, tensor in held}
    return history


def _require_prediction(model: Sharded) -> None:
    counted = (model.traffic.messages, model.traffic.sent_bytes)
    predicted = (model.layout.messages, model.layout.traffic_bytes)
    assert counted == predicted, f"(messages, bytes) are {counted}, but {predicted} were predicted"


def _require_equal(found: History, truth: History, who: str, tolerance: float, *, holds_state: bool) -> None:
    assert len(found.outputs) == len(truth.outputs)
    for step, (ours, theirs) in enumerate(zip(found.outputs, truth.outputs, strict=True)):
        outputs = [{f"output {i} of step {step}": x for i, x in enumerate(given)} for given in (ours, theirs)]
        _require_close(*outputs, who, tolerance)
    if not holds_state:
        return
    inputs = [{f"gradient of input {i}": x for i, x in enumerate(history.inputs)} for history in (found, truth)]
    _require_close(*inputs, who, tolerance)
    _require_close(found.gradients, truth.gradients, f"{who}gradient of ", tolerance)
    _require_close(found.state, truth.state, f"{who}after the last step, ", tolerance)


def _require_close(
    found: Mapping[str, Tensor | None], truth: Mapping[str, Tensor | None], who: str, tolerance: float
) -> None:
    assert found.keys() == truth.keys(), f"{who}other names: {found.keys() ^ truth.keys()}"
    sizes = {name: _size(tensor) for name, tensor in truth.items() if tensor is not None}
    floor = FLOOR * max(sizes.values(), default=0.0)
    for name, theirs in truth.items():
        ours = found[name]
        assert (ours is None) == (theirs is None), f"{who}{name} is {ours}, but {theirs} on one device"
        if ours is None or theirs is None:
            continue
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), f"{who}{name}: {ours.shape}, {theirs.shape}"
        difference = _size(ours.double() - theirs.double())
        allowed = tolerance * max(sizes[name], floor)
        assert difference <= allowed, f"{who}{name} differs by {difference:.1e} from {sizes[name]:.1e}"


def _size(tensor: Tensor) -> float:
    return float(tensor.detach().double().abs().max()) if tensor.numel() else 0.0


def _loss(outputs: Sequence[Tensor]) -> Tensor:
    """Returns a fixed weighted sum of all outputs."""
    total = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        if output.is_floating_point():
            weights = torch.arange(output.numel(), dtype=output.dtype).mul_(0.7).cos_().view(output.shape)
            total = total + (output * weights).sum() / max(1, output.numel()) ** 0.5
    return total


def _call(model: nn.Module, batch: Batch) -> list[Tensor]:
    result = model(**batch) if isinstance(batch, dict) else model(*batch)
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def _batch(example: Example) -> Batch:
    if isinstance(example, Tensor):
        return (example,)
    return dict(example) if isinstance(example, Mapping) else tuple(example)


def _smaller(batch: Any) -> Any:
    """Returns the batch without its last sample."""
    return pytree.tree_map(lambda x: x.detach()[:-1].requires_grad_(x.requires_grad), batch)


def _own(batch: Any) -> Any:
    """Returns a copy that a network may change in place."""
    return pytree.tree_map(lambda x: x.detach().clone().requires_grad_(x.requires_grad), batch)
