"""Recipes: whole small trainings of every task, recorded, resumed and used for predictions."""

import csv

import pytest
import torch

from evenly import Run
from evenly.errors import SpecError
from evenly.recipes.config import load_config
from evenly.recipes.tasks.training import train
from evenly.reports import row_of
from evenly.spec import CheckpointSaved, EpochDone, ExchangeDone, Measured, RunFinished, RunStarted
from tests.recipes.images import write_images

TINY = load_config("fashion").changed({"epochs": 2, "batch_size": 16, "network.width": 4, "lr": 0.05})


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data"))


def test_a_training_is_recorded_and_a_resumed_one_is_already_done(tmp_path, data):
    folder = tmp_path / "tiny"
    figures = train(TINY, folder=folder, data=data)
    run = Run.read(folder)
    started, finished = run.last(RunStarted), run.last(RunFinished)
    assert started.settings["total_steps"] == 8
    assert started.settings["width"] == 4
    assert (finished.steps, finished.samples, finished.exchanges) == (8, 128, len(run.of(ExchangeDone)))
    assert [event.epoch for event in run.of(EpochDone)] == [1, 2]
    assert [event.step for event in run.of(CheckpointSaved)] == [4, 8]
    losses = [event.values["loss"] for event in run.of(Measured) if "loss" in event.values]
    assert losses[1] < losses[0]
    assert row_of(run).accuracy == figures["accuracy"]
    with (folder / "results.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert float(rows[1]["accuracy"]) == figures["accuracy"]
    assert float(rows[0]["loss"]) == losses[0]

    heard = []
    assert train(TINY, folder=folder, data=data, listeners=[heard.append]) == figures
    again = Run(events=tuple(heard))
    assert again.last(RunStarted).resumed_step == 8
    assert (again.last(RunFinished).steps, again.of(EpochDone)) == (0, [])
    assert row_of(Run.read(folder)).state == "done"
    assert row_of(Run.read(folder)).samples_per_s > 0

    train(TINY, folder=folder, data=data, resume=False)
    assert Run.read(folder).last(RunFinished).steps == 8


def test_the_same_settings_give_the_same_network(data, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a GPU adds in any order
    first, second = (losses(TINY, data) for _ in range(2))
    assert first == second
    assert losses(TINY.changed({"seed": 1}), data) != first


def losses(config, data):
    heard = []
    train(config, data=data, listeners=[heard.append])
    return [event.values for event in heard if isinstance(event, Measured)]


def test_a_run_with_a_listener_writes_nothing_of_its_own(data, capsys):
    train(TINY, data=data, listeners=[lambda _: None])
    assert capsys.readouterr() == ("", "")
    train(TINY, data=data)
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["epoch 1/2", "epoch 2/2"]


def test_limits_and_bfloat16(data):
    heard = []
    changes = {"epochs": 1, "batch_size": 8, "width": 2, "train_limit": 20, "test_limit": 5, "precision": "bf16"}
    figures = train(TINY.changed(changes), data=data, listeners=[heard.append])
    assert figures["accuracy"] * 5 == pytest.approx(round(figures["accuracy"] * 5))
    assert Run(events=tuple(heard)).last(RunFinished).samples == 20


def test_a_wrong_period_ends_the_run_and_closes_the_group(data):
    with pytest.raises(SpecError, match="every='often' is not a period"):
        train(TINY.changed({"every": "often"}), data=data)


def test_a_generator_and_its_images(tmp_path, data):
    config = load_config("gan", changes=["epochs=2", "batch_size=32", "network.latent=8", "data=fashion"])
    figures = train(config, folder=tmp_path, data=data)
    assert set(figures) == {"accuracy", "generated_accuracy"}
    for epoch in (1, 2):
        assert (tmp_path / "images" / f"epoch-{epoch}.png").read_bytes().startswith(b"\x89PNG")
    values = [event.values for event in Run.read(tmp_path).of(Measured)]
    assert [value["epoch"] for value in values[:2]] == [1, 2]
    assert all("generator_loss" in value and "discriminator_loss" in value for value in values[:2])


def test_text_character_by_character(tmp_path):
    (tmp_path / "shakespeare.txt").write_text("to be or not to be, that is the question. " * 60)
    changes = ["epochs=2", "batch_size=16", "network={width=16, depth=1, heads=2}", "context=16"]
    figures = train(load_config("language", changes=changes), folder=tmp_path / "run", data=tmp_path)
    assert 0 < figures["validation_loss"] < 3
    assert figures["bits_per_character"] == pytest.approx(figures["validation_loss"] / 0.693147, rel=1e-4)


@pytest.mark.parametrize(
    ("recipe", "change", "told"),
    [
        ("gan", "shares=[2,1]", r"shares=\(2.0, 1.0\) was given, but a gan training has no use for it"),
        ("gan", "augment=['flip']", "augment=.* was given, but a gan training"),
        ("language", "label_smoothing=0.1", "label_smoothing=0.1 was given, but a language training"),
        ("fashion", "context=64", "context=64 was given, but a classification training"),
    ],
)
def test_a_setting_that_would_change_nothing_is_refused(recipe, change, told):
    with pytest.raises(SpecError, match=told):
        train(load_config(recipe, changes=[change]))


def test_weights_of_another_training_are_the_beginning(tmp_path, data):
    from evenly.recipes.networks import build_network

    network = build_network("small-resnet", classes=3, channels=1, size=28, width=4)  # another head
    torch.save(network.state_dict(), tmp_path / "weights.pt")
    config = TINY.changed({"pretrained": str(tmp_path / "weights.pt"), "epochs": 1, "lr": 1e-12, "weight_decay": 0.0})
    train(config, folder=tmp_path / "run", data=data)
    from evenly.checkpoints import load_weights

    trained = build_network("small-resnet", classes=10, channels=1, size=28, width=4)
    load_weights(trained, tmp_path / "run")
    torch.testing.assert_close(trained.stem[0].weight, network.stem[0].weight)
    torch.save({"other.weight": torch.zeros(3)}, tmp_path / "other.pt")
    with pytest.raises(SpecError, match="none of its 1 tensors fits this network"):
        train(TINY.changed({"pretrained": str(tmp_path / "other.pt")}), data=data)
