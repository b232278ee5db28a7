"""What `shard` says when it is given what it cannot cut."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from evenly import Plan
from evenly.comm import RankGroup
from evenly.errors import MismatchError, SpecError
from evenly.graph import trace
from evenly.layouts import lay_out
from evenly.shards import shard_model
from evenly.spec import Replica, Role
from tests.ranks import RankError, run_ranks

EXAMPLE = torch.ones(2, 6)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def shard(rank_group: RankGroup, model: nn.Module, shares: object, example: Tensor = EXAMPLE, **options: object):
    return shard_model(model, example, rank_group=rank_group, shares=shares, timeout_s=20, **options)


def refusal(model: nn.Module, shares: object = (2, 1), **options: object) -> str:
    """Returns what both ranks were told, the same on each."""
    with pytest.raises(RankError) as caught:
        run_ranks(2, shard, model, shares, EXAMPLE)
    told = {str(error) for error in caught.value.errors}
    assert all(isinstance(error, SpecError) for error in caught.value.errors), told
    assert len(told) == 1
    return told.pop()


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ([70, 25, 5], "3 shares [70.0, 25.0, 5.0] were given for 2 ranks"),
        ([1], "1 shares"),
        ([1, -2], "[-2.0]"),
        ([1, float("nan")], "nan"),
        ([1, float("inf")], "inf"),
        ([0, 0], "leave every rank out"),
        ("70,25", "a list of numbers"),
        (5, "a list of numbers"),
        ([], "0 shares"),
    ],
)
def test_shares_that_are_none(shares, told):
    assert told in refusal(net(), shares)


def test_more_ranks_than_units_is_said_and_right():
    model = nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 1))

    def act(rank_group: RankGroup) -> tuple[str, Tensor]:
        sharded = shard(rank_group, model, [1, 1, 1])
        out = sharded(EXAMPLE).detach()
        sharded.close()
        return sharded.layout.explain(), out

    for told, out in run_ranks(3, act):
        assert "nothing for ranks [2]" in told
        torch.testing.assert_close(out, model(EXAMPLE))


def test_a_network_that_is_changed_afterwards():
    def act(rank_group: RankGroup) -> str:
        sharded = shard(rank_group, net(), [2, 1])
        sharded.get_submodule("2").weight = nn.Parameter(torch.zeros(5, 5))
        with pytest.raises(MismatchError) as caught:
            sharded(EXAMPLE)
        sharded.close()
        return str(caught.value)

    for told in run_ranks(2, act):
        assert "2.weight" in told
        assert "(5, 5)" in told


@pytest.mark.parametrize("given", [torch.ones(2, 7), torch.ones(2, 6, 1), torch.ones(6)])
def test_a_batch_of_another_shape(given):
    def act(rank_group: RankGroup) -> str:
        sharded = shard(rank_group, net(), [2, 1])
        with pytest.raises(SpecError) as caught:
            sharded(given)
        sharded.close()
        return str(caught.value)

    for told in run_ranks(2, act):
        assert str(tuple(given.shape)) in told
        assert "(2, 6)" in told


def test_an_example_that_does_not_fit_the_network():
    with pytest.raises(SpecError, match="example"):
        trace(net(), torch.ones(2, 5))
    with pytest.raises(SpecError, match="does not fit forward"):
        trace(net(), (EXAMPLE, EXAMPLE))
    with pytest.raises(SpecError, match="no tensor"):
        trace(net(), (None,))


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_hooks_are_refused_by_name(kind):
    model = net()
    getattr(model[2], kind)(lambda *_: None)
    assert "'2'" in refusal(model)


def test_gradient_hooks_are_refused_by_name():
    model = net()
    model[0].weight.register_hook(lambda g: g)
    assert "'0.weight'" in refusal(model)


class Tied(nn.Module):
    """A norm's scale that is also a weight of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.second.bias = self.norm.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.norm(self.first(x))))


def test_weights_tied_across_rules_are_exact_or_refused_by_name():
    model = Tied().double()
    example = torch.randn(4, 6, dtype=torch.float64)

    def act(rank_group: RankGroup) -> Tensor | str:
        try:
            sharded = shard(rank_group, model, [2, 1], example)
        except SpecError as error:
            return str(error)
        out = sharded(example).detach()
        sharded.close()
        return out

    for found in run_ranks(2, act):
        if isinstance(found, str):
            assert "norm.weight" in found
            assert "second.bias" in found
        else:
            torch.testing.assert_close(found, model(example))


def test_layers_that_do_not_exist_cannot_have_shares():
    def act(rank_group: RankGroup) -> None:
        shard(rank_group, net(), [2, 1], layer_shares={"nowhere": [1, 1]})

    with pytest.raises(RankError, match="nowhere"):
        run_ranks(2, act)


def test_ranks_with_other_networks_are_told_before_the_first_step():
    def act(rank_group: RankGroup) -> None:
        shard(rank_group, net() if rank_group.rank else nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 3)), [2, 1])

    with pytest.raises(RankError) as caught:
        run_ranks(2, act)
    for error in caught.value.errors:
        assert isinstance(error, MismatchError)
        assert "ranks [0]" in str(error)


def test_plans_whose_replicas_do_not_fit_are_refused():
    layout = lay_out(trace(net(), EXAMPLE), [2, 1])
    roles = tuple(Role(rank=rank, node=rank // 2, samples=4) for rank in range(4))
    with pytest.raises(SpecError, match="each of the ranks"):
        Plan(roles=roles, replicas=(Replica(ranks=(0, 1), layout=layout),))
    with pytest.raises(SpecError, match="reaches over nodes"):
        Plan(roles=roles, replicas=tuple(Replica(ranks=pair, layout=layout) for pair in ((0, 2), (1, 3))))
    with pytest.raises(SpecError, match="2 shares for the ranks"):
        Replica(ranks=(0, 1, 2), layout=layout)
    with pytest.raises(SpecError, match="do not cover it"):
        Plan.from_json(
            Plan(roles=roles[:2], replicas=(Replica(ranks=(0, 1), layout=layout),))
            .to_json()
            .replace('"size": 8', '"size": 9', 1)
        )
    good = Plan(roles=roles[:2], replicas=(Replica(ranks=(0, 1), layout=layout),))
    assert Plan.from_json(good.to_json()) == good
