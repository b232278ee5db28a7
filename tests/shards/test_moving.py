"""Units that change hands between steps leave training as it was: against one device, in float64."""

from functools import cache
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW

from evenly.comm import RankGroup
from evenly.errors import SpecError
from evenly.layouts import lay_out, relaid
from evenly.shards import clip_grad_norm_, full_state_dict, immovable, reshard
from evenly.spec import Layout
from tests.ranks import RankError, run_ranks
from tests.shards.test_state import (
    Build,
    adafactor,
    adam,
    agree,
    alone,
    cut,
    draw,
    followed,
    sgd,
    torch_adafactor,
    train,
)

WAYS = [[70, 25, 5], [20, 20, 60], [1, 1, 1], [5, 90, 5]]
NETWORKS = ["small", "resnet18", "mobilenet_v2", "densenet_short", "vit_small_fused", "nanogpt", "unet", "lstm"]


@cache
def layouts(name: str, cut_batch: bool) -> list[Layout]:
    graph = followed(name)[0].graph
    return [lay_out(graph, shares, cut_batch=cut_batch) for shares in WAYS[1:]]


def moved(name: str, build: Build, cut_batch: bool = False) -> list[dict[str, Any]]:
    """Returns the full state that each of three ranks has in the end."""
    return run_ranks(3, moving, name, build, layouts(name, cut_batch))


def moving(rank_group: RankGroup, name: str, build: Build, ways: list[Layout]) -> dict[str, Any]:
    """Trains four steps, each with another split."""
    with cut(rank_group, name, WAYS[0]) as (model, batches):
        optimizer = build(model.parameters())
        train(model, optimizer, batches[:1])
        for layout, batch in zip(ways, batches[1:], strict=True):
            before = dict(model.named_parameters())
            reshard(model, optimizer, layout)
            assert model.layout == layout
            assert [key for key, _ in model.named_parameters()] == list(before)
            train(model, optimizer, [batch])
        held = {id(p) for p in model.parameters()}
        assert {id(p) for group in optimizer.param_groups for p in group["params"]} <= held
        assert all(id(p) in held for p in optimizer.state)
        return full_state_dict(model, optimizer)


@pytest.mark.parametrize("name", NETWORKS)
def test_training_goes_on_as_on_one_device(name: str) -> None:
    truth = alone(name, sgd)
    for state in moved(name, sgd):
        agree({key: state[key] for key in truth}, truth, 1e-9)


@pytest.mark.parametrize(("build", "plain"), [(adam, adam), (adafactor, torch_adafactor)])
def test_any_optimizer_state_moves_with_its_units(build: Any, plain: Any) -> None:
    truth = alone("small", plain)
    for state in moved("small", build):
        agree({key: state[key] for key in truth}, truth)


def test_a_cut_along_the_batch_may_come_and_go() -> None:
    truth = alone("resnet18", sgd)
    for state in moved("resnet18", sgd, True):
        agree({key: state[key] for key in truth}, truth, 1e-9)


def accumulating(rank_group: RankGroup) -> dict[str, Any]:
    """Lets units change hands between two backwards of one step."""
    with cut(rank_group, "small", [70, 25, 5]) as (model, batches):
        optimizer = sgd(model.parameters())
        for batch in batches[:2]:
            model(*batch).square().mean().backward()
            reshard(model, optimizer, lay_out(followed("small")[0].graph, [10, 30, 60]))
        optimizer.step()
        return full_state_dict(model, optimizer)


def test_gradients_that_wait_for_a_step_move_too() -> None:
    model, batches = draw("small")
    optimizer = sgd(model.parameters())
    for batch in batches[:2]:
        model(*batch).square().mean().backward()
    optimizer.step()
    truth = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for state in run_ranks(3, accumulating):
        agree({key: state[key] for key in truth}, truth)


