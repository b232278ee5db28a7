"""What a cut network and its optimizer look up once may change afterwards, and is then seen."""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from evenly.errors import SpecError
from evenly.graph import trace, trace_module
from evenly.layouts import lay_out
from evenly.shards import join_shards
from evenly.shards.optim.probe import watch_optimizers
from evenly.shards.run.rank_check import digest
from tests.ranks import RankError, run_ranks

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Verbose(nn.Module):
    """A network with a flag that changes nothing that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.verbose = nn.Linear(6, 8), nn.Linear(8, 3), False

    def forward(self, x):
        y = self.first(x).relu()
        if self.verbose:
            list(range(2))
        return self.second(y)


class ByName(nn.Module):
    """A network whose forward takes its input by name only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, *, x):
        return self.layer(x)


def on_two_ranks(model, act, example=X):
    traced = trace_module(model, example)

    def run(rank_group):
        sharded = join_shards(traced, lay_out(traced.graph, [60, 40]), rank_group=rank_group, timeout_s=30.0)
        try:
            return act(sharded, rank_group.rank)
        finally:
            sharded.close()

    return run_ranks(2, run)


def test_a_flag_that_only_one_rank_sets_and_that_changes_nothing_is_left_alone():
    def act(sharded, rank):
        with torch.no_grad():
            before = sharded(X)
            if rank == 0:
                sharded.verbose = True
            return torch.equal(before, sharded(X))

    assert on_two_ranks(Verbose(), act) == [True, True]


def test_tables_of_parameters_that_are_replaced_are_read():
    def act(sharded, rank):
        with torch.no_grad():
            layer = sharded.second
            plain = {name: value.detach().as_subclass(torch.Tensor) for name, value in layer.named_parameters()}
            state = copy.copy(vars(layer))
            state["_parameters"] = {name: nn.Parameter(torch.zeros_like(value)) for name, value in plain.items()}
            layer.__setstate__(state)
            return float(sharded(X).abs().max())

    assert on_two_ranks(Verbose(), act) == [0.0, 0.0]


def test_different_labels_are_seen_however_large_the_outputs_are():
    x = torch.randn(32768, 8, generator=torch.Generator().manual_seed(0))
    labels = [torch.randint(1, 64, (32768,), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]

    def act(sharded, rank):
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.01)
        for _ in range(4):
            nn.functional.cross_entropy(sharded(x), labels[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(RankError, match="other gradients of the outputs than rank 0"):
        on_two_ranks(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 64)), act, x)


def test_a_digest_reads_all_columns():
    tables = [torch.randn(65536, 39, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    for table in tables:
        table[:, 0] = 1.0
    assert digest(tables[0]) != digest(tables[1])


def test_a_call_without_arguments_is_told_what_is_missing():
    def act(sharded, rank):
        assert sharded(x=X).shape == (4, 4)
        sharded()

    with pytest.raises(RankError, match="missing a required"):
        on_two_ranks(ByName(), act, {"x": X})


class KeepsItsStep(torch.optim.SGD):
    """An optimizer with an attribute that refers to it."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, lr=0.1)
        self.own_step = self.step


def test_optimizers_are_freed_also_if_their_hooks_or_attributes_refer_to_them():
    end = watch_optimizers()
    references = []
    try:
        for kind in (KeepsItsStep, torch.optim.Adam):
            parameter = nn.Parameter(torch.ones(2))
            optimizer = kind([parameter])
            optimizer.register_step_post_hook(lambda *_, owner=optimizer: owner)
            parameter.grad = torch.ones(2)
            optimizer.step()
            references += [weakref.ref(optimizer), weakref.ref(parameter)]
            del optimizer, parameter
        gc.collect()
        assert [reference() for reference in references] == [None] * 4
    finally:
        end()


def test_optimizers_that_have_nothing_to_do_with_a_cut_network_may_have_any_settings():
    end = watch_optimizers()
    try:
        parameter = nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        optimizer.param_groups[0]["odd"] = 10**400
        optimizer.step()
        optimizer.param_groups[0]["rates"] = torch.tensor([0.1, 0.2])
        optimizer.step()
        optimizer.param_groups.clear()
        optimizer.step()
    finally:
        end()


def test_a_trace_works_with_any_generator_of_numpy():
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        assert trace(Verbose(), X).layers
    finally:
        np.random.set_bit_generator(before)


def test_a_trace_under_a_profiler_that_records_frames_is_refused_in_words():
    with torch.profiler.profile(with_stack=True), pytest.raises(SpecError, match="with_stack=False"):
        trace(Verbose(), X)
    assert trace(Verbose(), X).layers
