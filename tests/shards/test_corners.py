"""Corners where a cut network could part from the whole one without a word."""

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from evenly.comm import RankGroup
from evenly.errors import SpecError
from evenly.graph import trace_module
from evenly.layouts import TransferCosts, lay_out
from evenly.shards import Lamb, clip_grad_norm_, full_state_dict, join_shards, shard_model
from tests.ranks import run_ranks
from tests.shards.compare import compare


class Net(nn.Module):
    def __init__(self, act) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, x)


EXAMPLE = torch.linspace(-3, 3, 24, dtype=torch.float64).view(4, 6)
ACTS = {
    "sizes of a weight before its first use": lambda m, x: F.linear(
        m.first(x) * m.second.weight.shape[1] ** -0.5, m.second.weight, m.second.bias
    ),
    "whole numbers of a sum": lambda m, x: F.linear(m.first(x), m.second.weight).to(torch.int32).double() * x.mean(),
    "floor of a sum": lambda m, x: torch.div(F.linear(m.first(x), m.second.weight), 0.3, rounding_mode="floor"),
    "a number added by name": lambda m, x: torch.add(input=F.linear(m.first(x), m.second.weight), other=3.0),
    "type as another tensor": lambda m, x: m.second(m.first(x).type_as(x)),
    "negative start": lambda m, x: m.second(m.first(x).repeat(1, 2).narrow(1, -8, 8)),
    "one token": lambda m, x: m.second(torch.relu(m.first(x[0]))) + x.sum(),
}


@pytest.mark.parametrize("name", ACTS)
def test_is_the_same_as_on_one_device(name):
    compare(lambda: Net(ACTS[name]).double(), EXAMPLE, [3, 2, 1], smaller=False)


def test_ranks_may_hold_their_weights_in_other_memory_formats():
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))

    models = [build(), build().to(memory_format=torch.channels_last)]

    def act(rank_group: RankGroup) -> dict[str, Tensor]:
        sharded = shard_model(models[rank_group.rank], torch.ones(2, 3, 8, 8), rank_group=rank_group, shares=[2, 1])
        state = full_state_dict(sharded)["model"]
        sharded.close()
        return state

    for state in run_ranks(2, act):
        for name, value in models[0].state_dict().items():
            assert torch.equal(state[name], value), name


def test_a_rank_without_a_share_clips_and_steps_with_the_others():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()

    def act(rank_group: RankGroup) -> float:
        sharded = shard_model(model, EXAMPLE, rank_group=rank_group, shares=[2, 0, 1])
        optimizer = Lamb(sharded.parameters(), lr=0.01)
        sharded(EXAMPLE).square().sum().backward()
        norm = clip_grad_norm_(sharded.parameters(), 0.1)
        optimizer.step()
        sharded.close()
        return float(norm)

    norms = run_ranks(3, act)
    model(EXAMPLE).square().sum().backward()
    assert norms[0] == norms[2] == pytest.approx(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))


def test_the_uncut_network_is_not_kept():
    def act(rank_group: RankGroup) -> bool:
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
        traced = trace_module(model, torch.ones(2, 6))
        sharded = join_shards(traced, lay_out(traced.graph, [2, 1]), rank_group=rank_group, timeout_s=30)
        seen = weakref.ref(model[0].weight)
        del model, traced
        gc.collect()
        sharded(torch.ones(2, 6)).sum().backward()
        sharded.close()
        return seen() is None

    assert any(run_ranks(2, act))  # fx itself remembers the network it traced last


def test_checkpointing_a_network_with_dropout_is_refused():
    from torch.utils.checkpoint import checkpoint

    def act(rank_group: RankGroup) -> str:
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        sharded = shard_model(model, torch.ones(2, 6), rank_group=rank_group, shares=[2, 1])
        with pytest.raises(SpecError) as caught:
            checkpoint(sharded, torch.ones(2, 6, requires_grad=True), use_reentrant=False).sum().backward()
        sharded.close()
        return str(caught.value)

    assert all("checkpoint" in told for told in run_ranks(2, act))


