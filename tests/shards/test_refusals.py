"""What tracing could lose without a word is kept, or refused by name; ranks that part are told."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from evenly import trace
from evenly.comm import RankGroup
from evenly.errors import MismatchError, SpecError
from evenly.shards import full_state_dict, shard_model
from tests.ranks import RankError, run_ranks
from tests.shards.compare import compare

X = torch.linspace(-2, 3, 4 * 6, dtype=torch.float64).view(4, 6)


class Reversed(torch.autograd.Function):
    """Passes numbers through and turns gradients round."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return -gradient


class Net(nn.Module):
    def __init__(self, act) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(6, 8), nn.Linear(8, 4), act
        self.third = nn.Linear(4, 8)
        self.notes: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, x)


class Quiet(nn.Module):
    """Computes without gradients, in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.inside(x)


KEPT = {
    "an autograd function": lambda m, x: m.second(Reversed.apply(m.first(x))),
    "numpy's word for a dim": lambda m, x: m.second(m.first(x)).mean(axis=1, keepdims=True),
    "a sum over no dims, which are all": lambda m, x: m.second(m.first(x)).sum(dim=()),
    "axes by name": lambda m, x: m.second(m.first(x).swapaxes(axis0=0, axis1=1).swapaxes(0, 1)),
    "a tensor joined with itself": lambda m, x: F.linear(torch.cat([m.second(m.first(x))] * 2, 1), m.third.weight.T),
    "parts in another order": lambda m, x: m.second(torch.cat(m.first(x).chunk(2, 1)[::-1], 1)),
    "a squeeze of everything": lambda m, x: m.second(m.first(x)).unsqueeze(1).squeeze(),
    "numbers read as another type": lambda m, x: m.second(m.first(x)).view(torch.int64).view(torch.float64) * 2,
    "a part that is overwritten": lambda m, x: m.second(_filled(m, x)),
    "a tensor that is overwritten": lambda m, x: m.second(m.first(x).fill_(0.5)) + m.second(m.first(x)),
    "a power in place": lambda m, x: _powered(m.first(x)),
    "a loss as old programs wrote it": lambda m, x: F.cross_entropy(
        m.second(m.first(x)), torch.arange(4), size_average=False
    ),
}


def _quietly(m: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = m.first(x)
    return m.second(h)


def _powered(h: Tensor) -> Tensor:
    h **= 2
    return h


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.filterwarnings("ignore:size_average")
def test_it_is_computed_as_it_is(name: str) -> None:
    compare(lambda: Net(KEPT[name]).double(), X, [2, 1], smaller=False)


def test_a_module_that_switches_gradients_off_keeps_doing_so() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Quiet(), nn.Linear(6, 4)).double()

    def act(rank_group: RankGroup) -> list[bool]:
        sharded = shard_model(model, X, rank_group=rank_group, shares=[2, 1])
        sharded(X).sum().backward()
        sharded.close()
        return [parameter.grad is None for parameter in sharded.parameters()]

    model(X).sum().backward()
    truth = [parameter.grad is None for parameter in model.parameters()]
    assert run_ranks(2, act) == [truth, truth]


def _filled(m: Net, x: Tensor) -> Tensor:
    h = m.first(x)
    h[:, 0] = 5.0
    return h


@dataclass
class Pair:
    a: Tensor
    b: Tensor


def _noting(m: Net, x: Tensor) -> Tensor:
    m.calls = getattr(m, "calls", 0) + 1
    return m.first(x)


def _listing(m: Net, x: Tensor) -> Tensor:
    m.notes.append(h := m.first(x))
    return h


REFUSED = {
    "gradients off for a layer": (lambda m, x: _quietly(m, x), "switches gradients"),
    "a dataclass of tensors": (lambda m, x: Pair(m.first(x), x), "has no rule"),
    "a count of its calls": (_noting, "changes its attribute 'calls'"),
    "a list of what it saw": (_listing, "changes its attribute 'notes'"),
    "a turned tensor that is changed": (lambda m, x: _turned(m.first(x)), "shares memory"),
    "random numbers as a constant": (lambda m, x: m.first(x) + torch.randn(8), "random numbers"),
    "a result written into a tensor": (lambda m, x: torch.add(h := m.first(x), 1, out=h), "writes into a tensor"),
    "a change that another name sees": (lambda m, x: _changed(m.first(x)), "shares memory"),
}


def _turned(h: Tensor) -> Tensor:
    other = h.mT
    other += 1
    return h


def _changed(h: Tensor) -> Tensor:
    other = h.double()
    h += 1
    return other


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str) -> None:
    act, said = REFUSED[name]
    model = Net(act).double()
    with pytest.raises(SpecError, match=said):
        trace(model, X)
    assert model.notes == []
    assert not hasattr(model, "calls")


MODULES = {
    "complex parameters": (nn.Linear(8, 8, dtype=torch.complex64), "complex"),
    "TorchScript": (torch.nn.Linear(8, 8), "TorchScript"),
    "a lazy layer": (nn.LazyLinear(4), "no shape yet"),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore")
def test_a_module_is_refused(name: str) -> None:
    model, said = MODULES[name]
    x = torch.randn(2, 3, 8)
    with pytest.raises(SpecError, match=said):
        trace(torch.jit.script(model) if name == "TorchScript" else nn.Sequential(model), x)


def test_attention_without_a_batch_is_attention() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.out = nn.MultiheadAttention(8, 1, batch_first=True), nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.own(x, x, x, need_weights=False)[0])

    compare(lambda: Attends().double(), torch.randn(4, 8, dtype=torch.float64), [2, 1], smaller=False)


def test_a_decoder_attends_to_what_was_encoded() -> None:
    class Decodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)
            self.out = nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.decoder(x, x.flip(1)))

    layout = compare(lambda: Decodes().double(), torch.randn(4, 3, 8, dtype=torch.float64), [2, 1])
    assert sum(choice.op == "attention" and choice.mode == "local" for choice in layout.choices) == 4


@pytest.mark.parametrize("shares", [{0: 2, 1: 1}, {2, 1}, "21", b"21", [10**400, 1], 3])
def test_shares_are_a_list_of_numbers(shares) -> None:
    def act(rank_group: RankGroup) -> None:
        with pytest.raises(SpecError, match="list of numbers"):
            shard_model(nn.Linear(4, 4), torch.ones(2, 4), rank_group=rank_group, shares=shares)

    run_ranks(2, act)


def parted(rank_group: RankGroup, act) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    sharded = shard_model(model, torch.ones(2, 4), rank_group=rank_group, shares=[2, 1], timeout_s=20)
    try:
        act(rank_group, sharded)
    finally:
        sharded.close()


@pytest.mark.parametrize("sizes", [(4, 5), (0, 2)])
def test_batches_of_unequal_size_are_named(sizes) -> None:
    def act(rank_group: RankGroup, sharded: nn.Module) -> None:
        sharded(torch.ones(3, 4))
        sharded(torch.ones(sizes[rank_group.rank], 4))

    with pytest.raises(RankError) as caught:
        run_ranks(2, parted, act)
    assert any(isinstance(e, MismatchError) and "unequal size" in str(e) for e in caught.value.errors)


def test_one_rank_with_another_size_than_before_is_named() -> None:
    def act(rank_group: RankGroup, sharded: nn.Module) -> None:
        sharded(torch.ones(3, 4))
        sharded(torch.ones(3 + rank_group.rank, 4))

    with pytest.raises(RankError) as caught:
        run_ranks(2, parted, act)
    assert any("unequal size" in str(e) for e in caught.value.errors)


def test_other_data_on_a_rank_is_named() -> None:
    def act(rank_group: RankGroup, sharded: nn.Module) -> None:
        sharded(torch.randn(3, 4, generator=torch.Generator().manual_seed(rank_group.rank)))

    with pytest.raises(RankError) as caught:
        run_ranks(2, parted, act)
    assert any("other data" in str(e) for e in caught.value.errors)


def test_after_an_error_or_the_end_it_says_so() -> None:
    def act(rank_group: RankGroup, sharded: nn.Module) -> None:
        with pytest.raises(SpecError, match="must fit the network"):
            sharded(torch.ones(2, 5))
        with pytest.raises(SpecError):
            sharded(torch.ones(2, 4))
        sharded.close()
        with pytest.raises(SpecError, match="after close"):
            sharded(torch.ones(2, 4))

    run_ranks(2, parted, act)


def test_ddp_around_parts_is_refused() -> None:
    def act(rank_group: RankGroup, sharded: nn.Module) -> None:
        group = dist.ProcessGroupGloo(dist.PrefixStore("ddp", rank_group.store.raw), rank_group.rank, rank_group.size)
        with pytest.raises(SpecError, match=r"evenly\.synchronize"):
            nn.parallel.DistributedDataParallel(sharded, process_group=group)

    run_ranks(2, parted, act)


def test_the_state_of_another_module_is_not_asked_for() -> None:
    with pytest.raises(SpecError, match=r"cut by evenly\.shard"):
        full_state_dict(nn.Linear(2, 2))


class Named(NamedTuple):
    a: Tensor
    b: dict[str, list[Tensor]]


def test_outputs_keep_their_form() -> None:
    model = Net(lambda m, x: Named(m.first(x), {"more": [m.second(m.first(x)), x]})).double()

    def act(rank_group: RankGroup) -> Named:
        sharded = shard_model(model, X, rank_group=rank_group, shares=[2, 1])
        out = sharded(X)
        sharded.close()
        return out

    for out in run_ranks(2, act):
        assert type(out) is Named
        assert type(out.b) is dict
        assert type(out.b["more"]) is list


def test_a_convolution_without_a_batch_keeps_its_bias() -> None:
    example = torch.randn(3, 7, 7, dtype=torch.float64)
    compare(
        lambda: nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(0)).double(), example, [2, 1], smaller=False
    )


def test_ranks_in_different_modes_are_named() -> None:
    def act(rank_group: RankGroup, sharded: nn.Module) -> None:
        sharded.train(rank_group.rank == 0)
        sharded(torch.ones(3, 4))

    with pytest.raises(RankError) as caught:
        run_ranks(2, parted, act)
    assert any("different modes" in str(e) for e in caught.value.errors)
