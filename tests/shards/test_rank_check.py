"""Ranks of a cut network that no longer do the same hear of it soon, by name, and on all of them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer

from evenly.comm import RankGroup
from evenly.errors import MismatchError, PeerError, SpecError
from evenly.graph import trace_module
from evenly.layouts import lay_out
from evenly.shards import Sharded, full_state_dict, join_shards, local_shard_of, verify
from evenly.shards.run.rank_check import EVERY
from tests.ranks import RankError, run_ranks

LOCK = threading.Lock()  # ranks are threads: torch's generator is one for all, and fx patches modules while it traces
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 3, 0, 1])


def build() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.LayerNorm(12), nn.Linear(12, 4)).double()


@contextmanager
def cut(rank_group: RankGroup) -> Iterator[tuple[nn.Module, Sharded]]:
    with LOCK:
        model = build()
        traced = trace_module(model, X)
    sharded = join_shards(
        traced, lay_out(traced.graph, [60, 40][: rank_group.size]), rank_group=rank_group, timeout_s=20
    )
    try:
        yield model, sharded
    finally:
        sharded.close()


def train(rank_group: RankGroup, disturb: Callable[..., Any], passes: int) -> None:
    with cut(rank_group) as (_, model):
        take_steps(model, disturb, passes, rank=rank_group.rank)


def trained(rank_group: RankGroup, disturb: Callable[..., Any], passes: int) -> dict[str, torch.Tensor]:
    """Returns the weights of the whole network after training."""
    with cut(rank_group) as (_, model):
        take_steps(model, disturb, passes, rank=rank_group.rank)
        return full_state_dict(model)["model"]


def take_steps(model: nn.Module, disturb: Callable[..., Any], passes: int, *, rank: int) -> None:
    """Trains; `disturb(rank, step, optimizer, model)` may return other labels, or False to leave the step out."""
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in range(passes):
        wish = disturb(rank, step, optimizer, model)
        optimizer.zero_grad()
        cross_entropy(model(X), wish if isinstance(wish, torch.Tensor) else LABELS).backward()
        if wish is not False:
            optimizer.step()


def leave_out_a_step(rank: int, step: int, *_: Any) -> bool:
    return not (rank == 1 and step == 1)


def change_the_rate(rank: int, step: int, optimizer: Optimizer, _: nn.Module) -> None:
    if rank == 1 and step == 1:
        optimizer.param_groups[0]["lr"] = 2e-2


def other_labels(rank: int, *_: Any) -> torch.Tensor:
    return LABELS if rank == 0 else LABELS.flip(0)


def one_other_label(rank: int, *_: Any) -> torch.Tensor:
    return LABELS if rank == 0 else LABELS.clone().index_fill(0, torch.tensor([5]), 2)


def write_by_hand(rank: int, step: int, _: Optimizer, model: nn.Module) -> None:
    if rank == 1 and step == 1:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.mul_(1.5)


@pytest.mark.parametrize(
    ("disturb", "words"),
    [
        (leave_out_a_step, r"unequal numbers of optimizer steps before pass 3: \{0: 2, 1: 1\}"),
        (change_the_rate, r"different optimizer settings.*learning rates.*0.02"),
        (other_labels, "gradients of the outputs"),
        (one_other_label, "gradients of the outputs"),
        (write_by_hand, "values of '|gradients of the outputs"),
    ],
)
def test_ranks_that_do_not_do_the_same_are_told(disturb: Callable[..., Any], words: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, train, disturb, EVERY + 1)
    for error in caught.value.errors:
        assert isinstance(error, MismatchError | PeerError), error
    assert any(isinstance(error, MismatchError) for error in caught.value.errors)
    with pytest.raises(MismatchError, match=words):
        raise next(error for error in caught.value.errors if isinstance(error, MismatchError))


def test_a_late_difference_shows_when_the_state_is_collected() -> None:
    def act(rank_group: RankGroup) -> None:
        with cut(rank_group) as (_, model):
            optimizer = SGD(model.parameters(), lr=0.1)
            for step in range(6):
                optimizer.zero_grad()
                cross_entropy(model(X), LABELS).backward()
                if rank_group.rank == 0 or step < 5:
                    optimizer.step()
            full_state_dict(model)

    with pytest.raises(RankError, match=r"unequal numbers of optimizer steps when their state was collected"):
        run_ranks(2, act)


def test_ranks_that_do_the_same_are_left_alone() -> None:
    def changed_alike(rank: int, step: int, optimizer: Optimizer, _: nn.Module) -> None:
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)

    plain = build()
    take_steps(plain, changed_alike, EVERY + 1, rank=0)
    for weights in run_ranks(2, trained, changed_alike, EVERY + 1):
        torch.testing.assert_close(dict(weights), dict(plain.state_dict()))


def test_nan_on_all_ranks_is_no_difference() -> None:
    def spoil(rank: int, step: int, _: Optimizer, model: nn.Module) -> None:
        if step == 1:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float("nan"))

    for weights in run_ranks(2, trained, spoil, 5):
        assert all(bool(value.isnan().all()) for value in weights.values())


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_optimizer_of_the_uncut_network_is_refused(ranks: int) -> None:
    def act(rank_group: RankGroup) -> None:
        with cut(rank_group) as (plain, model):
            optimizer = SGD(plain.parameters(), lr=0.1)
            cross_entropy(model(X), LABELS).backward()
            with pytest.raises(SpecError, match=r"before evenly.shard cut it.*Make the optimizer after evenly.shard"):
                optimizer.step()
            cross_entropy(plain(X), LABELS).backward()  # as a reference it may be trained
            optimizer.step()
            cross_entropy(model(X), LABELS).backward()
            SGD(model.parameters(), lr=0.1).step()

    run_ranks(ranks, act)


def test_an_optimizer_that_stepped_before_its_network_was_cut_is_refused() -> None:
    """Another cut network had all optimizers checked already then."""

    def act(rank_group: RankGroup) -> None:
        with cut(rank_group):
            with LOCK:
                plain = build()
                traced = trace_module(plain, X)
            optimizer = SGD(plain.parameters(), lr=0.1)
            cross_entropy(plain(X), LABELS).backward()
            optimizer.step()
            optimizer.zero_grad()
            layout = lay_out(traced.graph, [60, 40])
            model = join_shards(traced, layout, rank_group=rank_group.scoped("second"), timeout_s=20)
            cross_entropy(model(X), LABELS).backward()
            with pytest.raises(SpecError, match=r"before evenly\.shard cut it"):
                optimizer.step()
            model.close()

    run_ranks(2, act)


def test_calling_the_uncut_network_is_refused_at_the_step() -> None:
    def act(rank_group: RankGroup) -> None:
        with cut(rank_group) as (plain, model):
            optimizer = SGD(model.parameters(), lr=0.1)
            cross_entropy(plain(X), LABELS).backward()
            with pytest.raises(
                SpecError, match=r"was not called since the last step.*Call the module that evenly.shard returned"
            ):
                optimizer.step()

    run_ranks(2, act)


def test_an_empty_batch_is_compared_too() -> None:
    def act(rank_group: RankGroup) -> None:
        with cut(rank_group) as (_, model):
            for _ in range(4):
                model(X[:0]).sum().backward()

    run_ranks(2, act)


class TwoOutputs(nn.Module):
    """Returns two results of one operation, of which a loss may leave out one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        used, _ = self.first(x).split(6, dim=1)
        deviation, mean = torch.std_mean(used, dim=1, keepdim=True)
        return deviation, mean, *self.last(self.first(x)).split(3, dim=1)


def test_outputs_of_one_operation_may_be_left_out_of_the_loss() -> None:
    torch.manual_seed(0)
    model = TwoOutputs().double()
    traced = trace_module(model, X)
    layout = lay_out(traced.graph, [60, 40])

    def act(rank_group: RankGroup) -> list[torch.Tensor]:
        sharded = join_shards(traced, layout, rank_group=rank_group, timeout_s=20)
        try:
            for _ in range(3):
                deviation, _, left, _ = sharded(X)
                (deviation.sum() + left.square().sum()).backward()
            assert verify(model, sharded, X).ok
            return [local_shard_of(p).full(p.grad) for p in sharded.parameters()]  # type: ignore[union-attr,arg-type]
        finally:
            sharded.close()

    gradients = run_ranks(2, act)
    for _ in range(3):
        deviation, _, left, _ = model(X)
        (deviation.sum() + left.square().sum()).backward()
    for ours in gradients:
        torch.testing.assert_close(ours, [p.grad for p in model.parameters()], rtol=1e-9, atol=1e-9)
