"""`evenly data`: what is here, how to get the rest, and whether it is whole."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from evenly.cli import app
from evenly.errors import DataError
from evenly.recipes.data import DATASETS
from tests.recipes.cifar import write_cifar
from tests.recipes.data.pictures import write_class_folders
from tests.recipes.data.sheets import write_sheets
from tests.recipes.images import write_images


def run(*words: object) -> str:
    result = CliRunner().invoke(app, ["data", *map(str, words)], env={"COLUMNS": "400"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_the_table_says_where_each_is_how_much_of_it_and_how_to_get_it(tmp_path: Path) -> None:
    write_images(tmp_path / "mnist")
    write_class_folders(tmp_path / "imagenet", test="val")
    write_cifar(tmp_path / "cifar100")
    rows = {line.split()[0]: " ".join(line.split()) for line in run("--data", tmp_path).splitlines() if line.strip()}
    assert f"{tmp_path}/mnist 64 + 20 of 60000 + 10000" in rows["mnist"]
    assert f"evenly data fetch cifar10 --to {tmp_path}" in rows["cifar10"]
    assert f"{tmp_path}/imagenet 9 + 6 of 1281167 + 50000" in rows["imagenet"]
    assert "not whole see below" in rows["cifar100"]
    assert "there is no train.bin in" in rows["cifar100:"]
    assert "Get it from its authors and put images/" in rows["cub200:"]
    assert rows.keys() >= DATASETS.keys()


def test_json_has_the_same(tmp_path: Path) -> None:
    write_cifar(tmp_path / "binary")
    write_sheets(tmp_path / "binary", tmp_path / "cifar10")
    found = json.loads(run("--data", tmp_path, "--json"))
    assert found.keys() == DATASETS.keys()
    assert found["cifar10"]["counts"] == [40, 10]
    assert (found["mnist"]["folder"], found["mnist"]["whole"]) == (None, False)
    assert found["digits"]["whole"] is True


def test_a_check_compares_checksums_where_they_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_images(tmp_path / "small", packed=False)
    with pytest.raises(DataError, match=r"MNIST .*train-images-idx3-ubyte has the md5 sum \w{32}, not 6bbc9ace"):
        run("check", "mnist", folder)
    sums = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    monkeypatch.setitem(DATASETS, "mnist", replace(DATASETS["mnist"], md5=sums))  # type: ignore[arg-type]
    assert run("check", "mnist", folder).count("as published") == 4
    (folder / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="no t10k-labels-idx1-ubyte"):
        run("check", "mnist", folder)


def test_a_check_of_image_files_decodes_all_of_them(tmp_path: Path) -> None:
    folder = write_class_folders(tmp_path)
    told = run("check", "folder", folder)
    assert "no checksum is known" in told
    assert "every image can be read" in told
    assert told.splitlines()[-1] == f"{folder}: 9 + 6"
    bad = folder / "test" / "bee" / "bee_0.png"
    bad.write_bytes(bad.read_bytes()[:-200])
    with pytest.raises(DataError, match=f"the image {bad} cannot be read"):
        run("check", "folder", folder)


def test_what_cannot_be_fetched_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no package registry has it"):
        run("fetch", "dogs", "--to", tmp_path)
