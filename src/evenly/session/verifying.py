"""Compares a cut network with the uncut one on its first batch."""

import copy
import logging
import time
from collections.abc import Mapping

import psutil
import torch
from torch import nn

from evenly._torch import pytree
from evenly.comm import first_line
from evenly.errors import MismatchError
from evenly.shards import Report, Sharded, verify
from evenly.shards.verification.comparison import in_float64, take_weights
from evenly.shards.verification.layer_trace import dropout_modes
from evenly.spec import Role

logger = logging.getLogger(__name__)

COPIES = {8: 4, 4: 10, 2: 18}  # copies of the parameters by itemsize: networks, gradients, both in float64 too


def verify_on_first_batch(model: nn.Module, sharded: Sharded, role: Role | None) -> None:
    """Has the first call of `sharded` compare it with `model`; that call raises `MismatchError` if they differ.

    The weights are those of the cut network at that call. The run is not changed: parameters, buffers,
    gradients, random numbers. If a rank has too little memory for the whole network, nothing is compared.

    Args:
        model: the uncut network; a copy of it is used.
        sharded: the cut one.
        role: what the plan says about this rank's memory.
    """
    if len(sharded.layout.shares) > 1:
        sharded.on_first_batch = lambda arguments: _verify(model, sharded, role, arguments)


def _verify(model: nn.Module, sharded: Sharded, role: Role | None, arguments: Mapping[str, object]) -> None:
    began = time.monotonic()
    obstacle = _obstacle(model, sharded, role, arguments)
    plain = None
    if not obstacle and sharded._program is not None:
        try:
            plain = copy.deepcopy(model)
        except Exception as error:
            obstacle = f"the uncut one cannot be copied ({first_line(error)})"
    if _is_any(sharded, bool(obstacle)):
        logger.info(
            "the cut network is not compared with the uncut one on its first batch: %s",
            obstacle or "another rank of the network cannot",
        )
        return
    kind = next((p.device.type for p in model.parameters()), "cpu")
    with torch.autocast(kind, enabled=False), torch.autocast("cpu", enabled=False):
        report = _report(plain or model, sharded, _detached(model, arguments))
    if not report.ok:
        raise MismatchError(
            f"a cut network was to be trained, but on its first batch {report}\nReport it as a fault of this library, "
            "with the layer named above. prepare(..., verify=False) trains without looking."
        )
    logger.info(
        "%s; compared on the first batch in %.1f s (prepare(..., verify=False) leaves it out)",
        report.lines[0],
        time.monotonic() - began,
    )


def _obstacle(model: nn.Module, sharded: Sharded, role: Role | None, arguments: Mapping[str, object]) -> str:
    """Returns why this rank cannot compare the networks; an empty text if it can."""
    if sharded._program is None:
        return ""
    _, always = dropout_modes(sharded._program.traced)
    if always:
        return f"the dropout at {always[0]!r} is on in every mode"
    needed, free = needed_bytes(model, sharded, arguments), free_bytes(sharded, role)
    return f"that takes about {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are left" if needed > free else ""


def _report(plain: nn.Module, sharded: Sharded, arguments: dict[str, object]) -> Report:
    """Returns the comparison's report; `plain` is changed."""
    if sharded._program is not None:
        take_weights(plain, sharded)
    report = verify(plain, sharded, arguments)
    if report.ok or not any(x.is_floating_point() and x.dtype.itemsize < 8 for x in plain.parameters()):
        return report
    with in_float64(sharded):  # numbers of low precision may differ by rounding
        longer = pytree.tree_map_only(torch.Tensor, _to_float64, arguments)
        return verify(plain.double(), sharded, longer)


def needed_bytes(model: nn.Module, sharded: Sharded, arguments: Mapping[str, object]) -> int:
    """Returns an estimate of the memory that the comparison takes on this rank."""
    if sharded._program is None:
        return 0
    tensors = [*model.parameters(), *model.buffers()]
    shortest = min((x.dtype.itemsize for x in tensors if x.is_floating_point()), default=8)
    graph = sharded._program.traced.graph
    example_bytes = sum(
        tensor.size_bytes for layer in graph.layers if layer.op != "parameter" for tensor in layer.outputs
    )
    batch = next((shape[0] for shape in sharded._shapes.values() if shape), 1)
    batch_sizes = [x.shape[0] for x in arguments.values() if isinstance(x, torch.Tensor) and x.ndim]
    saved_bytes = example_bytes * max(batch_sizes, default=batch) / max(batch, 1)  # for backward
    return int(COPIES.get(shortest, 18) * sum(x.nbytes for x in tensors) + (8 / shortest) * saved_bytes)


def free_bytes(sharded: Sharded, role: Role | None) -> int:
    """Returns the memory that this rank has left; no more than the plan allows it."""
    device = next((p.device for p in sharded.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + cached
    else:
        free = psutil.virtual_memory().available // len(sharded.layout.shares)  # shared by the ranks of the network
    if role is not None and role.free_bytes:
        free = min(free, max(role.free_bytes - role.memory_bytes, 0))
    return free


def _is_any(sharded: Sharded, flag: bool) -> bool:
    """Returns whether the flag is set on any rank of the network; all ranks call it together."""
    all_ranks_group = sharded._all_ranks_group
    return bool(all_ranks_group.sum(torch.tensor([float(flag)]), name="verify", largest=True).wait().item())


def _detached(model: nn.Module, arguments: Mapping[str, object]) -> dict[str, object]:
    """Returns detached arguments in at least the precision of the network; mixed precision may pass lower."""
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]

    def detach(x: torch.Tensor) -> torch.Tensor:
        shorter = bool(dtypes) and x.is_floating_point() and x.dtype.itemsize < dtypes[0].itemsize
        return x.detach().to(dtypes[0]) if shorter else x.detach()

    detached: dict[str, object] = pytree.tree_map_only(torch.Tensor, detach, dict(arguments))
    return detached


def _to_float64(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x
