"""A cut network under attack is exact as on one device, or refuses with a typed error on all ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from evenly.comm import RankGroup
from evenly.errors import EvenlyError, SpecError
from evenly.shards import full_state_dict, shard_model
from tests.ranks import RankError, run_ranks
from tests.shards.attacks import ATTACKS, REFUSED, Act, X

QUICK = {  # the faults that were found, and one of each other kind
    "activation replaced", "constant in forward", "forward hook", "functional call after",
    "hook inside", "hook on all modules", "keeps a loss", "parametrized after", "plain", "plain tensor changed",
    "returns a weight", "sync batch norm", "unregistered", "vmap", "weights tied after", "whole parameter outside",
}  # fmt: skip


def build(kind: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind().to(dtype)


def verdict(kind: Callable[[], nn.Module], act: Act, example: Any = X, dtype: torch.dtype = torch.float64) -> str:
    """Returns "exact" or "refused"; anything else says what is wrong."""
    try:
        plain = build(kind, dtype)
        truth = _flat(act(plain)), plain.state_dict()
    except Exception as error:
        return f"one device: {type(error).__name__}: {error}"

    given = [build(kind, dtype) for _ in range(2)]  # ranks are threads, which share torch's generator

    def on_rank(rank_group: RankGroup) -> Any:
        model = shard_model(given[rank_group.rank], example, rank_group=rank_group, shares=[3, 1], timeout_s=15.0)
        try:
            found = _flat(act(model))
            return found, full_state_dict(model)["model"]
        finally:
            model.close()

    try:
        results = run_ranks(2, on_rank, limit_s=50.0)
    except RankError as caught:
        errors = caught.errors
        if all(isinstance(error, EvenlyError) for error in errors):
            return "refused"
        return f"{[f'{type(e).__name__}: {str(e)[:300]}' for e in errors]}"
    for outputs, state in results:
        if len(outputs) != len(truth[0]) or list(state) != list(truth[1]):
            return f"other outputs or names: {len(outputs)} {len(truth[0])} {list(state)}"
        pairs = [(str(n), *pair) for n, pair in enumerate(zip(outputs, truth[0], strict=True))]
        for name, one, other in [*pairs, *((name, state[name], truth[1][name]) for name in state)]:
            if one.shape != other.shape or not torch.allclose(one.double(), other.double(), rtol=1e-9, atol=1e-11):
                return f"wrong without a word: {name}"
    return "exact"


def _flat(result: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(result)
    return [leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ATTACKS])
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_cut_network_is_exact_or_refuses(name: str) -> None:
    assert verdict(*ATTACKS[name]) == ("refused" if name in REFUSED else "exact")


def test_forward_mode_is_refused() -> None:
    def on_rank(rank_group: RankGroup) -> None:
        model = shard_model(
            nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 4)).double(), X, rank_group=rank_group, shares=[3, 1]
        )
        with pytest.raises(SpecError, match="forward-mode autograd"):
            model(X)
        model.close()

    with torch.autograd.forward_ad.dual_level():  # one for all threads
        run_ranks(2, on_rank)
