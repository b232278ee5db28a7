"""Weights go into plain, compiled and wrapped networks; what does not fit is said in words and changes nothing."""

import pytest
import torch
from torch import nn

import evenly
from evenly.checkpoints import TrainedModel, save_average
from evenly.checkpoints.weight_files import plain_state, write_weights
from evenly.comm import close_groups, open_group
from evenly.errors import CheckpointError, SpecError
from tests.checkpoints.trained_runs import batch, build, gatherer_of
from tests.nodes.test_shards import MODELS, World
from tests.ranks import run_ranks

KINDS = ("model.safetensors", "model.pt", "folder/")


class Versioned(nn.Module):
    """A layer of a later version, which takes a state without a version for one of an early form; with extra state."""

    _version = 3

    def __init__(self, seed=0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, generator=torch.Generator().manual_seed(seed)))
        self.names = ["a"]

    def get_extra_state(self):
        return {"names": list(self.names), "count": 3}

    def set_extra_state(self, state):
        self.names = list(state["names"])

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        if local_metadata.get("version", 1) < 3:
            state_dict[prefix + "weight"] = -state_dict[prefix + "weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def networks(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), Versioned(seed), nn.BatchNorm1d(3))


def write(to, network):
    write_weights(to, plain_state(network.state_dict()))


@pytest.mark.parametrize("kind", KINDS)
def test_versions_and_extra_state_come_along(tmp_path, kind):
    source, target = networks(1), networks(2)
    source[1].names = ["x", "y"]
    write(f"{tmp_path}/{kind}", source)
    report = evenly.load_weights(target, tmp_path / kind)
    assert report.explain() == f"9 entries were loaded from {tmp_path / kind}"
    assert target[1].names == ["x", "y"]
    for name, tensor in source.named_parameters():
        assert torch.equal(tensor, target.get_parameter(name)), name


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_networks_have_the_names_of_plain_ones(tmp_path, kind):
    def compiled(seed):
        network = networks(seed)
        network[0] = torch.compile(network[0], backend="eager")
        return torch.compile(network, backend="eager")

    write(f"{tmp_path}/{kind}", compiled(1))
    for target in (networks(2), compiled(2)):
        evenly.load_weights(target, tmp_path / kind)
        for (_, tensor), (name, expected) in zip(
            target.named_parameters(), networks(1).named_parameters(), strict=True
        ):
            assert torch.equal(tensor, expected), name
    torch.save(compiled(1).state_dict(), tmp_path / "own.pt")  # with prefixes, as torch itself would save it
    evenly.load_weights(networks(3), tmp_path / "own.pt")


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (nn.Linear(4, 3, bias=False), "the network has no 'bias'"),
        (nn.Linear(5, 3), r"'weight' is \[3, 4\] there and \[3, 5\] in the network"),
        (nn.Bilinear(4, 2, 3), r"'weight' is \[3, 4\] there and \[3, 4, 2\] in the network"),
        (nn.Sequential(nn.Linear(4, 3)), "'0.weight', '0.bias' of the network are missing there; the network has no"),
    ],
)
def test_what_does_not_fit_is_said_and_changes_nothing(tmp_path, target, told):
    write(tmp_path / "model.pt", nn.Linear(4, 3))
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    with pytest.raises(CheckpointError, match=told) as caught:
        evenly.load_weights(target, tmp_path / "model.pt")
    assert "Nothing was changed" in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())


def test_what_is_in_both_is_loaded_without_strict(tmp_path):
    source, target = nn.Linear(4, 3), nn.Linear(4, 3, bias=False)
    write(tmp_path / "model.safetensors", source)
    report = evenly.load_weights(target, tmp_path / "model.safetensors", strict=False)
    assert (report.missing, report.unexpected, report.num_loaded) == ((), ("bias",), 1)
    assert torch.equal(source.weight, target.weight)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"no weights")
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 40)
    (tmp_path / "model.bin").write_bytes(b"")
    for name in ("model.pt", "model.safetensors"):
        with pytest.raises(CheckpointError, match=f"{name}, but it cannot be read"):
            evenly.load_weights(nn.Linear(1, 1), tmp_path / name)
    with pytest.raises(SpecError, match=r"its ending is '\.bin'"):
        evenly.load_weights(nn.Linear(1, 1), tmp_path / "model.bin")
    with pytest.raises(CheckpointError, match="there is no such folder"):
        evenly.load_weights(nn.Linear(1, 1), tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        evenly.load_weights(nn.Linear(1, 1), tmp_path)


def test_code_in_a_file_is_not_run(tmp_path):
    torch.save({"weight": nn.Linear(1, 1)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="cannot be read"):
        evenly.load_weights(nn.Linear(1, 1), tmp_path / "model.pt")


def test_files_that_are_there_are_replaced_as_a_whole(tmp_path):
    for kind in KINDS:
        write(f"{tmp_path}/{kind}", networks(1))
        write(f"{tmp_path}/{kind}", networks(2))
        target = networks(3)
        evenly.load_weights(target, tmp_path / kind)
        assert torch.equal(target[0].weight, networks(2)[0].weight)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "model.pt", "model.safetensors"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("")
    with pytest.raises(SpecError, match="holds other files"):
        write(f"{tmp_path}/other/", networks(1))


@pytest.mark.parametrize("plan", ["2|whole", "left out|2"])
def test_networks_in_training_save_and_load_too(tmp_path, plan):
    """Cut ones, also on a rank without a share: all ranks call it, and train on from these weights."""
    write(tmp_path / "given.pt", build(seed=7))
    world = World(MODELS[plan], build)

    def act(rank_group):
        with world.joined(rank_group, lambda m: torch.optim.SGD(m.parameters(), lr=0.05)) as (model, optimizer):
            x, y = batch(world.replica_of(rank_group.rank), 0)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            evenly.load_weights(model, tmp_path / "given.pt")
            trained_model = TrainedModel("model", model, optimizer, None)
            with gatherer_of(rank_group) as gatherer, model.agreed():
                to = {"gatherer": gatherer, "rank": rank_group.rank, "name": None}
                save_average(tmp_path / "saved.safetensors", [trained_model], **to)
            model.finish()

    run_ranks(world.size, act)
    network, expected = build(), build(seed=7).state_dict()
    evenly.load_weights(network, tmp_path / "saved.safetensors")
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=2e-7, atol=0)  # a weighted mean of equal values


def test_ddp_is_unwrapped(tmp_path):
    write(tmp_path / "given.pt", nn.Linear(4, 3))

    def act(rank_group):
        group = open_group(rank_group, "ddp", [0], backend="gloo", timeout_s=30)
        wrapped = nn.parallel.DistributedDataParallel(nn.Linear(4, 3), process_group=group)
        evenly.load_weights(wrapped, tmp_path / "given.pt")
        close_groups([group], failed=False)
        return wrapped.module.weight.detach()

    assert torch.equal(run_ranks(1, act)[0], torch.load(tmp_path / "given.pt", weights_only=True)["weight"])
