"""A bit that flips in any file of a checkpoint is found; the checkpoint before is used, and the log says so."""

import logging
import random
import shutil
from pathlib import Path

import pytest
import torch

from evenly import Session
from evenly.checkpoints import export_weights, folder
from evenly.errors import CheckpointError
from tests.checkpoints.saving_programs import Grown, opened, resume, save_steps
from tests.ranks import run_ranks
from tests.session.programs import dataset, network


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The checkpoints of a small run on one rank, of steps 7 and 14."""
    root = tmp_path_factory.mktemp("flips")
    with Session(root, device="cpu", checkpoint_every=7, progress=False) as session:
        torch.manual_seed(5)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        synchronized, _, loader = session.prepare(model, optimizer, dataset(), plan=session.plan(batch_size=8))
        for _ in session.epochs(2):
            for x, y in loader:
                torch.nn.functional.cross_entropy(synchronized(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    return root


def flip(file: Path, byte: int, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(byte)
        value = stream.read(1)[0]
        stream.seek(byte)
        stream.write(bytes([value ^ (1 << bit)]))


def flip_many(root: Path, count: int, caplog) -> int:
    """Flips `count` bits, one at a time, each in a random file of the newest checkpoint; returns how many are found."""
    before, newest = folder.checkpoints(root)
    places, found = random.Random(500), 0
    files = sorted(newest.iterdir())

    def act(rank_group):
        nonlocal found
        with opened(rank_group, root, [[0]]) as checkpoints:
            for number in range(count):
                file = files[number % len(files)]
                byte, bit = places.randrange(file.stat().st_size), places.randrange(8)
                flip(file, byte, bit)
                caplog.clear()
                restored = checkpoints.load_newest()
                (aside,) = root.glob("damaged-*")
                (warning,) = caplog.messages
                where = f"bit {bit} of byte {byte} of {file.name}"
                assert restored is not None, where
                assert restored["manifest"]["step"] == folder.step_of(before), where
                assert file.name in warning, where
                assert str(before) in warning, where
                found += 1
                aside.rename(newest)
                flip(file, byte, bit)
            whole = checkpoints.load_newest()
            assert whole is not None
            assert whole["manifest"]["step"] == folder.step_of(newest)

    with caplog.at_level(logging.WARNING):
        run_ranks(1, act)
    return found


def test_some_flipped_bits_are_found(saved, tmp_path, caplog):
    shutil.copytree(saved / "checkpoints", tmp_path / "checkpoints")
    assert flip_many(tmp_path / "checkpoints", 40, caplog) == 40


@pytest.mark.slow
def test_500_flipped_bits_are_found(saved, tmp_path, caplog):
    shutil.copytree(saved / "checkpoints", tmp_path / "checkpoints")
    assert flip_many(tmp_path / "checkpoints", 500, caplog) == 500


@pytest.mark.parametrize("name", ["manifest.json", "node-0.json", "node-0.safetensors", "rank-0.safetensors"])
@pytest.mark.parametrize("how", ["cut", "missing", "empty"])
def test_a_file_that_is_cut_or_missing_is_found(saved, tmp_path, caplog, name, how):
    root = tmp_path / "checkpoints"
    shutil.copytree(saved / "checkpoints", root)
    before, newest = folder.checkpoints(root)
    file = newest / name
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: -1 if how == "cut" else 0])
    with pytest.raises(CheckpointError, match=name.split(".")[0]):
        export_weights(tmp_path, tmp_path / "weights.safetensors")

    def act(rank_group):
        with opened(rank_group, root, [[0]]) as checkpoints:
            restored = checkpoints.load_newest()
            assert restored is not None
            assert restored["manifest"]["step"] == folder.step_of(before)

    with caplog.at_level(logging.WARNING):
        run_ranks(1, act)
    assert name in caplog.text
    assert export_weights(tmp_path, tmp_path / "weights.safetensors").step == folder.step_of(before)


def test_ranks_use_the_same_checkpoint_though_one_of_them_finds_the_damage(tmp_path):
    save_steps(tmp_path, [1, 2, 3], keep=3)
    flip(tmp_path / "step-000000003" / "rank-1.safetensors", 200, 3)
    flip(tmp_path / "step-000000002" / "rank-0.json", 20, 3)

    def act(rank_group):
        with opened(rank_group, tmp_path) as checkpoints:
            return resume(checkpoints, Grown(rank_group.rank))

    assert run_ranks(2, act) == [1, 1]
    assert {path.name for path in tmp_path.glob("damaged-*")} == {"damaged-step-000000002", "damaged-step-000000003"}
