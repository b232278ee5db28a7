"""LSTM, GRU and RNN cut by units: exact, with the messages that were predicted, chosen where they are faster."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenly.comm import RankGroup
from evenly.errors import SpecError
from evenly.graph import trace, trace_module
from evenly.layouts import TransferCosts, lay_out, relaid
from evenly.shards import Sharded, full_state_dict, join_shards, local_shard_of, reshard, verify
from evenly.spec import Device
from evenly.spec.layout import Layout
from tests.ranks import run_ranks
from tests.shards.compare import compare
from tests.shards.test_state import adam, agree, train

BY_UNITS = {"recurrent": ["units"]}
SEQUENCES = torch.randn(3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()


class Outputs(nn.Module):
    """A recurrent module between linear layers; all of its outputs are used."""

    def __init__(self, kind: Callable[..., nn.RNNBase], *, given: bool = False, units: int = 7, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(6, units, batch_first=options.pop("batch_first", True), **options)
        rows = self.rnn.num_layers * (2 if self.rnn.bidirectional else 1)
        self.first, self.start = nn.Linear(6, 6), nn.Parameter(torch.randn(2, rows, 1, units) / 2) if given else None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        is_lstm = self.rnn.mode == "LSTM"
        if self.start is None:
            y, last = self.rnn(self.first(x))
        else:
            samples = x.shape[0 if self.rnn.batch_first else 1]
            hidden, cells = self.start[0].expand(-1, samples, -1), self.start[1].expand(-1, samples, -1)
            y, last = self.rnn(self.first(x), (hidden, cells) if is_lstm else hidden)
        return (y, *last) if is_lstm else (y, last)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": partial(Outputs, nn.LSTM),
    "LSTM of 2 layers, steps first": partial(Outputs, nn.LSTM, num_layers=2, batch_first=False),
    "LSTM of both directions, given states": partial(Outputs, nn.LSTM, num_layers=2, bidirectional=True, given=True),
    "GRU of both directions": partial(Outputs, nn.GRU, num_layers=2, bidirectional=True, bias=False),
    "GRU, given states": partial(Outputs, nn.GRU, given=True),
    "RNN": partial(Outputs, nn.RNN, num_layers=2),
    "RNN with relu": partial(Outputs, nn.RNN, nonlinearity="relu", given=True),
}


@pytest.mark.parametrize("name", KINDS)
def test_units_are_computed_by_the_rank_that_holds_them(name: str) -> None:
    layout = compare(lambda: KINDS[name]().double(), SEQUENCES, [5, 3, 1], modes=BY_UNITS)
    (choice,) = [choice for choice in layout.choices if choice.op == "recurrent"]
    assert choice.mode == "units"
    assert " 4 / 2 / 1 of 7 units" in layout.explain() or " 8 / 4 / 2 of 14 units" in layout.explain()


def test_a_network_that_is_nothing_but_a_recurrent_module() -> None:
    layout = compare(lambda: nn.GRU(6, 7, batch_first=True).double(), SEQUENCES, [2, 1], modes=BY_UNITS)
    assert " 5 / 2 of 7 units" in layout.explain()


@pytest.mark.parametrize("shares", [[9, 1, 1], [2, 0, 3]])
def test_ranks_without_units_or_without_a_share(shares: list[float]) -> None:
    build = lambda: Outputs(nn.LSTM, units=3, num_layers=2).double()  # noqa: E731
    layout = compare(build, SEQUENCES.detach(), shares, modes=BY_UNITS)
    assert (" 3 / 0 / 0 of 3 units; nothing for ranks [1, 2]" in layout.explain()) == (shares[0] == 9)


class Chain(nn.Module):
    """Dropout between layers, a module called twice with states that go on, one tensor for hidden states and cells."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(6, 5, num_layers=2, batch_first=True, dropout=0.1)
        self.decoder, self.head = nn.LSTM(6, 5, num_layers=2, batch_first=True), nn.Linear(5, 4)
        self.encoder.dropout = 1e-30  # as good as none: its masks are ours, not torch's

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.decoder.flatten_parameters()
        start = x.new_zeros(2, x.shape[0], 5)
        encoded, states = self.encoder(x, (start, start))
        decoded, states = self.decoder(x, states)
        return self.head(self.decoder(x, states)[0]) + self.head(decoded), encoded.mean(1)


