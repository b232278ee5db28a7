"""The first batch of a cut network is compared with the uncut one, and the run is not disturbed by it."""

import copy
import logging
import threading
from typing import Any

import pytest
import torch
from torch import nn

from evenly.comm import MOVES, RankGroup
from evenly.errors import EvenlyError, MismatchError
from evenly.graph import trace_module
from evenly.layouts import lay_out
from evenly.nodes import join_nodes
from evenly.session import verifying
from evenly.session.verifying import verify_on_first_batch
from evenly.shards import join_shards
from evenly.shards.optim.optimizers import state_placement
from evenly.shards.verification import comparison
from evenly.spec import Exchange, Role, period_of
from tests.ranks import RankError, cluster_of, run_ranks

LOCK = threading.Lock()  # fx patches modules while it traces


def network(dtype: torch.dtype, *, always: bool = False) -> nn.Module:
    class Always(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(x, 0.2)

    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.4),
        nn.Conv2d(8, 6, 3, padding=1), nn.ReLU(), Always() if always else nn.Identity(), nn.Flatten(),
        nn.Linear(6 * 16, 5),
    ).to(dtype)  # fmt: skip


def batch(dtype: torch.dtype, number: int) -> torch.Tensor:
    return torch.randn(6, 2, 4, 4, generator=torch.Generator().manual_seed(number)).to(dtype)


def train(
    rank_group: RankGroup,
    dtype: torch.dtype = torch.float64,
    shares: tuple[int, ...] = (2, 1),
    verify: bool = True,
    role: Role | None = None,
    **options: Any,
) -> list[torch.Tensor]:
    """Returns the parts, and the outputs of some steps."""
    with LOCK:
        model = network(dtype, **options)
        traced = trace_module(copy.deepcopy(model), batch(dtype, 0))
    if rank_group.rank > 0:  # all ranks take those of rank 0
        nn.init.zeros_(model[0].weight)
    sharded = join_shards(traced, lay_out(traced.graph, shares), rank_group=rank_group, timeout_s=30)
    if verify:
        verify_on_first_batch(model, sharded, role)
    optimizer = torch.optim.Adam(sharded.parameters(), lr=0.01)
    outputs = []
    try:
        for number in range(3):
            output = sharded(batch(dtype, number))
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            outputs.append(output.detach().clone())
        return [x.detach().clone() for x in (*sharded.parameters(), *sharded.buffers())] + outputs
    finally:
        sharded.close()


@pytest.mark.parametrize(
    ("dtype", "shares"), [(torch.float64, (2, 1)), (torch.float32, (3, 0, 1)), (torch.bfloat16, (2, 1))]
)
def test_a_run_is_the_same_to_the_last_bit(
    dtype: torch.dtype, shares: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=verifying.__name__)
    truth = run_ranks(len(shares), train, dtype, shares, False)
    assert not caplog.messages
    found = run_ranks(len(shares), train, dtype, shares)
    for mine, other in zip(found, truth, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(mine, other, strict=True))
    assert len(caplog.messages) == len(shares)  # once on each rank
    assert all("the same as the uncut one" in text and "verify=False" in text for text in caplog.messages)


@pytest.mark.parametrize("shares", [(2, 1), (3, 0, 1)])
def test_a_network_that_differs_is_refused_on_all_ranks_with_the_layer(
    shares: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MOVES, "reduce", ("same", "same"))
    with pytest.raises(RankError, match="gradients of the outputs"):  # what is seen without it: ranks that differ
        run_ranks(len(shares), train, torch.float64, shares, False)
    with pytest.raises(RankError) as caught:
        run_ranks(len(shares), train, torch.float64, shares)
    for error in caught.value.errors:
        assert isinstance(error, MismatchError)
        assert "first at '" in str(error)
        assert "verify=False" in str(error)


def test_short_numbers_that_differ_are_compared_again_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = run_ranks(2, train, torch.float32, (2, 1), False)
    monkeypatch.setitem(comparison.RTOL, 4, 1e-30)
    for mine, other in zip(run_ranks(2, train, torch.float32), truth, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(mine, other, strict=True))


@pytest.mark.parametrize(
    ("role", "options", "reason"),
    [
        (Role(rank=0, node=0, free_bytes=10_000, memory_bytes=9_000), {}, "GB are left"),
        (None, {"always": True}, "is on in every mode"),
    ],
)
def test_where_it_cannot_be_compared_the_run_goes_on(
    role: Role | None, options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=verifying.__name__)
    shares = (2, 0, 1)

    def act(rank_group: RankGroup) -> None:
        train(rank_group, shares=shares, role=role if rank_group.rank == 0 else None, **options)

    run_ranks(len(shares), act)
    assert any(reason in text for text in caplog.messages)
    assert all("not compared" in text for text in caplog.messages)


REPLICAS = (((0, 1), (2, 1)), ((2, 3, 4), (1, 0, 3)))  # ranks that hold one network, and their shares


def train_replicas(rank_group: RankGroup, verify: bool, autocast: bool = False) -> list[torch.Tensor]:
    """Returns the parts after some steps of two replicas of one node, which average their gradients."""
    number = 0 if rank_group.rank in REPLICAS[0][0] else 1
    ranks, shares = REPLICAS[number]
    dtype = torch.float32 if autocast else torch.float64
    with LOCK:
        model = network(dtype)
        model[3].p = 0.0
        traced = trace_module(copy.deepcopy(model), batch(dtype, 0))
    layout = lay_out(traced.graph, shares)
    sharded = join_shards(traced, layout, rank_group=rank_group.among(ranks, f"replica{number}"), timeout_s=30)
    if verify:
        verify_on_first_batch(model, sharded, None)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.05)
    joined = join_nodes(
        sharded, optimizer, rank_group=rank_group, cluster=cluster_of([[0, 1, 2, 3, 4]]), period=period_of(2),
        exchange=Exchange(timeout_s=30.0), state_placement=state_placement,
    )  # fmt: skip
    try:
        for step in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = joined(batch(dtype, 2 * step + number)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [x.detach().clone() for x in (*sharded.parameters(), *sharded.buffers())]
    finally:
        joined.close()
        sharded.close()


@pytest.mark.parametrize("autocast", [False, True], ids=["float64", "autocast"])
def test_replicas_that_are_cut_differently_are_compared_each_and_train_as_without(
    autocast: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=verifying.__name__)
    truth = run_ranks(5, train_replicas, False, autocast)
    assert not caplog.messages
    found = run_ranks(5, train_replicas, True, autocast)
    for mine, other in zip(found, truth, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(mine, other, strict=True))
    assert sum("the same as the uncut one" in text for text in caplog.messages) == 5


def test_one_replica_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = verifying.take_weights

    def spoiled(model: nn.Module, sharded: Any) -> None:
        plain(model, sharded)
        if len(sharded.layout.shares) == 3:
            nn.init.zeros_(model[0].bias)

    monkeypatch.setattr(verifying, "take_weights", spoiled)
    with pytest.raises(RankError) as caught:
        run_ranks(5, train_replicas, True)
    assert all(isinstance(error, EvenlyError) for error in caught.value.errors)
    assert all(isinstance(error, MismatchError) for error in caught.value.errors[2:])
