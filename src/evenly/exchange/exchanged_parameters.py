"""Which parameters an exchange averages: the trained ones, and frozen ones until all nodes hold the same values."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypedDict, final

import torch

from evenly._torch.autograd import version_of


@dataclass(frozen=True)
class _Merged:
    """The fragments of a frozen parameter that were averaged since it changed last."""

    writes: int = -1  # to the tensor until then, those of exchanges left out
    fragments: frozenset[int] = frozenset()
    is_exact: bool = True  # nodes hold the same bits; an overlapped exchange leaves the last ones different


class FrozenState(TypedDict):
    """The parameters in a checkpoint that were trained before and are frozen."""

    merged: dict[str, list[int]]  # the fragments of each that were averaged since it changed last
    inexact: list[str]  # those of which nodes differ in the last bits


@final
class ExchangedParameters:
    """The parameters that were trained at the last forward, and those that were trained before and are frozen now.

    When a layer is frozen between two exchanges, nodes hold different values of it. The next exchange averages it once
    more. From then on it stays as it is, bit for bit, unless the optimizer goes on to change it (momentum, with
    gradients that were set to zero).
    """

    def __init__(self, module: torch.nn.Module, *, fragments: int) -> None:
        self._module, self._count = module, fragments
        self._trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._frozen: dict[str, _Merged] = {}  # that were trained before
        self._own_writes: Counter[str] = Counter()  # by exchanges, to each parameter

    def follow(self, trained: Collection[str]) -> None:
        """Takes over which parameters are trained from now on."""
        newly_frozen = self._trained - set(trained)
        kept = {name: merged for name, merged in self._frozen.items() if name not in trained}
        self._frozen = {**kept, **dict.fromkeys(newly_frozen, _Merged())}
        self._trained = set(trained)

    def description(self) -> str:
        """Returns a text that is equal on ranks that train the same."""
        return f"trained {sorted(self._trained)}, frozen since {sorted(self._frozen)}"

    def sent(self) -> dict[str, torch.Tensor]:
        """Returns the parameters that the next exchange averages, in the order of the model."""
        return self._chosen(self._is_sent)

    def inexact(self) -> dict[str, torch.Tensor]:
        """Returns frozen parameters that are sent no more, though nodes differ in their last bits."""
        return {name: p for name, p in self.differing().items() if name in self._frozen and not self._is_sent(name, p)}

    def differing(self) -> dict[str, torch.Tensor]:
        """Returns all parameters whose bits may differ between nodes."""
        return self._chosen(lambda name, p: self._is_sent(name, p) or not self._frozen[name].is_exact)

    def writes(self, names: Collection[str]) -> dict[str, int]:
        """Returns how often each frozen parameter of these was changed, by others than exchanges."""
        frozen = {name: p for name, p in self._module.named_parameters() if name in self._frozen and name in names}
        return {name: self._writes(name, parameter) for name, parameter in frozen.items()}

    @contextmanager
    def written_by_exchange(self) -> Iterator[None]:
        """Lets changes inside not count: an exchange makes them, or restores the values at the end."""
        before = self._versions()
        try:
            yield
        finally:
            for name, version in self._versions().items():
                self._own_writes[name] += version - before.get(name, version)

    def merged(self, writes: Mapping[str, int], fragments: Sequence[int], *, is_exact: bool) -> None:
        """Records that an exchange of `fragments` was merged; at its snapshot there were so many `writes`."""
        now = self.writes(writes)
        for name in now:
            if writes[name] != now[name]:  # the optimizer has changed it since the snapshot
                self._frozen[name] = _Merged()
                continue
            earlier = self._frozen[name] if self._frozen[name].writes == now[name] else _Merged()
            was_exact = earlier.is_exact or len(fragments) == self._count
            self._frozen[name] = _Merged(now[name], earlier.fragments | set(fragments), is_exact and was_exact)

    def make_exact(self, names: Collection[str]) -> None:
        """Records that all nodes hold the same bits of frozen parameters that are sent no more."""
        for name in self._frozen.keys() & set(names):
            self._frozen[name] = replace(self._frozen[name], is_exact=True)

    def state(self) -> FrozenState:
        """Returns the state for a checkpoint."""
        writes = self.writes(self._frozen)
        current = {name: merged for name, merged in self._frozen.items() if merged.writes == writes[name]}
        return {
            "merged": {name: sorted(current.get(name, _Merged()).fragments) for name in sorted(self._frozen)},
            "inexact": sorted(name for name, merged in current.items() if not merged.is_exact),
        }

    def resume(self, trained: Collection[str] | None, state: FrozenState | None) -> None:
        """Restores a checkpoint's state, after its values were loaded; without one all nodes hold the same values."""
        self._trained = self._trained if trained is None else set(trained)
        self._frozen = {}
        if state is not None:
            self._frozen = dict.fromkeys(state["merged"], _Merged())
            for name, writes in self.writes(self._frozen).items():
                merged = frozenset(state["merged"][name])
                self._frozen[name] = _Merged(writes, merged, name not in state["inexact"])

    def unchanged_since(self, writes: Mapping[str, int]) -> list[str]:
        """Returns the frozen parameters of `writes` that were not changed since."""
        now = self.writes(writes)
        return sorted(name for name in now if now[name] == writes[name])

    def _is_sent(self, name: str, parameter: torch.Tensor) -> bool:
        merged = self._frozen.get(name)
        return merged is None or len(merged.fragments) < self._count or merged.writes != self._writes(name, parameter)

    def _writes(self, name: str, parameter: torch.Tensor) -> int:
        return version_of(parameter) - self._own_writes[name]

    def _chosen(self, differs: Callable[[str, torch.Tensor], bool]) -> dict[str, torch.Tensor]:
        return {
            name: parameter
            for name, parameter in self._module.named_parameters()
            if name in self._trained or (name in self._frozen and differs(name, parameter))
        }

    def _versions(self) -> dict[str, int]:
        return {name: version_of(p) for name, p in self._module.named_parameters() if name in self._frozen}
