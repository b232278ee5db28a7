"""Loads a state_dict into a network: all of it or nothing, with a report in words."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evenly._torch.compiler import plain_name
from evenly._torch.dtensor import is_dtensor, placed_like
from evenly._torch.modules import set_versions, versions_of
from evenly.checkpoints.weight_files import WeightState
from evenly.comm import first_line
from evenly.errors import CheckpointError
from evenly.nodes import Synchronized
from evenly.shards import Sharded, load_full_state_dict

SHOWN = 5  # names that a message lists


@dataclass(frozen=True)
class LoadReport:
    """What was loaded into a network: from where, and the names that only the network or only the source has."""

    source: Path
    num_loaded: int
    missing: tuple[str, ...] = ()  # in the network, not in the source
    unexpected: tuple[str, ...] = ()  # in the source, not in the network

    def explain(self) -> str:
        """Returns the report in words."""
        rest = _differences(self.missing, self.unexpected)
        return f"{self.num_loaded} entries were loaded from {self.source}{f'; {rest}' if rest else ''}"


def load_state(model: nn.Module, state: WeightState, source: Path, *, strict: bool) -> LoadReport:
    """Loads a state with the names of the plain network, in place; if it does not fit, nothing is changed."""
    network = unwrapped(model)
    own: Mapping[str, Any] = network.state_dict(keep_vars=True)
    given = _with_own_names(network, own, state)
    if isinstance(network, Sharded):
        load_full_state_dict(network, given, strict=strict)
        missing, unexpected = (tuple(name for name in one if name not in other) for one, other in _pairs(own, given))
        return LoadReport(source, len(given) - len(unexpected), missing, unexpected)
    if given.keys() == own.keys() and not any(_misfits(own, given)):
        network.load_state_dict(_placed_like(own, given))
        return LoadReport(source, len(given))
    return _load_otherwise(network, own, given, source, strict=strict)


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the network inside of `evenly.synchronize` or DDP."""
    while isinstance(model, Synchronized | DistributedDataParallel):
        model = model.module
    return model


def _pairs(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    yield one, other
    yield other, one


def _with_own_names(network: nn.Module, own: Mapping[str, Any], state: WeightState) -> WeightState:
    """Returns a state under the names of this network, which may be compiled.

    Other names of a tensor are filled in, and buffers left out that are not persistent here. A state without versions
    is taken for one of this version.
    """
    own_names = {plain_name(key): key for key in own}
    temporary = {plain_name(name) for name, _ in network.named_buffers(remove_duplicate=False)} - own_names.keys()
    named: WeightState = OrderedDict(
        (own_names.get(key, key), value)
        for key, value in ((plain_name(key), value) for key, value in state.items())
        if key not in temporary
    )
    by_tensor = {id(own[key]): named[key] for key in named if isinstance(own.get(key), torch.Tensor)}
    for key, tensor in own.items():
        if key not in named and id(tensor) in by_tensor:
            named[key] = by_tensor[id(tensor)]
    own_versions = versions_of(own)
    versions = versions_of(state)
    prefixes = {plain_name(prefix): prefix for prefix in own_versions or {}}
    if versions is not None:
        versions = {prefixes.get(plain_name(prefix), prefix): entry for prefix, entry in versions.items()}
    set_versions(named, own_versions if versions is None else versions)
    return named


def _placed_like(own: Mapping[str, Any], given: WeightState) -> WeightState:
    """Returns a state in which the values for DTensors of the network are placed like these."""
    placed: WeightState = OrderedDict(
        (key, placed_like(own[key], value) if isinstance(own.get(key), torch.Tensor) else value)
        for key, value in given.items()
    )
    set_versions(placed, versions_of(given))
    return placed


def _misfits(own: Mapping[str, Any], given: WeightState) -> Iterator[str]:
    """Yields a text for each tensor that has another shape in the network."""
    for key, tensor in own.items():
        if isinstance(tensor, torch.Tensor) and not torch.nn.parameter.is_lazy(tensor):
            value = given.get(key, tensor)
            if not isinstance(value, torch.Tensor) or value.shape != tensor.shape:
                there = list(value.shape) if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
                yield f"{key!r} is {there} there and {list(tensor.shape)} in the network"


def _load_otherwise(
    network: nn.Module, own: Mapping[str, Any], given: WeightState, source: Path, *, strict: bool
) -> LoadReport:
    """Loads a state with other names or shapes, which modules may know how to load; undoes it if they do not."""
    misfits = list(_misfits(own, given))
    before: WeightState = OrderedDict(
        (key, _copy(value) if isinstance(value, torch.Tensor) else value) for key, value in own.items()
    )
    set_versions(before, versions_of(own))
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    try:
        missing, unexpected = network.load_state_dict(_placed_like(own, given), strict=False)
        case = _differences(missing, unexpected) if strict else ""
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        case = "; ".join(misfits[:SHOWN]) or f"torch could not: {first_line(error)}"
    if case:
        network.load_state_dict(before)
        raise _load_error(source, case)
    return LoadReport(source, len(given) - len(unexpected), tuple(missing), tuple(unexpected))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy in host memory; of a DTensor, which cannot leave its devices, one there."""
    return tensor.detach().clone() if is_dtensor(tensor) else tensor.detach().cpu().clone()


def _differences(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    lacks = f"{_listed(missing)} of the network {_is(missing)} missing there" if missing else ""
    extra = f"the network has no {_listed(unexpected)}" if unexpected else ""
    return "; ".join(part for part in (lacks, extra) if part)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _load_error(source: Path, case: str) -> CheckpointError:
    return CheckpointError(
        f"weights were to be loaded from {source}, but {case}. Nothing was changed. Build the network that was "
        "trained, or give strict=False to load what is in both."
    )