def test_layers_with_dropout_between_them_and_states_that_go_on() -> None:
    modes = {name: ["units"] for name in ("recurrent", "recurrent_1", "recurrent_2", "recurrent_3")}
    layout = compare(lambda: Chain().double(), SEQUENCES.detach(), [5, 3, 1], modes=modes)
    assert [choice.mode for choice in layout.choices if choice.op == "recurrent"] == ["units"] * 4
    assert not any("weight" in move.tensor for move in layout.moves if "decoder" in move.tensor)


def test_a_layer_without_gradients_sends_nothing_in_backward() -> None:
    def frozen() -> nn.Module:
        model = Outputs(nn.GRU, num_layers=2).double()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("_l1"))
        return model

    layout = compare(frozen, SEQUENCES.detach(), [2, 1], modes=BY_UNITS)
    (choice,) = [choice for choice in layout.choices if choice.op == "recurrent"]
    assert choice.messages == 4 + 2 * 3


def test_gradients_of_gradients() -> None:
    def penalty(model: nn.Module) -> Tensor:
        x = SEQUENCES.detach().clone().requires_grad_()
        loss = sum(y.sin().sum() for y in model(x))
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        slope.square().sum().backward()
        assert x.grad is not None
        return x.grad

    torch.manual_seed(0)
    model = Outputs(nn.GRU, num_layers=2).double()
    traced = trace_module(model, SEQUENCES)
    layout = lay_out(traced.graph, [3, 1], modes=BY_UNITS)

    def act(rank_group: RankGroup) -> tuple[Tensor, list[Tensor]]:
        sharded = join_shards(traced, layout, rank_group=rank_group)
        try:
            slope = penalty(sharded)
            return slope, [local_shard_of(p).full(p.grad) for p in sharded.parameters()]  # type: ignore[union-attr,arg-type]
        finally:
            sharded.close()

    truth = penalty(model)
    for slope, gradients in run_ranks(2, act):
        torch.testing.assert_close(slope, truth, rtol=1e-9, atol=1e-9)
        for ours, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad, rtol=1e-9, atol=1e-9)


def test_units_move_between_ranks_with_the_state_of_the_optimizer() -> None:
    torch.manual_seed(0)
    model = Outputs(nn.LSTM, num_layers=2).double()
    traced = trace_module(model, SEQUENCES)
    batches = [(torch.randn(3, steps, 6, dtype=torch.float64),) for steps in (4, 4, 2, 4)]
    first = lay_out(traced.graph, [5, 1, 1], modes=BY_UNITS)
    second = relaid(traced.graph, first, [0.2, 1, 3])

    def act(rank_group: RankGroup) -> dict[str, Any]:
        sharded: Sharded = join_shards(traced, first, rank_group=rank_group)
        try:
            assert verify(model, sharded, SEQUENCES.detach()).ok
            optimizer = adam(sharded.parameters())
            train(sharded, optimizer, batches[:1])
            reshard(sharded, optimizer, second)
            train(sharded, optimizer, batches[1:])
            return full_state_dict(sharded, optimizer)
        finally:
            sharded.close()

    states = run_ranks(3, act)
    optimizer = adam(model.parameters())
    train(model, optimizer, batches)
    truth = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert counts(first) != counts(second)
    for state in states:
        agree({key: state[key] for key in truth}, truth, 1e-9)


def counts(layout: Layout) -> list[int]:
    (choice,) = [choice for choice in layout.choices if choice.op == "recurrent"]
    return layout.cuts[choice.gives[0].cut].counts()


def mode_of(batch: int, steps: int, units: int, shares: list[float], rates: TransferCosts | None = None) -> str:
    with torch.device("meta"):
        model, example = nn.Sequential(nn.LSTM(units, units, batch_first=True)), torch.empty(batch, steps, units)
    layout = lay_out(trace(model, example), shares, rates=rates)
    (choice,) = [choice for choice in layout.choices if choice.op == "recurrent"]
    return choice.mode


