"""Networks, optimizers and ranks that cannot take part, or only in their own way."""

import copy
import gc
import pickle
import threading
import time
import weakref
from contextlib import closing

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evenly.errors import LockstepError, PeerError, SpecError
from evenly.exchange.anchors import Anchors
from evenly.exchange.tensors.buffer_policies import policies_of
from evenly.nodes import join_nodes
from evenly.nodes.checks import require_dense, require_plain
from evenly.session.by_hand import survey_rank_group
from evenly.spec import Adaptive, EverySeconds, Exchange, Outer, period_of
from tests.nodes.test_corners import join, linear
from tests.nodes.test_faults import failing
from tests.ranks import cluster_of, ragged, run_ranks


def train(synchronized, optimizer, steps, rank):
    for _ in range(steps):
        synchronized(torch.full((2, 4), rank + 1.0)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "meet",
    [
        lambda rank_group: join(rank_group, ragged(1, 1), linear(), timeout_s=1.0),
        lambda rank_group: survey_rank_group(rank_group, torch.device("cpu"), timeout_s=1.0),
    ],
    ids=["synchronize", "discover"],
)
def test_a_rank_that_comes_after_the_others_gave_up_learns_it_at_once(meet):
    gave_up, waited = threading.Event(), []

    def act(rank_group):
        if rank_group.rank == 1:
            gave_up.wait(20)
        began = time.monotonic()
        try:
            meet(rank_group)
        finally:
            waited.append(time.monotonic() - began)
            gave_up.set()

    first, second = failing(2, act)
    assert waited[1] < 10
    assert isinstance(first, PeerError)
    assert isinstance(second, PeerError)
    assert "ranks [1] did not arrive" in str(second)


def test_agreed_on_one_rank_and_finish_on_another_are_told():
    def act(rank_group):
        synchronized, optimizer = join(rank_group, ragged(1, 1), linear(), every=4, codec="int8")
        train(synchronized, optimizer, 2, rank_group.rank)
        with closing(synchronized):
            if rank_group.rank:
                synchronized.finish()
            with synchronized.agreed():
                pass

    for error in failing(2, act):
        assert isinstance(error, LockstepError)
        assert "agreed()" in str(error)


def test_averaged_state_that_a_node_has_not_is_told():
    class Choosing(nn.Module):
        def __init__(self, chosen):
            super().__init__()
            self.layers, self.chosen = nn.ModuleList([linear(), linear()]), chosen

        def forward(self, x):
            return sum(self.layers[i](x) for i in self.chosen)

    def act(rank_group):
        model = Choosing([0] if rank_group.rank else [0, 1])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        synchronized = join_nodes(
            model,
            optimizer,
            rank_group=rank_group,
            cluster=cluster_of(ragged(1, 1)),
            period=period_of(2),
            exchange=Exchange(optimizer_state="average"),
            find_unused_parameters=True,
        )
        with closing(synchronized):
            train(synchronized, optimizer, 2, rank_group.rank)

    for error in failing(2, act):
        assert "have not used a parameter yet" in str(error)


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.int8, torch.int64, torch.bool])
@pytest.mark.parametrize("overlap", [0, 1])
def test_counters_of_any_type_become_the_largest(dtype, overlap):
    def act(rank_group):
        model = linear()
        model.register_buffer("seen", torch.zeros(3).to(dtype))
        synchronized, optimizer = join(rank_group, ragged(2, 1), model, every=2, overlap=overlap)
        model.seen.copy_(torch.tensor([0, rank_group.rank, 7 * (rank_group.rank == 1)]))
        train(synchronized, optimizer, 3, rank_group.rank)
        synchronized.finish()
        synchronized.close()
        return model.seen.long().tolist()

    expected = [0, 1, 1] if dtype == torch.bool else [0, 2, 7]
    assert run_ranks(3, act) == [expected] * 3


@pytest.mark.parametrize("grows", [False, True])
def test_buffers_that_come_later_are_named(grows):
    def act(rank_group):
        model = linear()
        if grows:
            model.register_buffer("queue", torch.zeros(2))
        synchronized, optimizer = join(rank_group, ragged(1, 1), model, every=2)
        model.register_buffer("queue", torch.zeros(3))
        with closing(synchronized):
            train(synchronized, optimizer, 2, rank_group.rank)

    for error in failing(2, act):
        assert isinstance(error, SpecError)
        assert "'queue'" in str(error)


def test_sparse_gradients_and_buffers_of_eight_bits_are_refused():
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    with pytest.raises(SpecError, match="'0' are sparse"):
        require_dense(model)
    require_dense(model.requires_grad_(False))
    model = linear()
    model.register_buffer("scale", torch.zeros(2).to(torch.float8_e4m3fn))
    with pytest.raises(SpecError, match=r"'scale' of torch\.float8"):
        policies_of(model, Exchange())
    assert policies_of(model, Exchange(buffers="first")) == {"scale": "first"}


def test_a_synchronized_model_is_neither_synchronized_again_nor_copied():
    def act(rank_group):
        synchronized, _ = join(rank_group, ragged(1), linear())
        with pytest.raises(SpecError, match=r"its \.module"):
            require_plain(synchronized)
        with pytest.raises(SpecError, match="holds connections"):
            copy.deepcopy(synchronized)
        with pytest.raises(SpecError, match="holds connections"):
            pickle.dumps(synchronized)
        synchronized.close()

    run_ranks(1, act)
    inside = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(inside)
    for given, where in ((inside, ""), (nn.Sequential(inside), " inside, as '0'")):
        with pytest.raises(SpecError, match=f"DistributedDataParallel{where}"):
            require_plain(given)


def test_a_closed_model_that_is_let_go_takes_its_groups_along():
    def act(rank_group):
        synchronized, optimizer = join(rank_group, ragged(2), linear())
        train(synchronized, optimizer, 2, rank_group.rank)
        synchronized.finish()
        synchronized.close()
        return weakref.ref(synchronized._gradients._ddp)

    kept = run_ranks(2, act)
    DistributedDataParallel._active_ddp_module = None  # of two threads in forward one may leave the other's here
    until = time.monotonic() + 20  # a thread of torch may still hold the last average
    while any(ddp() is not None for ddp in kept) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.05)
    assert [ddp() for ddp in kept] == [None, None]


@pytest.mark.parametrize(
    "outer",
    [
        Outer("Adam", settings={"lr": 0.1, "betas": (0.9,)}),
        Outer(
            "SGD", settings={"lr": 0.1, "momentum": 0.9, "dampening": "none"}
        ),  # torch looks at it in the second step
    ],
)
def test_settings_of_the_outer_optimizer_are_tried_at_once(outer):
    with pytest.raises(SpecError, match=f"the outer optimizer {outer.name}"):
        Anchors(Exchange(outer=outer))


def test_times_and_budgets_that_no_clock_knows_are_refused():
    with pytest.raises(SpecError, match="timeout_s"):
        Exchange(timeout_s=1e30)
    with pytest.raises(SpecError, match="exchange_budget"):
        Adaptive(exchange_budget=5e-324)


@pytest.mark.parametrize(("wish", "seconds"), [("30s", 30), ("2m", 120), ("2 min", 120), ("0.5h", 1800)])
def test_periods_in_time_have_units(wish, seconds):
    assert period_of(wish) == EverySeconds(seconds)
