"""What is measured: real ranks, equal devices that share what they measured, times that grow with the work."""

import pytest
import torch
from torch import nn

from evenly import Profile
from evenly.errors import SpecError
from evenly.graph import Traced, trace_module
from evenly.spec import Curve, DeviceProfile
from evenly.survey.devices import DeviceSurvey
from evenly.survey.measure import _usable
from evenly.survey.pooling import pooled
from tests.processes import run_processes
from tests.ranks import cluster_of, ragged
from tests.survey.measure_programs import Network

MEASURED = "tests.survey.measure_programs:measured"


def check(results: list[dict], batch: int, layers: int = 3) -> None:
    """The profile is the same on all ranks, and says what it should."""
    profile = Profile.from_json(results[0]["profile"])
    assert len({result["profile"] for result in results}) == 1
    for device in profile.devices:
        assert device.step.at(batch) > 0 < device.step.at(1)  # which is larger may be chance where steps are so short
        assert set(device.step.sizes) <= set(range(1, batch + 1))
        assert len(device.layers) == layers
        assert device.free_bytes > 0
        assert device.unit > 1
        assert device.averaging_s is not None
    assert {(lane.source, lane.target) for lane in profile.lanes} == {(0, 1), (1, 0)}
    assert profile.meetings[0].ranks == (0, 1)
    assert profile.sample_bytes > 0
    for result in results:
        assert sum(result["samples"]) == batch
        assert result["step_s"] > 0
        assert any("averaging" in words for words in result["told"])


def test_two_real_ranks_measure_and_plan():
    check(run_processes(ragged(2), MEASURED, {"device": "cpu", "batch": 16}, limit_s=100), 16)


@pytest.mark.parametrize(
    ("network", "sample_s", "least"),
    [
        ("Normed", [0.12, 0.12], [2, 2]),  # too slow for more than the fewest samples in the rehearsal
        ("Normed", [0.07, 0.07], [2, 2]),  # slow enough to warm up with few samples
        ("Single", [0.12, 0.12], [2, 2]),
        ("Network", [0.12, 0.001], [1, 2]),
    ],
    ids=["too slow", "slow", "NaN", "unlike"],
)
def test_slow_ranks_measure_with_no_fewer_samples_than_a_network_takes(network, sample_s, least):
    arguments = {"device": "cpu", "batch": 16, "network": network, "sample_s": sample_s, "haste": 2}
    results = run_processes(ragged(2), MEASURED, arguments, limit_s=100)
    check(results, 16, layers=4 if network == "Single" else 3)
    devices = Profile.from_json(results[0]["profile"]).devices
    assert [device.step.sizes[0] for device in devices] == least
    assert all(len(device.step.sizes) > 1 for device in devices)


def test_a_network_is_cut_on_trial_as_memory_allows_it():
    parameters = 4 * sum(p.numel() for p in Network().parameters())
    memory = [3 * parameters, 3 * parameters + 8]  # a whole network needs 4 of them to train
    results = run_processes(ragged(2), MEASURED, {"device": "cpu", "batch": 2, "memory": memory}, limit_s=100)
    profile = Profile.from_json(results[0]["profile"])
    assert [device.free_bytes for device in profile.devices] == memory
    assert [sorted(cut.ranks) for cut in profile.cuts] == [[0, 1]]
    assert any("cut over them" in words for words in results[0]["told"])
    assert results[0]["samples"] == [2]  # one network, cut over both


@pytest.mark.parametrize("wish", [0, -1, True, 1.5, float("nan"), "8GB", [1, 2]], ids=str)
def test_what_is_no_number_of_bytes(wish):
    with pytest.raises(SpecError, match="one whole number above 0"):
        _usable(10, wish)


def test_limits_only_lower_what_is_free():
    assert [_usable(10, wish) for wish in (None, 9, 11)] == [10, 9, 10]


@pytest.mark.gpu
def test_ranks_on_a_gpu_measure_and_plan():
    check(run_processes(ragged(2), MEASURED, {"device": "cuda", "batch": 256}, limit_s=100), 256)


class Clock:
    """The time that samples take, and nothing else: what other processes do on this machine does not count."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        self.now_s += 1e-3  # reading it takes time too: what costs no samples ends as well
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("evenly.survey.devices.time", clock)
    monkeypatch.setattr("evenly.survey.stopwatch.time", clock)
    return clock


def slow_network(
    clock: Clock, sample_s: float, network: nn.Module | None = None, example: torch.Tensor | None = None
) -> Traced:
    """Every sample takes `sample_s` on the clock."""
    traced = trace_module(network or Network(), torch.randn(256, 3, 16, 16) if example is None else example)

    def pass_time(module: nn.Module, args: tuple[()], kwargs: dict[str, torch.Tensor]) -> None:
        clock.now_s += sample_s * len(kwargs["x"])

    traced.model.register_forward_pre_hook(pass_time, with_kwargs=True)
    return traced


@pytest.mark.parametrize(
    ("sample_s", "sizes"),
    [(0.001, (8, 32, 64)), (0.01, (2, 8, 32)), (0.03, (2, 4, 8)), (0.08, (2, 3, 4)), (9.0, (2, 3, 4))],
)
def test_sizes_are_those_for_which_there_is_time(sample_s, sizes):
    survey = DeviceSurvey(trace_module(Network(), torch.randn(256, 3, 16, 16)), torch.device("cpu"), budget_s=1.0)
    assert tuple(survey._affordable_batches(sample_s)[:3]) == sizes


def test_a_slow_device_gets_time_for_three_sizes(clock):
    survey = DeviceSurvey(slow_network(clock, 0.1), torch.device("cpu"), budget_s=1.4)
    step = survey.step()
    assert step.sizes[:2] == (1, 2)
    assert len(step.sizes) == 3
    assert clock.now_s < 4.0
    assert step.at(64) == pytest.approx(64 * 0.1, rel=0.05)
    quick = DeviceSurvey(trace_module(Network(), torch.randn(256, 3, 16, 16)), torch.device("cpu"), budget_s=4.0)
    assert survey.sample_bytes() == quick.sample_bytes() > 4 * 32 * (196 + 144)  # what its convolutions give out


class Turned(nn.Module):
    """Of one sample the two halves of a turn are the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = self.body(x).relu().transpose(0, 1).contiguous().transpose(0, 1)
        return x


