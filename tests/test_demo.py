"""`make demo`: its turns become a number only if they agree, and it works without root and without data."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scripts.demo import Ratio, prepare_folder, ratio_of

from evenly.recipes.data import load_images

ROOT = Path(__file__).parents[1]


def test_turns_that_agree_give_a_number_with_its_range() -> None:
    ratio = ratio_of([2.0, 2.1, 1.9, 2.0, 2.2], [1.0, 1.0, 1.0, 1.0, 1.0])
    assert str(ratio) == "2.00x as fast (1.90 to 2.20)"


def test_one_disturbed_turn_of_many_changes_little() -> None:
    ratio = ratio_of([2.0] * 11 + [9.0], [1.0] * 12)
    assert str(ratio) == "2.00x as fast (2.00 to 2.00)"


@pytest.mark.parametrize(
    ("slow", "fast"), [([1.0, 5.0, 2.0, 9.0], [1.0] * 4), ([2.0] * 3, [1.0] * 3), ([], [])], ids=["wide", "few", "none"]
)
def test_turns_that_disagree_or_are_few_give_none(slow: list[float], fast: list[float]) -> None:
    assert "undecided" in str(ratio_of(slow, fast))
    assert ("too few" if len(slow) < 4 else "too busy") in str(ratio_of(slow, fast))


def test_the_range_holds_the_true_ratio_in_nine_of_ten_cases() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.empty(400, 2, 12, dtype=torch.float64).log_normal_(0, 0.4, generator=generator)
    ratios: list[Ratio] = [ratio_of((1.7 * slow).tolist(), fast.tolist()) for slow, fast in noise]
    assert sum(ratio.lower <= 1.7 <= ratio.upper for ratio in ratios) >= 0.88 * len(ratios)


def test_an_earlier_demo_is_replaced_and_other_files_are_not(tmp_path: Path) -> None:
    (tmp_path / "old" / "global").mkdir(parents=True)
    (tmp_path / "old" / "status").write_text("round 3")
    prepare_folder(tmp_path / "old")
    prepare_folder(tmp_path / "new")
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["lock"]
    with pytest.raises(SystemExit, match="another demo runs"):
        prepare_folder(tmp_path / "old")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("1")
    (tmp_path / "thesis" / "status").write_text("nearly done")
    with pytest.raises(SystemExit, match="--run"):
        prepare_folder(tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter").read_text() == "1"
    with pytest.raises(SystemExit, match="--run"):
        prepare_folder(tmp_path / "thesis" / "chapter")


def test_made_digits_are_the_same_every_time_and_differ_by_class() -> None:
    train, test = load_images("digits", None, train_limit=600).normalised()
    images, labels = train.tensors
    tests, _ = test.tensors
    assert torch.equal(images, load_images("digits", None, train_limit=600).normalised()[0].tensors[0])
    assert images.shape[1:] == tests.shape[1:] == (1, 28, 28)
    means = torch.stack([images[labels == digit].mean(0) for digit in range(10)]).flatten(1)
    assert torch.cdist(means, means).fill_diagonal_(9).min() > 0.5


def run_demo(folder: Path, *words: str, prefix: tuple[str, ...] = ()) -> str:
    command = [*prefix, sys.executable, str(ROOT / "scripts" / "demo.py"), "--run", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=folder.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_shown(text: str, folder: Path) -> None:
    """Checks that the three ways were compared, or said to be undecided, and that there is a page of all."""
    for way in ("global", "node-based", "planned"):
        assert way in text
        assert (folder / way / "run.jsonl").is_file()
        assert len(list((folder / way / "ranks").iterdir())) == 3
    assert len(re.findall(r"[\d.]+x as fast \([\d.]+ to [\d.]+\)|undecided", text)) == 3
    assert re.search(r"predicted ms a step +\d+ +\d+ +\d+\n", text)
    assert f"{folder / 'report.html'}" in text
    assert "predicted" in (folder / "report.html").read_text()


@pytest.mark.lab
@pytest.mark.slow
def test_a_short_demo_on_the_emulated_cluster(tmp_path: Path) -> None:
    text = run_demo(tmp_path / "demo", "--seconds", "75")
    assert_shown(text, tmp_path / "demo")
    assert "Mbit/s" in text
    assert re.search(r"MB a step across nodes +\d", text)


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare, to be another user than root")
def test_without_root_and_without_data_it_says_so_and_compares_all_the_same(tmp_path: Path) -> None:
    other = () if os.geteuid() else ("unshare", "--user", "--map-user=1000", "--map-group=1000")
    text = run_demo(tmp_path / "demo", "--seconds", "60", "--data", "/nowhere", prefix=other)
    assert_shown(text, tmp_path / "demo")
    assert "without a slow link" in text
    assert "digits drawn by the demo" in text
