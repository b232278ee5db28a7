"""What the GPU tests of sharding run on every rank, in processes of their own; ranks may sit on unlike devices."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import evenly
from evenly.comm import rank_group_of
from evenly.graph import trace_module
from evenly.layouts import lay_out
from evenly.shards import Sharded, full_state_dict, join_shards, local_shard_of, reshard
from evenly.spec import Layout
from tests.shards.grammar import sample
from tests.zoo import ZOO


def compare(devices: Sequence[str], shares: Sequence[float], cases: Sequence[Any], precision: str) -> list[list[Any]]:
    """Returns for each case how far the sharded network is from the truth in float64, beside the plain network.

    The plain network runs on a GPU and on the CPU, and the larger distance counts: where an activation is next to its
    kink, rounding alone decides on which side it lies. In short numbers each case is tried with two inputs.
    """
    dist.init_process_group("gloo")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = torch.device(devices[dist.get_rank()])
    rows = []
    for case in cases:
        tries = []
        for number in range(1 if precision == "double" else 2):
            model, example = _case(case, number)
            truth = _train(model, example, "double", torch.device("cpu"))
            plain = [_distance(_train(model, example, precision, torch.device(d)), truth) for d in (devices[0], "cpu")]
            kind = torch.float64 if precision == "double" else torch.float32
            local = tuple(x.to(device, kind if x.is_floating_point() else x.dtype) for x in example)
            ready = _copy(model).to(device, kind)
            sharded = evenly.shard(ready, local, shares=shares, cut_batch=bool(len(rows) % 2))
            ours = _train(sharded, example, precision, device)
            sharded.close()
            tries.append([_distance(ours, truth), max(plain)])
        rows.append([str(case), tries])
    dist.destroy_process_group()
    return rows


def _case(case: Any, number: int = 0) -> tuple[nn.Module, tuple[Tensor, ...]]:
    if isinstance(case, int):
        torch.manual_seed(case + 1000 * number)
        made = sample(case + 1000 * number, 3)
        return made.model, made.example
    torch.manual_seed(number)
    return ZOO[case].build(), ZOO[case].example()


def _copy(model: nn.Module) -> nn.Module:
    import copy

    return copy.deepcopy(model)


def _train(model: nn.Module, example: Sequence[Tensor], precision: str, device: torch.device) -> list[Tensor]:
    """Returns outputs, gradients and buffers of one step and the parameters after it, as float64 on the CPU."""
    kind = torch.float64 if precision == "double" else torch.float32
    if not isinstance(model, Sharded):
        model = _copy(model).to(device, kind)
    batch = [x.to(device, kind if x.is_floating_point() else x.dtype) for x in example]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9) if trained else None
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        outputs = [x for x in pytree.tree_leaves(model(*batch)) if isinstance(x, Tensor)]
        loss = sum(
            (x.float() if precision == "bf16" else x).mul(_ramp(x)).sum() for x in outputs if x.is_floating_point()
        )
    if loss.requires_grad:
        loss.backward()
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    if optimizer is not None:
        optimizer.step()
    named = [*model.parameters(), *model.buffers()]
    found = [_whole(p, g) for p, g in zip(model.parameters(), gradients, strict=True)]
    return [x.detach().double().cpu() for x in [*outputs, *found, *(_whole(x, x.detach()) for x in named)]]


def _ramp(x: Tensor) -> Tensor:
    kind = x.dtype if x.dtype.itemsize >= 4 else torch.float32
    return (
        torch.linspace(-1, 1, x.numel(), dtype=kind, device=x.device).view(x.shape) / x.shape[0]
        if x.ndim
        else x * 0 + 1
    )


def _whole(parameter: Tensor, value: Tensor) -> Tensor:
    placement = local_shard_of(parameter)
    return value if placement is None else placement.full(value)


def _distance(found: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """Returns the largest difference, each relative to the size of its tensor, or of the network's for tiny ones."""
    floor = 1e-3 * max(float(x.abs().max()) for x in truth if x.numel())
    pairs = zip(found, truth, strict=True)
    return max(float((a - b).abs().max()) / max(float(b.abs().max()), floor) for a, b in pairs if b.numel())