def test_dropout_does_not_depend_on_the_split():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 8, 1), nn.Dropout(0.3), nn.Conv1d(8, 6, 1), nn.Dropout1d(0.4), nn.Flatten())
    example = torch.randn(4, 3, 5)
    outputs = []
    for shares in ([1], [2, 1], [1, 3, 1]):

        def act(rank_group: RankGroup, shares=shares) -> Tensor:
            sharded = shard_model(model, example, rank_group=rank_group, shares=shares)
            sharded._dropout_stream.seed = 5
            out = sharded(example).detach()
            sharded.close()
            return out

        outputs += run_ranks(len(shares), act)
    for out in outputs[1:]:
        torch.testing.assert_close(out, outputs[0])
    assert 0.2 < float((outputs[0] == 0).float().mean()) < 0.6


def test_networks_may_take_other_tensors_in_training():
    class Other(Net):
        def forward(self, x: Tensor) -> Tensor:
            a, b = self.first(x), self.first(x * 2)
            return (a if self.training else b) * 2 + a + b

    compare(lambda: Other(None).double(), EXAMPLE, [2, 1])


def test_two_networks_of_one_program_drop_other_elements():
    model, example = nn.Sequential(nn.Conv1d(3, 8, 1), nn.Dropout(0.5)), torch.ones(4, 3, 5)

    def act(rank_group: RankGroup) -> list[Tensor]:
        own = copy.deepcopy(model)  # tracing sets modes, and ranks are threads here
        networks = [shard_model(own, example, rank_group=rank_group, shares=[2, 1]) for _ in range(2)]
        outputs = [network(example).detach() for network in networks]
        for network in networks:
            network.close()
        return outputs

    for one, other in run_ranks(2, act):
        assert not torch.equal(one == 0, other == 0)


class ByKeyword(nn.Module):
    """Gives tensors to functions by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(7, 12), nn.Linear(12, 36), nn.Linear(12, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = nn.functional.embedding(input=ids, weight=self.embed.weight)
        joined = nn.functional.linear(input=x, weight=self.qkv.weight, bias=self.qkv.bias)
        q, k, v = (part.unflatten(-1, (3, 4)).transpose(1, 2) for part in joined.chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(query=q, key=k, value=v)
        y = torch.add(input=y.transpose(1, 2).flatten(2), other=x)
        z = torch.cat(tensors=[nn.functional.gelu(input=y), y], dim=-1)
        return self.out(nn.functional.layer_norm(input=z[..., :12], normalized_shape=(12,)))


def test_tensors_may_be_given_by_keyword():
    torch.manual_seed(0)
    model, ids = ByKeyword().double(), torch.arange(6).view(2, 3)
    truth = model(ids)
    traced = trace_module(model, ids)
    layout = lay_out(traced.graph, [2, 1], rates=TransferCosts(0.0, 0.0))

    def act(rank_group: RankGroup) -> Tensor:
        sharded = join_shards(traced, layout, rank_group=rank_group)
        out = sharded(ids)
        out.sum().backward()
        sharded.close()
        return out.detach()

    for out in run_ranks(2, act):
        torch.testing.assert_close(out, truth, rtol=1e-10, atol=1e-10)


def test_a_frozen_weight_keeps_no_gathered_input():
    torch.manual_seed(0)
    model, example = (
        nn.Sequential(nn.Conv1d(3, 8, 1), nn.ReLU(), nn.Conv1d(8, 6, 3), nn.Flatten()),
        torch.randn(4, 3, 9),
    )
    model[2].weight.requires_grad_(False)
    kept: list[int] = []

    def act(rank_group: RankGroup) -> None:
        sharded = shard_model(model, example, rank_group=rank_group, shares=[1, 1])
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (kept.append(t.untyped_storage().nbytes()), t)[1], lambda t: t
        ):
            out = sharded(example)
        out.sum().backward()
        sharded.close()

    run_ranks(2, act)
    assert max(kept) < 4 * 8 * 9 * 4  # the input of the frozen layer is that large
