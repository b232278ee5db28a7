"""Schedules by name: the learning rate of every step, at the start, the peak and the end, and after a resume."""

import json

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR, OneCycleLR, StepLR

from evenly.errors import SpecError
from evenly.recipes.optim import SCHEDULES, build_optimizer, build_schedule

LR = 0.4


def optimizer_of(name="sgd", **settings):
    return build_optimizer(name, [nn.Parameter(torch.ones(2))], lr=LR, **settings)


def rates(schedule, optimizer, steps):
    """Returns learning rate and momentum of every step, and of one after the last."""
    found = []
    for _ in range(steps + 1):
        group = optimizer.param_groups[0]
        found.append((group["lr"], group["betas"][0] if "betas" in group else group.get("momentum")))
        optimizer.step()
        schedule.step()
    return found


def lr_of(name, *, steps=40, steps_per_epoch=8, **options):
    optimizer = optimizer_of()
    schedule = build_schedule(name, optimizer, steps=steps, steps_per_epoch=steps_per_epoch, **options)
    assert isinstance(schedule, LRScheduler)
    return [lr for lr, _ in rates(schedule, optimizer, steps)]


def torchs(make, *, steps=40):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=LR, momentum=0.9)
    return rates(make(optimizer), optimizer, steps)


def test_none_keeps_the_rate():
    assert set(lr_of("none")) == {LR}


def test_step_is_torchs_by_epochs():
    expected = [lr for lr, _ in torchs(lambda optimizer: StepLR(optimizer, 16, 0.5))]
    assert lr_of("step", epochs=2, gamma=0.5) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("milestones", "steps"), [([1, 3], [8, 24]), ([0.5, 4], [4, 32]), (None, [20, 30])])
def test_milestones_are_epochs(milestones, steps):
    expected = [lr for lr, _ in torchs(lambda optimizer: MultiStepLR(optimizer, steps, 0.1))]
    assert lr_of("multistep", milestones=milestones) == pytest.approx(expected, rel=1e-12)


def test_cosine_rises_to_the_rate_and_falls_to_nothing():
    found = lr_of("cosine", steps=100)
    assert found[:4] == pytest.approx([LR * step / 5 for step in range(1, 5)], rel=1e-12)  # 5 of 100 steps warm up
    cosine = [lr for lr, _ in torchs(lambda optimizer: CosineAnnealingLR(optimizer, 100), steps=100)]
    assert found[5:] == pytest.approx(cosine[5:], rel=1e-9, abs=1e-15)
    assert found[-1] == 0.0
    assert lr_of("cosine", steps=100, warmup=0.0)[0] == LR
    assert lr_of("cosine", steps=100, final=0.1)[-1] == pytest.approx(0.1 * LR)


@pytest.mark.parametrize("shape", ["cosine", "linear"])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_one_cycle_is_torchs(shape, name):
    ours, theirs = optimizer_of(name), optimizer_of(name)
    schedule = build_schedule("one-cycle", ours, steps=40, steps_per_epoch=8, shape=shape)
    other = OneCycleLR(theirs, LR, total_steps=40, anneal_strategy={"cosine": "cos", "linear": "linear"}[shape])
    found, expected = rates(schedule, ours, 40), rates(other, theirs, 39)  # torch's ends there
    assert [lr for lr, _ in found[:40]] == pytest.approx([lr for lr, _ in expected], rel=1e-9)
    assert [momentum for _, momentum in found[:40]] == pytest.approx([m for _, m in expected], rel=1e-9)
    assert found[40] == found[39], "after the last step the values stay"


def test_one_cycle_of_straight_lines():
    found = lr_of("one-cycle", steps=21, shape="linear", start=0.0, peak=11 / 21, final=0.0, cycle_momentum=False)
    expected = [LR * min(step, 20 - step) / 10 for step in range(21)]
    assert found[:21] == pytest.approx(expected, abs=1e-15)
    assert (found[0], found[10], found[20]) == (0.0, LR, 0.0)


