"""The invariants of node-based training with several ranks on one CUDA device, over gloo."""

import pytest
import torch

from evenly.spec import EverySteps, Exchange
from tests.exchange.overlapped import Overlapped
from tests.nodes.test_exactness import CLUSTERS, OPTIMIZERS, batches, expected, network
from tests.processes import collect, run_processes, start_processes
from tests.ranks import ragged

TRAIN = "tests.nodes.gpu_programs:train"
SESSION = "tests.session.programs:train"

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("shape", ["2x2", "3+1"])
def test_parameters_and_buffers_after_every_step(shape, every):
    nodes = CLUSTERS[shape]
    name = {1: "momentum", 2: "adamw", 5: "rmsprop"}[every]
    results = run_processes(nodes, TRAIN, {"nodes": nodes, "optimizer": name, "every": every}, limit_s=100)
    reference = expected(nodes, OPTIMIZERS[name], every, batches(4, 6))
    for rank, result in enumerate(results):
        assert result["device"].startswith("cuda")
        for step, row in enumerate(reference):
            got = [torch.tensor(values, dtype=torch.float64) for values in result["trace"][step]]
            want = [tensor.double() for tensor in row[rank]]
            torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9, msg=lambda m, at=step: f"step {at}: {m}")


@pytest.mark.parametrize("kinds", [["fsdp", "fsdp"], ["fsdp", "whole"], ["tensor", "tensor"]])
def test_networks_that_torch_shards(kinds):
    nodes = [[0, 1], [2]]
    arguments = {"nodes": nodes, "optimizer": "momentum", "every": 3, "kinds": kinds, "device": "cuda"}
    for differences in run_processes(nodes, "tests.nodes.torch_shard_programs:train", arguments, limit_s=100):
        assert max(differences) < 1e-9, differences


@pytest.mark.parametrize("form", ["before", "method", "after", "fsdp", "shard before", "shard after"])
def test_compiled_networks(form):
    nodes = [[0, 1], [2]]
    arguments = {"nodes": nodes, "form": form, "backend": "inductor", "device": "cuda"}
    for difference, _ in run_processes(nodes, "tests.nodes.compiled_programs:train", arguments, limit_s=200):
        assert difference < 1e-8


@pytest.mark.parametrize(
    "exchange",
    [
        {"overlap": 1},
        {"overlap": 2, "fragments": 2, "optimizer_state": "average"},
        {"outer": "nesterov"},
        {"overlap": 2, "fragments": 2, "optimizer_state": "average", "offload": True},
        {"outer": "nesterov", "offload": True},
        {"offload": True},
    ],
)
@pytest.mark.parametrize("shape", ["2x2", "3+1"])
def test_exchanges_beside_the_training(shape, exchange):
    nodes, settings = CLUSTERS[shape], Exchange(**exchange)
    arguments = {"nodes": nodes, "optimizer": "adam", "every": 2, "exchange": exchange}
    results = run_processes(nodes, TRAIN, arguments, limit_s=100)
    reference = Overlapped(network(), OPTIMIZERS["adam"], nodes, EverySteps(2), settings)
    for step, row in enumerate(batches(4, 6), start=1):
        reference.train(row)
        for rank, replica in enumerate(reference.replicas):
            got = [torch.tensor(values, dtype=torch.float64) for values in results[rank]["trace"][step]]
            want = [tensor.detach().double() for tensor in (*replica.parameters(), *replica.buffers())]
            torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9, msg=lambda m, at=step: f"step {at}: {m}")


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_codes_leave_all_nodes_with_the_same_bits(codec):
    nodes = CLUSTERS["3+1"]
    arguments = {"nodes": nodes, "optimizer": "momentum", "every": 2, "exchange": {"codec": codec}}
    first, *others = (result["trace"] for result in run_processes(nodes, TRAIN, arguments, limit_s=100))
    exact = expected(nodes, OPTIMIZERS["momentum"], 2, batches(4, 6))
    for step in (2, 4, 6):
        assert all(other[step] == first[step] for other in others), f"everywhere after step {step}"
        for got, want in zip(first[step], exact[step][0], strict=True):
            torch.testing.assert_close(torch.tensor(got).double(), want.double(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_and_grad_scaler_keep_ranks_equal(precision):
    nodes = ragged(2, 1)
    arguments = {"nodes": nodes, "optimizer": "adam", "every": 2, "precision": precision}
    first, second, other = (result["trace"] for result in run_processes(nodes, TRAIN, arguments, limit_s=100))
    parameters = 6
    for step in range(8):
        assert first[step][:parameters] == second[step][:parameters], f"inside the node after step {step}"
    for step in (0, 2, 4, 6, 7):
        assert first[step] == other[step], f"everywhere after step {step}"
    assert first[7] != first[0]


def test_global_mode_equals_every_step_with_sgd():
    nodes = CLUSTERS["2x2"]
    node_based = run_processes(nodes, TRAIN, {"nodes": nodes, "optimizer": "sgd", "every": 1}, limit_s=100)
    everybody = run_processes(nodes, TRAIN, {"nodes": nodes, "optimizer": "sgd", "every": "global"}, limit_s=100)
    for ours, theirs in zip(node_based, everybody, strict=True):
        for a, b in zip(ours["trace"][1][:5], theirs["trace"][1][:5], strict=True):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_device_without_memory_merges_nothing(overlap):
    other, starved = run_processes([[0], [1]], "tests.nodes.gpu_programs:starved", {"overlap": overlap}, limit_s=100)
    assert "DeviceMemoryError: an exchange found no memory on its device, and nothing was merged" in starved["error"]
    assert "PeerError: rank 1" in other["error"]
    assert "DeviceMemoryError" in other["error"]
    assert starved["away"] == other["away"] == 0.0


def test_nan_names_the_rank_and_the_step():
    for text in run_processes(ragged(2, 1), "tests.nodes.gpu_programs:poison", {}, limit_s=100):
        assert "[1]" in text
        assert "step 3" in text


def test_a_resumed_run_is_bit_identical(tmp_path):
    nodes = ragged(2, 1)
    whole = run_processes(nodes, SESSION, {"folder": str(tmp_path / "whole"), "device": "cuda"}, limit_s=100)
    crash = {"folder": str(tmp_path / "cut"), "crash_rank": 1, "crash_step": 7, "device": "cuda"}
    collect(start_processes(nodes, SESSION, crash), limit_s=100)
    resumed = run_processes(nodes, SESSION, {"folder": str(tmp_path / "cut"), "device": "cuda"}, limit_s=100)
    for ours, theirs in zip(resumed, whole, strict=True):
        assert {**ours, "made": 0} == {**theirs, "made": 0}