def counting(rank_group: RankGroup) -> tuple[int, int]:
    """Returns the bytes that travelled when one of 12 units changed hands, and those of all parameters."""
    with cut(rank_group, "small", [6, 6]) as (model, _):
        optimizer = SGD(model.parameters(), lr=0.1)
        graph = followed("small")[0].graph
        reshard(model, optimizer, lay_out(graph, [5, 7]))
        model.traffic.clear()
        reshard(model, optimizer, lay_out(graph, [5, 7]))
        assert model.traffic.sent_bytes == 0  # nothing changes hands, nothing travels
        reshard(model, optimizer, lay_out(graph, [6, 6]))
        full = sum(p.numel() * 8 for p in model.parameters())
        return model.traffic.by_name["units"], full


def test_only_what_changes_hands_travels() -> None:
    sent, held = run_ranks(2, counting)[0]
    assert 0 < sent < held / 3


def counts(layout: Layout) -> list[list[int]]:
    """Returns the outputs of every cut layer that each rank has."""
    records = [choice.gives[0] for choice in layout.choices if choice.mode == "partitioned"]
    return [layout.cuts[record.cut].counts() for record in records]


def keeping_structure(rank_group: RankGroup) -> None:
    with cut(rank_group, "resnet18", [50, 30, 20]) as (model, batches):
        graph, before = followed("resnet18")[0].graph, model.layout
        after = relaid(graph, before, [0.25, 1.0, 1.0])
        assert [choice.mode for choice in after.choices] == [choice.mode for choice in before.choices]
        assert after.members == before.members
        dealt = list(zip(counts(before), counts(after), strict=True))
        assert all(b[0] <= a[0] for a, b in dealt)
        assert sum(b[0] for _, b in dealt) < 0.5 * sum(a[0] for a, _ in dealt)
        optimizer = adam(model.parameters())
        train(model, optimizer, batches[:1])
        reshard(model, optimizer, after)
        train(model, optimizer, batches[1:2])


def test_a_slower_rank_gets_fewer_units_of_every_layer() -> None:
    run_ranks(3, keeping_structure)


def stale(rank_group: RankGroup) -> None:
    with cut(rank_group, "small", [50, 50]) as (model, _):
        optimizer = AdamW(model.parameters())
        kept = list(model.parameters())
        reshard(model, optimizer, lay_out(followed("small")[0].graph, [80, 20]))
        with pytest.raises(SpecError, match="Get the parameters from the network"):
            clip_grad_norm_(kept, 1.0)
        clip_grad_norm_(model.parameters(), 1.0)


def test_parameters_that_were_kept_aside_are_told_apart() -> None:
    run_ranks(2, stale)


def other_ranks(rank_group: RankGroup) -> None:
    with cut(rank_group, "small", [50, 50]) as (model, _):
        reshard(model, sgd(model.parameters()), lay_out(followed("small")[0].graph, [1, 0]))


def test_a_layout_for_other_ranks_is_refused() -> None:
    with pytest.raises(RankError, match="same network and ranks"):
        run_ranks(2, other_ranks)


def with_hook(rank_group: RankGroup) -> tuple[str, str]:
    with cut(rank_group, "small", [50, 50]) as (model, _):
        optimizer = SGD(model.parameters(), lr=0.1)
        hook = next(model.parameters()).register_hook(lambda gradient: gradient.clamp(-1, 1))
        found = immovable(model, optimizer)
        hook.remove()
        return found, immovable(model, optimizer)


def test_hooks_on_parameters_keep_units_where_they_are() -> None:
    for found, later in run_ranks(2, with_hook):
        assert "hook" in found
        assert not later


class Odd(SGD):
    """Keeps something that is no part of its parameter."""

    def step(self, closure: Any = None) -> Any:
        done = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["odd"] = torch.zeros(3)
        return done


def with_odd(rank_group: RankGroup) -> str:
    with cut(rank_group, "small", [50, 50]) as (model, _):
        optimizer = Odd(model.parameters(), lr=0.1)
        assert not immovable(model, optimizer)
        for parameter in model.parameters():
            optimizer.state[parameter]["odd"] = torch.zeros(3)
        return immovable(model, optimizer)


def test_state_without_a_rule_keeps_units_where_they_are() -> None:
    assert all("'odd'" in why for why in run_ranks(2, with_odd))