@pytest.mark.parametrize(
    ("peak", "steps", "at"), [(0.0, 5, 0), (0.2, 5, 0), (0.6, 5, 2), (1.0, 5, 4), (0.3, 1, 0), (0.5, 2, 0)]
)
def test_one_cycle_reaches_the_peak_however_short(peak, steps, at):
    found = lr_of("one-cycle", steps=steps, peak=peak, shape="linear", final=0.01)
    assert found[at] == max(found) == LR
    assert found[-1] == pytest.approx(0.01 * LR if at < steps - 1 else LR)


@pytest.mark.parametrize(("name", "settings"), [("rmsprop", {}), ("sgd", {"momentum": 0.0}), ("adafactor", {})])
def test_momentum_is_cycled_only_where_there_is_one(name, settings):
    optimizer = optimizer_of(name, **settings)
    before = optimizer.param_groups[0].get("momentum")
    schedule = build_schedule("one-cycle", optimizer, steps=6, steps_per_epoch=3)
    assert {momentum for _, momentum in rates(schedule, optimizer, 6)} == {before}
    with pytest.raises(SpecError, match=r"cycle_momentum was asked of 'one-cycle'; .* has no momentum, or 0"):
        build_schedule("one-cycle", optimizer, steps=6, steps_per_epoch=3, cycle_momentum=True)


def test_momentum_stays_if_asked():
    optimizer = optimizer_of("adam")
    schedule = build_schedule("one-cycle", optimizer, steps=6, steps_per_epoch=3, cycle_momentum=False)
    assert {momentum for _, momentum in rates(schedule, optimizer, 6)} == {0.9}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("cut", [0, 7])
def test_a_resumed_schedule_goes_on(name, cut):
    optimizers = optimizer_of(), optimizer_of(), optimizer_of()
    build = {"steps": 12, "steps_per_epoch": 3}
    whole = rates(build_schedule(name, optimizers[0], **build), optimizers[0], 12)
    first = build_schedule(name, optimizers[1], **build)
    rates(first, optimizers[1], cut - 1)
    second = build_schedule(name, optimizers[2], **build)
    saved = json.loads(json.dumps(first.state_dict()))  # only plain values
    optimizers[2].load_state_dict(optimizers[1].state_dict())
    second.load_state_dict(saved)
    assert rates(second, optimizers[2], 12 - cut) == whole[cut:]


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("cosin", {}, "the schedule 'cosin' was asked for; .* Did you mean 'cosine'"),
        ("cosine", {"warmpu": 0.1}, "option 'warmpu' was asked for of the schedule 'cosine'; .* mean 'warmup'"),
        ("none", {"gamma": 0.1}, "it has none"),
        ("cosine", {"warmup": 2}, "warmup=2 was given for the schedule 'cosine'. Give a number from 0 to 1"),
        ("step", {"gamma": -1}, "gamma=-1 was given for the schedule 'step'. Give a number from 0 up"),
        ("step", {"epochs": "ten"}, "epochs='ten' was given"),
        ("multistep", {"milestones": 5}, r"milestones=5 were given for 'multistep'. Give epochs, such as \[80, 120\]"),
        ("one-cycle", {"shape": "round"}, "shape='round' was given for 'one-cycle'. Give 'cosine' or 'linear'"),
        ("one-cycle", {"momenta": [0.9]}, r"momenta=\[0.9\] were given for 'one-cycle'"),
        ("one-cycle", {"peak": True}, "peak=True was given"),
    ],
)
def test_what_does_not_fit_is_said(name, options, told):
    with pytest.raises(SpecError, match=told):
        build_schedule(name, optimizer_of(), steps=10, steps_per_epoch=5, **options)


def test_a_run_without_steps_is_refused():
    with pytest.raises(SpecError, match=r"steps=0, steps_per_epoch=5. Give at least 1 of each"):
        build_schedule("none", optimizer_of(), steps=0, steps_per_epoch=5)