@pytest.mark.parametrize(("sample_s", "least"), [(0.001, 2), (0.05, 1)])
def test_memory_of_a_sample_is_that_of_a_sample_among_others(sample_s, least, clock):
    traced = slow_network(clock, sample_s, Turned(), torch.randn(16, 64, 32))
    survey = DeviceSurvey(traced, torch.device("cpu"), budget_s=1.0)
    step = survey.step()
    assert step.sizes[0] == least
    assert survey.sample_bytes() == 4 * 2 * 64 * 32 * 4  # what is turned, and what relu and the layer keep
    assert len(next(iter(survey.layers(step).values())).samples.sizes) > 1


class Faulty(nn.Module):
    """Has a forward, and something that is wrong in training."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.layer, self.norm, self.fault = nn.Linear(8, 8), nn.BatchNorm1d(8), fault

    def forward(self, x: torch.Tensor) -> torch.Tensor | None:
        y = self.layer(x)
        if self.fault == "backward" and isinstance(y, torch.Tensor) and y.requires_grad:
            y.register_hook(lambda _: 1 / 0)
        if self.fault == "NaN":
            y = y / 0.0 * 0.0
        return None if self.fault == "nothing" else self.norm(y) if self.fault == "one" else y


@pytest.mark.parametrize(
    ("fault", "batch", "words"),
    [
        ("backward", 16, "with 2 samples of random numbers, but raised ZeroDivisionError: division by zero. Give"),
        ("nothing", 16, "no output has a gradient"),
        ("NaN", 16, "its gradients became NaN or infinite"),
        ("one", 1, "with 1 sample of random numbers, but raised ValueError: Expected more than 1 value"),
    ],
)
def test_networks_that_make_no_step(fault, batch, words):
    traced = trace_module(Faulty(""), torch.randn(batch, 8))
    traced.model.fault = fault
    with pytest.raises(SpecError, match=words):
        DeviceSurvey(traced, torch.device("cpu"), budget_s=1.0).step()


def device(rank: int, seconds: float, spread: float = 0.1) -> DeviceProfile:
    return DeviceProfile(rank=rank, step=Curve(sizes=(8, 16), seconds=(seconds / 2, seconds)), spread=spread)


def test_a_flat_end_of_a_curve_does_not_make_any_size_free():
    flat = Curve(sizes=(16, 48, 64), seconds=(0.1, 0.3, 0.3))
    assert flat.at(128) > 0.5
    assert Curve(sizes=(8, 64), seconds=(0.3, 0.3)).at(6400) == pytest.approx(15.0)


def test_devices_that_cannot_be_told_apart_are_equal():
    found = pooled([device(0, 1.0), device(1, 1.06), device(2, 3.0)], cluster_of([[0, 1, 2]]), 16)
    assert found[0].step == found[1].step
    assert found[0].step.at(16) == pytest.approx(1.03)
    assert found[2].step.at(16) == 3.0


def test_devices_of_other_nodes_or_clearly_other_speed_stay_apart():
    apart = [device(0, 1.0), device(1, 1.06)]
    assert pooled(apart, cluster_of([[0], [1]]), 16) == apart
    noisy = [device(0, 1.0, 0.6), device(1, 1.33, 0.6)]
    assert pooled(noisy, cluster_of([[0, 1]]), 16) == noisy
    clear = [device(0, 1.0, 0.01), device(1, 1.12, 0.01)]
    assert pooled(clear, cluster_of([[0, 1]]), 16) == clear
    lucky = pooled([device(0, 1.0, 0.01), device(1, 1.06, 0.01)], cluster_of([[0, 1]]), 16)
    assert lucky[0].step == lucky[1].step  # few readings that agree by chance say little


def test_equal_devices_that_were_timed_with_other_samples_share_their_mean_as_far_as_both_reach():
    few, many = (Curve(sizes=sizes, seconds=tuple(size / 8 for size in sizes)) for sizes in ((2, 3, 4), (2, 4, 8)))
    devices = [DeviceProfile(rank=0, step=few), DeviceProfile(rank=1, step=many.scaled(1.02))]
    found = pooled(devices, cluster_of([[0, 1]]), 8)
    assert found[0].step == found[1].step
    assert found[0].step.sizes == (2, 3, 4)
    assert found[0].step.at(4) == pytest.approx(0.505)