def check(devices: Sequence[str], shares: Sequence[float], cases: Sequence[Any]) -> list[list[Any]]:
    """Returns what `evenly.verify` says of each case."""
    dist.init_process_group("gloo")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = torch.device(devices[dist.get_rank()])
    told = []
    for case in cases:
        model, example = _case(case)
        model = model.float().to(device)
        local = tuple(x.to(device, torch.float32 if x.is_floating_point() else x.dtype) for x in example)
        sharded = evenly.shard(model, local, shares=shares)
        report = evenly.verify(model, sharded, local)
        told.append([report.ok, str(report)])
        sharded.close()
    dist.destroy_process_group()
    return told


def overhead(batch: int, rounds: int) -> dict[str, float]:
    """Returns the median step of a plain network and of the same network sharded over a group of one."""
    import statistics
    import time

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = ZOO["resnet50"].build().float().cuda()
    x = torch.randn(batch, 3, 64, 64, device="cuda")
    sharded = evenly.shard(model, x, shares=[1])
    seconds: dict[str, list[float]] = {"plain": [], "sharded": []}
    turns = [("plain", model), ("sharded", sharded)]
    for number in range(rounds):
        for name, module in turns if number % 2 else reversed(turns):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(5):
                module(x).sum().backward()
            torch.cuda.synchronize()
            seconds[name].append((time.perf_counter() - began) / 5)
    sharded.close()
    dist.destroy_process_group()
    return {name: statistics.median(values[2:]) for name, values in seconds.items()}


def moving(devices: Sequence[str], ways: Sequence[Sequence[float]], case: str) -> float:
    """Returns how far training with another split at every step is from plain training in float64."""
    dist.init_process_group("gloo")
    device = torch.device(devices[dist.get_rank()])
    model, example = _case(case)
    plain = _copy(model).double()
    ready = _copy(model).double().to(device)
    local = tuple(x.to(device, torch.float64 if x.is_floating_point() else x.dtype) for x in example)
    given = tuple(x.double() if x.is_floating_point() else x for x in example)
    sharded = evenly.shard(ready, local, shares=ways[0])
    graph = evenly.trace(ready, local)
    return _distance_after(plain, sharded, given, local, [lay_out(graph, shares) for shares in ways])


def recurrent_by_units(devices: Sequence[str], ways: Sequence[Sequence[float]], kind: str) -> float:
    """Returns how far a recurrent network whose units are cut anew at every step is from plain training in float64."""
    dist.init_process_group("gloo")
    device = torch.device(devices[dist.get_rank()])
    torch.manual_seed(0)
    plain = nn.Sequential(getattr(nn, kind)(6, 10, num_layers=2, bidirectional=True, batch_first=True)).double()
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    ready, local = _copy(plain).to(device), x.to(device)
    traced = trace_module(ready, local)
    layouts = [lay_out(traced.graph, shares, modes={"recurrent": ["units"]}) for shares in ways]
    sharded = join_shards(traced, layouts[0], rank_group=rank_group_of())
    sharded.to(device)  # calls flatten_parameters, which must leave the parts alone
    return _distance_after(plain, sharded, [x], [local], layouts)


def _distance_after(
    plain: nn.Module, sharded: Sharded, given: Sequence[Tensor], local: Sequence[Tensor], layouts: Sequence[Layout]
) -> float:
    """Returns how far both networks are apart after a step with each layout; closes the cut one and the group."""
    optimizers = [torch.optim.AdamW(network.parameters(), lr=1e-3) for network in (plain, sharded)]
    for layout in layouts:
        reshard(sharded, optimizers[1], layout)
        for network, optimizer, batch in ((plain, optimizers[0], given), (sharded, optimizers[1], local)):
            leaves = [x for x in pytree.tree_leaves(network(*batch)) if isinstance(x, Tensor) and x.requires_grad]
            sum(x.square().mean() for x in leaves).backward()
            optimizer.step()
            optimizer.zero_grad()
    full = full_state_dict(sharded, device="cpu")["model"]
    far = max(float((full[name].cpu() - p).abs().max()) for name, p in plain.state_dict().items())
    sharded.close()
    dist.destroy_process_group()
    return far
