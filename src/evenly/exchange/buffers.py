"""Buffers, such as BatchNorm's: what an exchange makes of those that batches have changed, by the policy of each."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from evenly.errors import NonFiniteError, SpecError
from evenly.exchange.replica_exchange import ReplicaExchange
from evenly.exchange.tensors.buffer_policies import policies_of
from evenly.exchange.tensors.memory import DistinctTensors
from evenly.exchange.tensors.optimizer_state import averages, kept_buffers
from evenly.exchange.tensors.ordered import below_all, from_ordered, to_ordered
from evenly.spec import BufferPolicy, Exchange

Tensors = dict[str, torch.Tensor]

logger = logging.getLogger(__name__)


class Buffers:
    """The buffers of a module that ranks agree on, and as the last exchange left them."""

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
        """Takes over what all ranks have agreed on; without it, what is in the module now."""
        self.agreed = copies({**self.now(), **{n: v for n, v in (agreed or {}).items() if self._policy(n) != "keep"}})

    def now(self) -> Tensors:
        """Returns the buffers that ranks agree on."""
        kept = {} if self._alone else kept_buffers(self._module, self._distinct)
        return {name: buffer for name, buffer in kept.items() if self._policy(name) != "keep"}

    def snapshot(self) -> Tensors:
        """Returns the buffers as they are; those known not to have changed since the last exchange are not copied.

        To compare them on a GPU would stall it, so all are copied there.
        """
        found = {}
        for name, buffer in self.now().items():
            self._require_known(name, buffer)
            is_same = not buffer.is_cuda and same(buffer, self.agreed[name])
            found[name] = self.agreed[name] if is_same else buffer.detach().clone()
        return found

    def moves(self, snapshot: Tensors) -> "BufferChanges":
        """Returns what becomes of the buffers of a snapshot."""
        before = {name: self.agreed[name] for name in snapshot}
        return BufferChanges(snapshot, before, self.policies, self._replica_exchange.is_first)

    def put(self, agreed: Tensors, snapshot: Tensors, *, change: bool) -> None:
        """Puts what was agreed on into the module; if as a `change`, what was added since the snapshot stays."""
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

    def _require_known(self, name: str, buffer: torch.Tensor) -> None:
        known = self.agreed.get(name) if name in self.policies else None
        if known is None or known.shape != buffer.shape or known.dtype != buffer.dtype:
            was = "there was none" if known is None else f"it had {known.dtype} {list(known.shape)}"
            raise SpecError(
                f"the buffer {name!r} has {buffer.dtype} {list(buffer.shape)}, and when synchronize was called {was}: "
                "nodes cannot average it. Register it before, in its full size, or with persistent=False."
            )


@dataclass(frozen=True)
class BufferChanges:
    """Buffers, what they were at the last exchange, and what is to become of them."""

    snapshot: Tensors
    before: Tensors
    policies: Mapping[str, BufferPolicy]
    is_first: bool  # this rank has those that are taken from one

    def bits(self) -> tuple[bool, ...]:
        """Returns for each buffer whether it has changed."""
        pairs = [(self.before[name], buffer) for name, buffer in self.snapshot.items()]
        return tuple(buffer is not before and not same(buffer, before) for before, buffer in pairs)

    def split(self, changed: Sequence[bool]) -> tuple[Tensors, Tensors]:
        """Returns of the buffers that some rank has changed keys, of which the largest holds, and what was added to
        those that are averaged.

        Nothing can be added to what is not finite: there it is the value itself.
        """
        chosen = {name: self.snapshot[name] for name, bit in zip(self.snapshot, changed, strict=True) if bit}
        keys = {name: self._keys(name, buffer) for name, buffer in chosen.items() if not self._is_averaged(name)}
        added = {name: b - _finite(self.before[name]) for name, b in chosen.items() if self._is_averaged(name)}
        return keys, added

    def agreed(self, keys: Tensors, added: Tensors) -> Tensors:
        """Returns the values of the buffers, given the largest keys and the average of what was added."""
        averaged = {name: _finite(self.before[name]) + move for name, move in added.items()}
        self._require_meaning(averaged)
        largest = {name: from_ordered(k, self.snapshot[name], smallest=self._is_min(name)) for name, k in keys.items()}
        return {**largest, **averaged}

    def _is_averaged(self, name: str) -> bool:
        return self.policies[name] == "average"

    def _is_min(self, name: str) -> bool:
        return self.policies[name] == "min"

    def _keys(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        keys = to_ordered(buffer, smallest=self._is_min(name))
        return keys if self.is_first or self.policies[name] != "first" else below_all(keys)

    def _require_meaning(self, averaged: Tensors) -> None:
        """Raises `NonFiniteError` for averages of finite and infinite numbers: infinity mostly says "nothing yet"."""
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
    """Merges in place what ranks have agreed on for the snapshot of a buffer that has changed since then."""
    if policy == "first":  # whose buffer it is goes on
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


def is_torn(average: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Returns whether an average was made of finite and infinite elements, or of infinite ones of both signs."""
    return ((average.isinf() & own.isfinite()) | (average.isnan() & own.isinf())).any()


def copies(buffers: Tensors) -> Tensors:
    """Returns copies of the buffers."""
    return {name: buffer.detach().clone() for name, buffer in buffers.items()}


def _all_same(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if one.is_floating_point() and one.dtype.itemsize == 1:  # torch cannot compare them
        one, other = one.float(), other.float()
    return (one == other).all()


def _finite(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values.isfinite(), values, torch.zeros_like(values))
