"""Cuts one published network over two ranks and compares it with the whole network."""

import copy
import gc
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tests.ranks import run_ranks
from tests.shards.compare import compare
from torch import nn

from benchmarks._networks.catalogue import Network
from benchmarks.common import Row
from evenly._torch.modules import Dropout
from evenly.comm import RankGroup
from evenly.errors import SpecError
from evenly.graph import Traced, trace_module
from evenly.layouts import lay_out
from evenly.shards import join_shards, local_shard_of
from evenly.spec.layout import Layout

SHARES = [2, 1]
RATES = {"StochasticDepth": "p", "DropPath": "drop_prob", "DropBlock2d": "drop_prob"}  # of modules, besides dropout
FUNCTION_RATES = ("drop_rate", "dropout")  # attributes that modules pass to functions
CUT_MODES = ("partitioned", "reduced", "grouped", "columns", "rows")
TOLERANCE = 1e-9
NOISE_FACTOR = 4.0  # of the change that one rounding makes in the whole network


def check_network(network: Network, *, steps: int, limit_s: int) -> Row:
    """Returns the row of one network: exact, wrong or refused, how many layers are cut, what is computed whole."""
    began = time.monotonic()
    row: Row = {"result": "exact", "cut": 0, "whole": 0, "reasons": [], "random": False, "note": ""}
    signal.signal(signal.SIGALRM, _raise_timeout)
    signal.alarm(limit_s)
    try:
        torch.manual_seed(0)
        model, example = network.build().double(), network.example()
        still = copy.deepcopy(model)
        row["random"] = _set_rates_to_zero(still)
        optimizer = partial(torch.optim.SGD, lr=network.learning_rate, momentum=0.9)
        train = partial(compare, steps=steps, smaller=False, optimizer=optimizer, tolerance=TOLERANCE)
        try:
            layout = train(lambda: copy.deepcopy(still), example, SHARES)
        except AssertionError as error:
            if hasattr(error, "errors"):  # of a rank, not a difference
                raise
            noise = _own_noise(still, example, optimizer, steps)
            layout = train(lambda: still, example, SHARES, tolerance=NOISE_FACTOR * noise)
            row |= {"result": "noisy", "note": f"rounding its weights once changes its own outputs by {noise:.0e}"}
        row |= _description(layout)
        if row["random"]:
            _require_split_independent(model, example)
    except AssertionError as error:
        refusals = [e for e in getattr(error, "errors", []) if isinstance(e, SpecError)]
        row |= {"result": "refused" if refusals else "wrong", "note": _first_line(refusals[0] if refusals else error)}
    except SpecError as error:
        row |= {"result": "refused", "note": _first_line(error)}
    except Exception as error:
        row |= {"result": "failed", "note": f"{type(error).__name__}: {_first_line(error)}"}
    finally:
        signal.alarm(0)
        gc.collect()
    return {**row, "seconds": round(time.monotonic() - began, 1)}


def _own_noise(
    model: nn.Module, example: torch.Tensor, build: Callable[..., torch.optim.Optimizer], steps: int
) -> float:
    """Returns how much outputs and state of the whole network change, relatively, if its weights are rounded once."""
    plain, rounded = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * torch.randn_like(parameter).sign())
    runs = []
    for network in (plain, rounded):
        optimizer, outputs = build(network.parameters()), []
        for _ in range(steps):
            optimizer.zero_grad()
            outputs += (found := _tensors(network(example.clone())))
            sum((x * _weights(x)).sum() / x.numel() ** 0.5 for x in found).backward()
            optimizer.step()
        runs.append([x.detach() for x in (*outputs, *network.parameters())])
    return max(float((a - b).abs().max() / a.abs().max().clamp_min(1e-3)) for a, b in zip(*runs, strict=True))


def _weights(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.numel(), dtype=x.dtype).mul_(0.7).cos_().view(x.shape)


def _raise_timeout(*_: object) -> None:
    raise TimeoutError("the time for one network is over")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _description(layout: Layout) -> Row:
    notes = [choice.note for choice in layout.choices if choice.note]
    missing = [note for note in notes if note not in layout.explain()]
    if missing:
        raise AssertionError(f"explain() does not say {missing[0]!r}")
    cut = sum(choice.mode in CUT_MODES for choice in layout.choices)
    return {"cut": cut, "whole": len(notes), "reasons": sorted(set(notes))}


def _set_rates_to_zero(model: nn.Module) -> bool:
    """Switches dropout and stochastic depth off; returns whether there was any."""
    is_random = False
    for module in model.modules():
        attribute = "p" if isinstance(module, Dropout) else RATES.get(type(module).__name__)
        for name in (attribute, *FUNCTION_RATES):
            if name is not None and isinstance(getattr(module, name, None), float) and getattr(module, name) > 0:
                is_random = True
                setattr(module, name, 0.0)
    return is_random


def _require_split_independent(model: nn.Module, example: torch.Tensor) -> None:
    """Raises AssertionError unless dropout and stochastic depth give the same network on one rank and on two."""
    traced = trace_module(model, example)
    results = [
        run_ranks(len(shares), _first_step, traced, lay_out(traced.graph, shares), example, limit_s=200.0)[0]
        for shares in ([1], SHARES)
    ]
    for name, alone in results[0].items():
        difference = float((results[1][name] - alone).abs().max()) if alone.numel() else 0.0
        size = float(alone.abs().max()) if alone.numel() else 0.0
        if not difference <= TOLERANCE * max(1e-3, size):
            raise AssertionError(f"with its random numbers, {name} differs by {difference:.1e} from {size:.1e}")


def _first_step(
    rank_group: RankGroup, traced: Traced, layout: Layout, example: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Returns the outputs and gradients of one step in training mode, as full tensors."""
    model = join_shards(traced, layout, rank_group=rank_group, timeout_s=150.0)
    model._dropout_stream.seed = 17  # type: ignore[attr-defined]  # by default it depends on the group
    try:
        model.train()
        outputs = _tensors(model(example.clone()))
        sum((x * x).mean() for x in outputs).backward()
        found = {f"output {i}": x.detach() for i, x in enumerate(outputs)}
        for name, parameter in model.named_parameters():
            shard = local_shard_of(parameter)
            if parameter.grad is not None and shard is not None:
                found[f"gradient of {name}"] = shard.full(parameter.grad)
        return found
    except BaseException as error:
        model.shard_group.monitor.report(error)
        raise
    finally:
        model.close()


def _tensors(value: Any) -> list[torch.Tensor]:
    flatten: Callable[[Any], list[Any]] = torch.utils._pytree.tree_leaves
    return [x for x in flatten(value) if isinstance(x, torch.Tensor) and x.is_floating_point()]
