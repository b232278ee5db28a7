"""A network that is changed between steps, cut over ranks and on one device: equal everywhere, or refused by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from evenly.comm import RankGroup
from evenly.errors import EvenlyError
from evenly.graph import Example
from evenly.shards import Sharded, local_shard_of, shard_model
from tests.ranks import RankError, run_ranks

Change = Callable[[nn.Module], Any]
TOLERANCE = 1e-9


@dataclass
class Act:
    """One call of a network: what is changed before it, the batch, and whether a step of training follows."""

    batch: Tensor | tuple[Tensor, ...]
    change: Change | None = None
    trains: bool = True


@dataclass
class Played:
    """What the acts gave, up to the first error."""

    seen: list[dict[str, Tensor | None]] = field(default_factory=list)
    error: BaseException | None = None


def play(
    build: Callable[[], nn.Module],
    example: Example,
    shares: Sequence[float],
    acts: Sequence[Act],
    *,
    cut_batch: bool = False,
) -> str:
    """Returns what an EvenlyError said at the first act that was refused; "" if all acts gave what one device gives.

    Fails where a rank gives other numbers than one device, where an error is not typed, and where only some ranks have
    one. An error of the network itself (one device raises it too) is allowed at that act.
    """
    truth = _run(build(), acts)
    models = [build() for _ in shares]  # not in the ranks' threads: these share one generator
    try:
        found = run_ranks(len(shares), _rank, models, example, shares, acts, cut_batch, limit_s=120.0)
    except RankError as failed:  # while it was cut
        strange = [error for error in failed.errors if not isinstance(error, EvenlyError)]
        assert not strange, f"cutting raised {strange[0]!r}"
        return _said(failed.errors)
    for rank, played in enumerate(found):
        for place, (mine, theirs) in enumerate(zip(played.seen, truth.seen, strict=False)):
            _require_equal(mine, theirs, f"rank {rank}, act {place}")
    errors = [played.error for played in found]
    if not any(errors):
        own = f"one device raised {truth.error!r}, the cut network did not"
        assert truth.error is None, own
        return ""
    assert all(errors), f"only some ranks had an error: {errors}"
    places = {len(played.seen) for played in found}
    if truth.error is not None and min(places) >= len(truth.seen):
        return _said(errors)  # the network's own error
    strange = [error for error in errors if not isinstance(error, EvenlyError)]
    assert not strange, f"act {min(places)} raised {strange[0]!r}, which one device does not"
    return _said(errors)


def _said(errors: Sequence[BaseException | None]) -> str:
    """Returns the error that is no echo of another rank's."""
    named = [error for error in errors if error is not None]
    first = next((error for error in named if type(error).__name__ != "PeerError"), named[0])
    return f"{type(first).__name__}: {first}"


def _rank(
    rank_group: RankGroup,
    models: Sequence[nn.Module],
    example: Example,
    shares: Sequence[float],
    acts: Sequence[Act],
    cut_batch: bool,
) -> Played:
    model = shard_model(
        models[rank_group.rank], example, rank_group=rank_group, shares=shares, cut_batch=cut_batch, timeout_s=60.0
    )
    try:
        return _run(model, acts)
    finally:
        model.close()


def _run(model: nn.Module, acts: Sequence[Act]) -> Played:
    played = Played()
    optimizer = torch.optim.SGD([*model.parameters(), torch.zeros(0)], lr=0.01)
    for act in acts:
        try:
            if act.change is not None:
                act.change(model)
            played.seen.append(_step(model, optimizer, act))
        except Exception as error:
            if isinstance(model, Sharded):
                model.shard_group.monitor.report(error)
            played.error = error
            break
    return played


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, act: Act) -> dict[str, Tensor | None]:
    batch = act.batch if isinstance(act.batch, tuple) else (act.batch,)
    optimizer.zero_grad()
    with torch.set_grad_enabled(act.trains):
        result = model(*(x.clone() for x in batch))
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    seen: dict[str, Tensor | None] = {f"output {i}": leaf.detach().clone() for i, leaf in enumerate(leaves)}
    if act.trains:
        weighted = [(x * torch.arange(x.numel(), dtype=x.dtype).cos().view(x.shape)).sum() for x in leaves]
        loss = torch.stack(weighted).sum()
        if loss.requires_grad:
            loss.backward()
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            seen[f"gradient of {name}"] = None if gradient is None else _whole(parameter, gradient)
        optimizer.step()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        seen[name] = _whole(tensor, tensor)
    return seen


def _whole(owner: Tensor, tensor: Tensor) -> Tensor:
    placement = local_shard_of(owner)
    return tensor.detach().clone() if placement is None else placement.full(tensor).clone()


def _require_equal(mine: dict[str, Tensor | None], theirs: dict[str, Tensor | None], where: str) -> None:
    assert mine.keys() == theirs.keys(), f"{where}: other names {mine.keys() ^ theirs.keys()}"
    size = max([1.0, *(_largest(truth) for truth in theirs.values() if truth is not None)])
    for name, truth in theirs.items():
        found = mine[name]
        assert (found is None) == (truth is None), f"{where}: {name} is {found}, but {truth} on one device"
        if found is None or truth is None:
            continue
        assert found.shape == truth.shape, f"{where}: {name} is {list(found.shape)}, not {list(truth.shape)}"
        difference = _largest(found.double() - truth.double())
        assert difference <= TOLERANCE * size, f"{where}: {name} differs by {difference:.1e}"


def _largest(tensor: Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0
