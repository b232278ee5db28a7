"""Buffers, such as BatchNorm's: how an exchange combines those that changed, by the policy of each."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from evenly.errors import NonFiniteError, SpecError
from evenly.exchange.replica_exchange import ReplicaExchange
from evenly.exchange.tensors.averaged_tensors import averages, persistent_buffers
from evenly.exchange.tensors.buffer_policies import policies_of
from evenly.exchange.tensors.memory import DistinctTensors
from evenly.exchange.tensors.ordered import below_all, from_ordered, to_ordered
from evenly.spec import BufferPolicy, Exchange

Tensors = dict[str, torch.Tensor]

logger = logging.getLogger(__name__)


class Buffers:
    """The buffers of a module that ranks agree on, and their values after the last exchange."""

    def __init__(
        self, module: torch.nn.Module, settings: Exchange, replica_exchange: ReplicaExchange, *, alone: bool
    ) -> None:
        self._module = module
        self._replica_exchange = replica_exchange
        self._alone = alone
        self._distinct = DistinctTensors()
        self.policies = {} if alone else policies_of(module, settings)
        self.agreed: Tensors = {}
        self.learn()
        for policy in sorted(set(self.policies.values())):
            logger.info("buffers, %s: %s", policy, ", ".join(n for n, p in self.policies.items() if p == policy))

    def learn(self, agreed: Tensors | None = None) -> None:
        """Stores the values that all ranks agreed on; by default those in the module now."""
        self.agreed = copies({**self.now(), **{n: v for n, v in (agreed or {}).items() if self._policy(n) != "keep"}})

    def now(self) -> Tensors:
        """Returns the buffers that ranks agree on."""
        buffers = {} if self._alone else persistent_buffers(self._module, self._distinct)
        return {name: buffer for name, buffer in buffers.items() if self._policy(name) != "keep"}

    def snapshot(self) -> Tensors:
        """Returns the current buffers; those that did not change since the last exchange are not copied.

        On a GPU all are copied, because a comparison would stall it.
        """
        snapshot = {}
        for name, buffer in self.now().items():
            self._require_registered(name, buffer)
            is_same = not buffer.is_cuda and same(buffer, self.agreed[name])
            snapshot[name] = self.agreed[name] if is_same else buffer.detach().clone()
        return snapshot

    def changes(self, snapshot: Tensors) -> "BufferChanges":
        """Returns the changes of the buffers of a snapshot since the last exchange."""
        before = {name: self.agreed[name] for name in snapshot}
        return BufferChanges(snapshot, before, self.policies, self._replica_exchange.is_first)

    def put(self, agreed: Tensors, snapshot: Tensors, *, change: bool) -> None:
        """Puts the agreed values into the module; as a `change`, updates since the snapshot are kept."""
        for name, buffer in self.now().items():
            if name not in agreed:
                continue
            if change:
                add_change(buffer, agreed[name], snapshot[name], self.policies[name])
            else:
                buffer.copy_(agreed[name])
            self.agreed[name] = agreed[name].detach().clone()

    def _policy(self, name: str) -> BufferPolicy:
        return self.policies.get(name, "auto")

    def _require_registered(self, name: str, buffer: torch.Tensor) -> None:
        agreed = self.agreed.get(name) if name in self.policies else None
        if agreed is None or agreed.shape != buffer.shape or agreed.dtype != buffer.dtype:
            was = "there was none" if agreed is None else f"it had {agreed.dtype} {list(agreed.shape)}"
            raise SpecError(
                f"the buffer {name!r} has {buffer.dtype} {list(buffer.shape)}, and when synchronize was called {was}: "
                "nodes cannot average it. Register it before, in its full size, or with persistent=False."
            )


@dataclass(frozen=True)
class BufferChanges:
    """Buffers, their values at the last exchange, and their policies."""

    snapshot: Tensors
    before: Tensors
    policies: Mapping[str, BufferPolicy]
    is_first: bool  # this rank provides buffers of the policy 'first'

    def bits(self) -> tuple[bool, ...]:
        """Returns for each buffer whether it has changed."""
        pairs = [(self.before[name], buffer) for name, buffer in self.snapshot.items()]
        return tuple(buffer is not before and not same(buffer, before) for before, buffer in pairs)

    def split(self, changed: Sequence[bool]) -> tuple[Tensors, Tensors]:
        """Returns, for the buffers that some rank changed, keys to maximize over ranks, and the changes to average.

        Where the last value is not finite the change is the new value itself.
        """
        chosen = {name: self.snapshot[name] for name, bit in zip(self.snapshot, changed, strict=True) if bit}
        keys = {name: self._keys(name, buffer) for name, buffer in chosen.items() if not self._is_averaged(name)}
        added = {name: b - finite_part(self.before[name]) for name, b in chosen.items() if self._is_averaged(name)}
        return keys, added

    def agreed(self, keys: Tensors, added: Tensors) -> Tensors:
        """Returns the values of the buffers from the largest keys and the averaged changes."""
        averaged = {name: finite_part(self.before[name]) + move for name, move in added.items()}
        self._require_finite_mix(averaged)
        largest = {name: from_ordered(k, self.snapshot[name], smallest=self._is_min(name)) for name, k in keys.items()}
        return {**largest, **averaged}

    def _is_averaged(self, name: str) -> bool:
        return self.policies[name] == "average"

    def _is_min(self, name: str) -> bool:
        return self.policies[name] == "min"

    def _keys(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        keys = to_ordered(buffer, smallest=self._is_min(name))
        return keys if self.is_first or self.policies[name] != "first" else below_all(keys)

    def _require_finite_mix(self, averaged: Tensors) -> None:
        """Raises `NonFiniteError` for averages of finite and infinite numbers: infinity often means "no value yet"."""
        torn = [is_torn(average, self.snapshot[name]) for name, average in averaged.items()]
        if not torn or not bool(torch.stack(torn).any()):
            return
        name = next(name for name, is_torn in zip(averaged, torn, strict=True) if is_torn)
        raise NonFiniteError(
            f"the buffer {name!r} was to be averaged at an exchange, but on some ranks elements of it are infinite "
            f"that are finite on others; nothing was merged. Say by buffers={{{name!r}: ...}} what is to become of it: "
            "'max', 'min', 'first' or 'keep'."
        )


def add_change(buffer: torch.Tensor, agreed: torch.Tensor, snapshot: torch.Tensor, policy: BufferPolicy) -> None:
    """Merges in place the values agreed on for the snapshot of a buffer that may have changed since."""
    if policy == "first":  # the rank that provided it keeps its newer value
        buffer.copy_(torch.where(_all_same(agreed, snapshot), buffer, agreed))
    elif not averages(buffer):  # flags and counters, of which torch cannot add all types
        buffer.copy_(buffer.long() + (agreed.long() - snapshot.long()))
    elif policy in ("max", "min"):
        extreme = torch.maximum if policy == "max" else torch.minimum
        buffer.copy_(extreme(buffer.double(), agreed.double()))
    else:
        moved = torch.where(snapshot == agreed, buffer, buffer + (agreed - snapshot))
        buffer.copy_(torch.where(snapshot.isfinite() | (snapshot == agreed), moved, agreed))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors of one shape have the same elements."""
    return bool(_all_same(one, other)) if one.dtype.itemsize == 1 else torch.equal(one, other)


def is_torn(average: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Returns whether an average mixes finite and infinite elements, or infinities of both signs."""
    return ((average.isinf() & local.isfinite()) | (average.isnan() & local.isinf())).any()


def copies(buffers: Tensors) -> Tensors:
    """Returns copies of the buffers."""
    return {name: buffer.detach().clone() for name, buffer in buffers.items()}


def _all_same(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if one.is_floating_point() and one.dtype.itemsize == 1:  # torch cannot compare them
        one, other = one.float(), other.float()
    return (one == other).all()


def finite_part(values: torch.Tensor) -> torch.Tensor:
    """Returns the values, with 0 for those that are not finite."""
    return torch.where(values.isfinite(), values, torch.zeros_like(values))
