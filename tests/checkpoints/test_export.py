"""The weights of a run as a file: the average that `agreed()` shows, to the bit, named as in the plain network."""

import pytest
import torch
from safetensors.torch import load_file

import evenly
from evenly.checkpoints import export_weights, folder, save_average
from evenly.checkpoints.manifest import read_manifest
from evenly.errors import CheckpointError
from tests.checkpoints.test_merging import HOW
from tests.checkpoints.trained_runs import PLANS, batch, build, train, train_odd
from tests.ranks import run_ranks

FILES = ("model.safetensors", "model.pt", "folder/")


def require_same_bits(state, expected):
    assert list(state) == list(expected)
    for name, tensor in expected.items():
        assert state[name].dtype == tensor.dtype
        assert torch.equal(state[name], tensor), name


def output(network, state):
    network.load_state_dict(state)
    return network.eval()(batch(0, 99)[0])


@pytest.mark.parametrize("settings", [{"every": 2}, {"every": 2, "overlap": 2}, {"every": 3}], ids=str)
@pytest.mark.parametrize("plan", PLANS)
def test_an_exported_run_is_what_agreed_shows(tmp_path, plan, settings):
    """After three steps: inside a period, with a pending exchange, and after an exchange."""

    def save(trained_model, gatherer, rank):
        for file in FILES:
            save_average(f"{tmp_path}/saved/{file}", [trained_model], name=None, gatherer=gatherer, rank=rank)

    world_size = sum(len(shares or [1]) for node in PLANS[plan] for shares in node)
    shown = run_ranks(world_size, lambda group: train(group, PLANS[plan], tmp_path, save=save, **settings))
    for state in shown[1:]:
        require_same_bits(state, shown[0])
    assert list(shown[0]) == list(build().state_dict())
    for file in FILES:
        export_weights(tmp_path, f"{tmp_path}/exported/{file}")
    stored = load_file(tmp_path / "exported/model.safetensors")  # the format has its own order
    require_same_bits({name: stored.pop(name) for name in shown[0]}, shown[0])
    assert not stored
    require_same_bits(torch.load(tmp_path / "exported/model.pt", weights_only=True), shown[0])
    expected = output(build(), shown[0])
    sources = [tmp_path, tmp_path / "checkpoints/step-000000003"]
    for source in sources + [tmp_path / kind / file for kind in ("exported", "saved") for file in FILES]:
        network = build(seed=5)
        evenly.load_weights(network, source)
        require_same_bits(network.state_dict(), shown[0])
        assert torch.equal(network.eval()(batch(0, 99)[0]), expected)


@pytest.mark.parametrize("how", ["overlap", "loaded"])
def test_tensors_of_every_kind_have_the_bits_of_agreed(tmp_path, how):
    """Complex, of low precision, scalars, empty, in the memory of others; with weights that were loaded, too."""
    shown = run_ranks(3, train_odd, tmp_path, HOW[how])[0]
    export_weights(tmp_path, tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    require_same_bits({n: t.float() if t.itemsize == 1 else t for n, t in state.items()}, shown)
    with pytest.raises(CheckpointError, match=r"'wide' is torch.complex128, which the format cannot hold"):
        export_weights(tmp_path, tmp_path / "model.safetensors")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_checkpoints_of_earlier_versions_are_exported_too(tmp_path):
    """They do not say how the state_dict is made of tensors: the network that loads them knows it."""
    shown = run_ranks(3, lambda group: train(group, PLANS["whole"], tmp_path, every=3))[0]
    checkpoint = tmp_path / "checkpoints/step-000000003"
    manifest = read_manifest(checkpoint)
    for node in range(2):
        value = folder.read_part(checkpoint, f"node-{node}", manifest["files"])
        del value["model"]["form"]
        manifest["files"] |= folder.write_part(checkpoint, folder.copied(f"node-{node}", value))
    for rank in range(3):
        value = folder.read_part(checkpoint, f"rank-{rank}", manifest["files"])
        del value["trainees"]["model"]["exchanges"]["averaged"], value["trainees"]["model"]["exchanges"]["counts"]
        manifest["files"] |= folder.write_part(checkpoint, folder.copied(f"rank-{rank}", value))
    checkpoint.rename(tmp_path / "partial")
    folder.seal(tmp_path / "partial", checkpoint, {k: v for k, v in manifest.items() if k != "sizes"})
    export_weights(tmp_path, tmp_path / "old.safetensors")
    for source in (tmp_path, tmp_path / "old.safetensors"):
        network = build(seed=5)
        evenly.load_weights(network, source)
        require_same_bits(network.state_dict(), shown)
