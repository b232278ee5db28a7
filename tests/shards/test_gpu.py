"""Sharded networks on CUDA: several ranks on one device, and a CPU rank among them, over gloo."""

import pytest
import torch

from tests.processes import run_processes
from tests.ranks import ragged

pytestmark = pytest.mark.gpu

COMPARE = "tests.shards.gpu_programs:compare"
GROUPS = {"cuda+cuda": (["cuda", "cuda"], [2, 1]), "cuda+cuda+cpu": (["cuda", "cuda", "cpu"], [70, 25, 5])}
NETWORKS = ["vgg16_bn", "resnet18", "resnext50", "mobilenet_v2", "unet", "vit_small_module", "gpt2_loss", "lstm"]


def run(group: str, cases: list, precision: str) -> list[list]:
    devices, shares = GROUPS[group]
    arguments = {"devices": devices, "shares": shares, "cases": cases, "precision": precision}
    return run_processes(ragged(len(devices)), COMPARE, arguments, limit_s=200)


@pytest.mark.parametrize("precision", ["double", "float", "bf16"])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("cases", [NETWORKS[:4], NETWORKS[4:], list(range(20)), list(range(20, 40))], ids=str)
def test_sharded_networks_are_as_close_to_the_truth_as_plain_ones(group, cases, precision):
    least = {"double": 1e-9, "float": 1e-4, "bf16": 0.05}[precision]
    for rank, rows in enumerate(run(group, cases, precision)):
        for case, tries in rows:
            told = ", ".join(f"{ours:.2e} (plain {plain:.2e})" for ours, plain in tries)
            assert any(ours <= max(least, 10 * plain) for ours, plain in tries), f"case {case} on rank {rank}: {told}"


@pytest.mark.alone
def test_a_group_of_one_costs_nothing():
    if torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("The batch that keeps a GPU busy needs 7 GiB of it.")
    (seconds,) = run_processes(
        ragged(1), "tests.shards.gpu_programs:overhead", {"batch": 6144, "rounds": 10}, limit_s=110
    )
    assert seconds["sharded"] <= 1.01 * seconds["plain"], seconds


def test_verify_finds_no_difference_on_unlike_devices():
    arguments = {"devices": ["cuda", "cuda", "cpu"], "shares": [70, 25, 5], "cases": ["resnet18", "gpt2_loss"]}
    for reports in run_processes(ragged(3), "tests.shards.gpu_programs:check", arguments, limit_s=110):
        for ok, text in reports:
            assert ok, text


@pytest.mark.parametrize("case", ["resnet18", "vit_small_module"])
@pytest.mark.parametrize("group", GROUPS)
def test_units_change_hands_between_unlike_devices(group, case):
    devices, shares = GROUPS[group]
    ways = [shares, shares[::-1], [1.0] * len(shares), shares]
    program = "tests.shards.gpu_programs:moving"
    arguments = {"devices": devices, "ways": ways, "case": case}
    for far in run_processes(ragged(len(devices)), program, arguments, limit_s=200):
        assert far < 1e-7


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("group", GROUPS)
def test_recurrent_layers_by_units(group, kind):
    devices, shares = GROUPS[group]
    arguments = {"devices": devices, "ways": [shares, shares[::-1], shares], "kind": kind}
    program = "tests.shards.gpu_programs:recurrent_by_units"
    for far in run_processes(ragged(len(devices)), program, arguments, limit_s=200):
        assert far < 1e-9
