"""What loops do to a network while an exchange is under way, and calls in places where they mean nothing."""

import math
from contextlib import closing
from functools import partial

import pytest
import torch
from torch import nn

from evenly.errors import NonFiniteError, SpecError
from evenly.exchange import add_codec
from evenly.exchange.codecs import Codec
from evenly.spec import Exchange, Outer
from tests.nodes.test_corners import errors_of, join, linear
from tests.ranks import ragged, run_ranks


@pytest.mark.parametrize("exchange", [{"overlap": 1}, {"overlap": 2, "fragments": 2, "codec": "int8"}])
@pytest.mark.parametrize("optimizer_state", ["keep", "average"])
def test_tensors_that_are_replaced_during_an_exchange_get_what_was_agreed(exchange, optimizer_state):
    def act(rank_group, *, replaces):
        model = linear()
        own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        settings = {**exchange, "optimizer_state": optimizer_state}
        synchronized, optimizer = join(rank_group, ragged(1, 1), model, every=3, optimizer=own, **settings)
        for step in range(8):
            synchronized(torch.full((2, 4), step + rank_group.rank + 1.0)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for parameter in model.parameters() if replaces else ():
                parameter.data = parameter.data.clone()
                state = optimizer.state[parameter]
                state["momentum_buffer"] = state["momentum_buffer"].clone()
        synchronized.finish()
        synchronized.close()
        return [parameter.tolist() for parameter in model.parameters()]

    still = run_ranks(2, lambda rank_group: act(rank_group, replaces=False))
    assert run_ranks(2, lambda rank_group: act(rank_group, replaces=True)) == still


@pytest.mark.parametrize("overlap", [0, 1])
def test_parameters_that_share_memory_are_merged_once(overlap):
    def act(rank_group):
        model = nn.ModuleList([linear(), linear()])
        model[1].weight.data = model[0].weight.data
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        synchronized, _ = join(rank_group, ragged(1, 1), Sum(model), every=2, optimizer=optimizer, overlap=overlap)
        model[0].weight.data.fill_(float(rank_group.rank))
        for _ in range(3):
            synchronized(torch.ones(2, 4)).mean().backward()
            optimizer.step()
        synchronized.close()
        return model[1].weight.tolist()

    assert run_ranks(2, act) == [[[0.5] * 4]] * 2


class Sum(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return sum(layer(x) for layer in self.layers)


@pytest.mark.parametrize("call", ["finish", "end_epoch", "prepare_checkpoint", "step"])
def test_inside_agreed_nothing_goes_on(call):
    def act(rank_group):
        synchronized, optimizer = join(rank_group, ragged(1, 1), linear(), every=3, overlap=2)
        for _ in range(4):
            synchronized(torch.full((2, 4), rank_group.rank + 1.0)).mean().backward()
            optimizer.step()
        with synchronized.agreed():
            outside = synchronized.module.weight.tolist()
            with synchronized.agreed():
                assert synchronized.module.weight.tolist() == outside
            with pytest.raises(SpecError, match=r"inside agreed\(\)"):
                optimizer.step() if call == "step" else getattr(synchronized, call)()
        synchronized.finish()
        synchronized.close()
        return outside

    first, second = run_ranks(2, act)
    assert first == second


@pytest.mark.parametrize("count", [-1, math.nan, math.inf, None, "many"])
def test_a_count_that_is_no_number_of_samples_is_refused(count):
    def act(rank_group):
        counts = {"count": lambda x: count} if rank_group.rank == 0 else {}
        synchronized, optimizer = join(rank_group, ragged(2), linear(), timeout_s=20.0, **counts)
        with closing(synchronized):
            for _ in range(3):
                synchronized(torch.ones(2, 4)).mean().backward()
                optimizer.step()

    first, second = errors_of(2, act)
    assert isinstance(first, SpecError)
    assert "count=" in str(first)
    assert "count=" in str(second)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("exchange", [{}, {"overlap": 1}, {"codec": "bf16"}])
def test_a_parameter_that_became_nan_is_not_merged(exchange, value):
    ends = {}

    def act(rank_group):
        model = linear(300)
        synchronized, optimizer = join(rank_group, ragged(1, 1), model, every=3, **exchange)
        with closing(synchronized):
            for step in range(5):
                synchronized(torch.ones(2, 300)).mean().backward()
                optimizer.step()
                if step == 1 and rank_group.rank == 0:
                    model.weight.data[0, 7] = value
                ends[rank_group.rank] = model.weight.detach().clone()

    errors = errors_of(2, act)
    assert any(isinstance(error, NonFiniteError) for error in errors)
    assert all(error is not None for error in errors)
    assert ends[1].isfinite().all()


def test_a_slot_that_the_optimizer_has_not_is_named():
    def act(rank_group):
        model = linear()
        adam = torch.optim.Adam(model.parameters())
        synchronized, _ = join(rank_group, ragged(1, 1), model, optimizer=adam, optimizer_state={"exp_agv": "average"})
        with closing(synchronized):
            for _ in range(2):
                synchronized(torch.ones(2, 4)).mean().backward()
                adam.step()

    for error in errors_of(2, act):
        assert "'exp_agv', but Adam has exp_avg, exp_avg_sq, step" in str(error)


@pytest.mark.parametrize(
    ("kind", "settings", "slot"),
    [("Rprop", {}, "step_size"), ("NAdam", {}, "mu_product"), ("Adagrad", {"initial_accumulator_value": 0.1}, "sum")],
)
def test_state_that_does_not_begin_at_zero_is_not_reset(kind, settings, slot):
    def act(rank_group, policy):
        model = linear()
        own = getattr(torch.optim, kind)(model.parameters(), **settings)
        join(rank_group, ragged(1), model, optimizer=own, optimizer_state=policy)

    for policy in ("reset", {slot: "reset"}):
        (error,) = errors_of(1, partial(act, policy=policy))
        assert f"resets '{slot}' of {kind}" in str(error)


def test_an_outer_optimizer_has_its_own_settings():
    assert Exchange(outer="nesterov").outer == Outer()
    assert Outer().settings["nesterov"] is True
    assert Exchange(outer={"name": "Adam"}).outer == Outer("Adam", settings={})
    for wish in ("adam", torch.optim.SGD):
        with pytest.raises(SpecError, match="'nesterov', or such as"):
            Exchange(outer=wish)
    with pytest.raises(SpecError, match="needs its learning rate"):
        Outer("SGD")


def test_codecs_that_change_what_they_are_given_or_the_length_are_refused():
    def bytes_of(x):
        return x.half().view(torch.uint8)

    def floats_of(code, size):
        return code.view(torch.float16).float()

    with pytest.raises(SpecError, match="changes the values"):
        add_codec("in place", lambda x: bytes_of(x.mul_(2)), floats_of)
    shortened = Codec(lambda x: bytes_of(x[x < 2]), floats_of)
    assert len(shortened.code_of(torch.ones(5))) == 10
    with pytest.raises(SpecError, match="8 bytes of 5 values"):
        shortened.code_of(torch.tensor([1.0, 1.0, 1.0, 1.0, 3.0]))
