"""The recipe `fashion`: its network, and a whole small training that is recorded and resumed."""

import pytest
import torch

from evenly import Run
from evenly.errors import SpecError
from evenly.recipes.fashion import FashionConfig, train_fashion
from evenly.recipes.networks.small_resnet import SmallResNet
from evenly.reports import row_of
from evenly.spec import CheckpointSaved, EpochDone, ExchangeDone, Measured, RunFinished, RunStarted
from tests.recipes.images import write_images

TINY = FashionConfig(epochs=2, batch_size=16, width=4, lr=0.05)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize(("width", "blocks", "classes"), [(1, 1, 10), (4, 2, 3)])
def test_a_network_of_any_width_and_depth_gives_logits(width, blocks, classes):
    network = SmallResNet(width, blocks=blocks, classes=classes)
    assert network(torch.zeros(3, 1, 28, 28)).shape == (3, classes)


@pytest.mark.parametrize(("width", "least", "most"), [(16, 0.8 * 80_000, 1.2 * 80_000), (64, 1_000_000, 1_500_000)])
def test_networks_have_the_sizes_that_are_claimed(width, least, most):
    assert least < sum(parameter.numel() for parameter in SmallResNet(width).parameters()) < most


def test_a_training_is_recorded_and_a_resumed_one_is_already_done(tmp_path, data):
    folder = tmp_path / "tiny"
    accuracy = train_fashion(TINY, folder=folder, data=data)
    run = Run.read(folder)
    started, finished = run.last(RunStarted), run.last(RunFinished)
    assert started.settings["total_steps"] == 8
    assert started.settings["width"] == 4
    assert (finished.steps, finished.samples, finished.exchanges) == (8, 128, len(run.of(ExchangeDone)))
    assert [event.epoch for event in run.of(EpochDone)] == [1, 2]
    assert [event.step for event in run.of(CheckpointSaved)] == [4, 8]
    losses = [event.values["loss"] for event in run.of(Measured) if "loss" in event.values]
    assert losses[1] < losses[0]
    assert row_of(run).accuracy == accuracy

    heard = []
    assert train_fashion(TINY, folder=folder, data=data, listener=heard.append) == accuracy
    again = Run(events=tuple(heard))
    assert again.last(RunStarted).resumed_step == 8
    assert (again.last(RunFinished).steps, again.of(EpochDone)) == (0, [])
    assert row_of(Run.read(folder)).state == "done"
    assert row_of(Run.read(folder)).samples_per_s > 0

    train_fashion(TINY, folder=folder, data=data, resume=False)
    assert Run.read(folder).last(RunFinished).steps == 8


def test_the_same_settings_give_the_same_network(data, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a GPU adds in any order
    first, second = (losses(TINY, data) for _ in range(2))
    assert first == second
    assert losses(TINY.model_copy(update={"seed": 1}), data) != first


def losses(config, data):
    heard = []
    train_fashion(config, data=data, listener=heard.append)
    return [event.values for event in heard if isinstance(event, Measured)]


def test_a_run_with_a_listener_writes_nothing_of_its_own(data, capsys):
    train_fashion(TINY, data=data, listener=lambda _: None)
    assert capsys.readouterr() == ("", "")
    train_fashion(TINY, data=data)
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["epoch 1/2", "epoch 2/2"]


def test_limits_and_bfloat16(data):
    heard = []
    config = FashionConfig(epochs=1, batch_size=8, width=2, train_limit=20, test_limit=5, precision="bf16")
    accuracy = train_fashion(config, data=data, listener=heard.append)
    assert accuracy * 5 == pytest.approx(round(accuracy * 5))
    assert Run(events=tuple(heard)).last(RunFinished).samples == 20


def test_a_wrong_period_ends_the_run_and_closes_the_group(data):
    with pytest.raises(SpecError, match="every='often' is not a period"):
        train_fashion(TINY.model_copy(update={"every": "often"}), data=data)
