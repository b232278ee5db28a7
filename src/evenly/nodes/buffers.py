"""Buffers, such as BatchNorm's: what batches have added to them since the last exchange is averaged."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from evenly._errors import SpecError
from evenly.nodes.state import add_change, averages, difference, kept_buffers

Tensors = dict[str, torch.Tensor]


class Buffers:
    """The buffers of a module, and as the last exchange left them."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.agreed = copies(kept_buffers(module))

    def learn(self, agreed: Tensors | None = None) -> None:
        """Takes over what all ranks have agreed on; without it, what is in the module now."""
        self.agreed = copies(kept_buffers(self._module) if agreed is None else agreed)

    def snapshot(self) -> Tensors:
        """Returns the buffers as they are; those known not to have changed since the last exchange are not copied.

        To compare them on a GPU would stall it, so all are copied there.
        """
        found = {}
        for name, buffer in kept_buffers(self._module).items():
            self._require_known(name, buffer)
            is_same = not buffer.is_cuda and torch.equal(buffer, self.agreed[name])
            found[name] = self.agreed[name] if is_same else buffer.detach().clone()
        return found

    def _require_known(self, name: str, buffer: torch.Tensor) -> None:
        known = self.agreed.get(name)
        if known is None or known.shape != buffer.shape:
            was = "there was none" if known is None else f"it had {list(known.shape)}"
            raise SpecError(
                f"the buffer {name!r} has the shape {list(buffer.shape)}, and when synchronize was called {was}: nodes "
                "cannot average it. Register it before, in its full size, or with persistent=False."
            )

    def moves(self, snapshot: Tensors) -> "Moves":
        """Returns what was added to the buffers of a snapshot since the last exchange."""
        return Moves(snapshot, {name: self.agreed[name] for name in snapshot})

    def put(self, agreed: Tensors, snapshot: Tensors, *, change: bool) -> None:
        """Puts what was agreed on into the module; if as a `change`, what was added since the snapshot stays."""
        for name, buffer in kept_buffers(self._module).items():
            if name not in agreed:
                continue
            if not change:
                buffer.copy_(agreed[name])
            else:
                add_change(buffer, agreed[name], snapshot[name])
            self.agreed[name] = agreed[name].detach().clone()


@dataclass(frozen=True)
class Moves:
    """Buffers, and what they were at the last exchange."""

    snapshot: Tensors
    before: Tensors

    def bits(self) -> tuple[bool, ...]:
        """Returns for each buffer whether it has changed."""
        pairs = [(self.before[name], buffer) for name, buffer in self.snapshot.items()]
        return tuple(buffer is not before and not torch.equal(buffer, before) for before, buffer in pairs)

    def split(self, changed: Sequence[bool]) -> tuple[Tensors, Tensors]:
        """Returns the counters among the buffers that some rank has changed, and what was added to the others."""
        chosen = {name: self.snapshot[name] for name, bit in zip(self.snapshot, changed, strict=True) if bit}
        counters = {name: buffer.clone() for name, buffer in chosen.items() if not averages(buffer)}
        added = {name: difference(b, self.before[name]) for name, b in chosen.items() if averages(b)}
        return counters, added

    def agreed(self, counters: Tensors, added: Tensors) -> Tensors:
        """Returns the values of the buffers, given the largest counters and the average of what was added."""
        return {**counters, **{name: self.before[name] + move for name, move in added.items()}}


def copies(buffers: Tensors) -> Tensors:
    """Returns copies of the buffers."""
    return {name: buffer.detach().clone() for name, buffer in buffers.items()}