def test_the_fastest_way_is_chosen_by_what_it_sends_and_repeats() -> None:
    assert mode_of(8, 32, 1024, [1, 1]) == "units"  # the gradients of many weights are not sent
    assert mode_of(1, 32, 1024, [97, 3]) == "units"  # one sample; whole, the slow rank would repeat all of it
    assert mode_of(32, 64, 512, [1, 1]) == "bystander"  # many steps
    assert mode_of(1, 32, 64, [1, 1]) == "whole"
    assert mode_of(8, 32, 1024, [1, 1], TransferCosts.of_devices([Device(kind="cuda")] * 2)) != "units"
    slow = TransferCosts(flops_per_step_message=1e10)
    assert mode_of(8, 32, 1024, [1, 1], slow) != "units"


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_projections_have_no_rule_and_explain_says_so() -> None:
    layout = lay_out(trace(nn.Sequential(nn.LSTM(6, 5, proj_size=3)), torch.zeros(4, 1, 6)), [2, 1])
    assert "LSTM with projections has no rule for its units" in layout.explain()


def test_other_lengths_keep_the_way_of_the_example() -> None:
    """What messages cost decides whether a layer is cut by units; for other lengths it is not asked again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LSTM(512, 512, batch_first=True))
    traced = trace_module(model, torch.randn(2, 16, 512))

    def modes_of(modes: dict[str, list[str]], steps: int) -> set[str]:
        layout = lay_out(traced.graph, [1, 1], modes=modes)
        batch = torch.randn(2, steps, 512)

        def act(rank_group: RankGroup) -> set[str]:
            sharded = join_shards(traced, layout, rank_group=rank_group)
            try:
                torch.testing.assert_close(sharded(batch)[0], model(batch)[0])
                layouts = [program.layout for program in sharded._variant_programs.values()]
                return {choice.mode for other in layouts for choice in other.choices if choice.op == "recurrent"}
            finally:
                sharded.close()

        (found, _) = run_ranks(2, act)
        return found

    assert modes_of(BY_UNITS, 40) == {"units"}
    assert "units" not in modes_of({"recurrent": ["bystander"]}, 2)


def test_weights_that_layers_share_send_what_was_predicted() -> None:
    def tied() -> nn.Module:
        model = Outputs(nn.GRU, num_layers=3, units=6).double()
        for layer in (1, 2):
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                setattr(model.rnn, f"{name}_l{layer}", getattr(model.rnn, f"{name}_l0"))
        return model

    layout = compare(tied, SEQUENCES.detach(), [2, 1], modes=BY_UNITS)
    (choice,) = [choice for choice in layout.choices if choice.op == "recurrent"]
    assert choice.messages == 2 * (4 + 4 + 3)


def test_a_sequence_without_steps_is_refused_with_words() -> None:
    traced = trace_module(nn.GRU(6, 7, batch_first=True).double(), SEQUENCES)
    layout = lay_out(traced.graph, [2, 1], modes=BY_UNITS)

    def act(rank_group: RankGroup) -> None:
        sharded = join_shards(traced, layout, rank_group=rank_group)
        try:
            with pytest.raises((SpecError, RuntimeError), match=r"without steps|sequence length"):
                sharded(SEQUENCES[:, :0])
        finally:
            sharded.close()

    run_ranks(2, act)


class StatesAsInputs(nn.Module):
    """Truncated backpropagation: the states of the chunk before are inputs, in torch's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 7, num_layers=2, batch_first=True), nn.Linear(7, 8)

    def forward(self, x: Tensor, hidden: Tensor, cells: Tensor) -> tuple[Tensor, ...]:
        y, states = self.rnn(x, (hidden, cells))
        return (self.head(y), *states) if isinstance(states, tuple) else (self.head(y), states)


def test_states_that_are_inputs_of_the_network() -> None:
    states = [torch.randn(2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (1, 2)]
    layout = compare(lambda: StatesAsInputs().double(), (SEQUENCES.detach(), *states), [2, 1], smaller=False)
    (choice,) = [choice for choice in layout.choices if choice.layer == "rnn"]
    assert choice.mode == "whole"
