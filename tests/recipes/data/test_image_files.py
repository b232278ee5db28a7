"""Folders of image files in the published layouts: what is found, how it is decoded, and what is refused."""

import builtins
import logging
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from evenly.errors import DataError
from evenly.recipes.data import Augmentation, FileImageSet, load_images
from evenly.recipes.data.image_files import decode_image
from evenly.recipes.data.readers.layouts import cars_entries, dogs_entries, list_images
from tests.recipes.data.pictures import write_aircraft, write_birds, write_class_folders, write_picture

LAYOUTS = {
    "folder": lambda folder: write_class_folders(folder),
    "imagenet": lambda folder: write_class_folders(folder, test="val", suffix="JPEG"),
    "cars": lambda folder: write_class_folders(folder / "car_data", suffix="jpg").parent,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_class_folders_are_classes_in_the_order_of_their_names(tmp_path, name):
    data = load_images(name, LAYOUTS[name](tmp_path), size=16)
    assert (len(data.train), len(data.test), data.classes) == (9, 6, 3)
    assert (data.channels, data.size) == (3, (16, 16))
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    images, labels, indices = data.train.__getitems__([7, 0])
    assert (images.shape, images.dtype) == ((2, 3, 16, 16), torch.uint8)
    assert (labels.tolist(), indices.tolist()) == ([2, 0], [7, 0])
    assert torch.equal(data.train[7][0], images[0])
    assert torch.equal(data.train.images[[7, 0]], images)
    assert isinstance(data.train, FileImageSet)
    assert data.train.paths[7].parent.name == "cat"


def test_birds(tmp_path):
    data = load_images("cub200", write_birds(tmp_path), size=8)
    assert (len(data.train), len(data.test), data.classes) == (4, 2, 2)
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([0, 0, 1, 1], [0, 1])
    assert [path.name for path in data.test.paths] == ["bird_1_2.jpg", "bird_2_2.jpg"]


def test_aircraft_whose_variants_have_spaces(tmp_path):
    data = load_images("aircraft", write_aircraft(tmp_path), size=8)
    assert (len(data.train), len(data.test), data.classes) == (4, 1, 2)
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([0, 1, 0, 1], [1])


def test_lists_of_matlab_number_classes_from_one():
    rows = [{"fname": "00001.jpg", "class": np.uint8(14)}, {"fname": "00002.jpg", "class": np.uint8(1)}]
    assert cars_entries(rows, Path("cars_train")) == (
        (Path("cars_train/00001.jpg"), 13),
        (Path("cars_train/00002.jpg"), 0),
    )
    entries = dogs_entries(np.array(["n1-a/1.jpg", "n2-b/2.jpg"]), np.array([1, 2]), Path("Images"))
    assert entries == ((Path("Images/n1-a/1.jpg"), 0), (Path("Images/n2-b/2.jpg"), 1))
    with pytest.raises(ValueError, match="2 files and 1 labels"):
        dogs_entries(["n1-a/1.jpg", "n2-b/2.jpg"], [1], Path("Images"))


def write_lists(folder: Path, name: str) -> Path:
    """Writes Stanford Dogs or Cars with the .mat files of their archives; needs scipy."""
    io = pytest.importorskip("scipy.io", reason="Lists in .mat files are written and read by scipy; pip install scipy.")
    if name == "dogs":
        files = [f"n0{breed}-dog/n0{breed}_{index}.jpg" for breed in (1, 2) for index in range(2)]
        for file in files:
            write_picture(folder / "Images" / file)
        (folder / "lists").mkdir()
        for part, picked in (("train", files[::2] + files[1:2]), ("test", files[3:])):
            listed = np.array([[file] for file in picked], dtype=object)
            labels = np.array([[1 + ("n02" in file)] for file in picked])
            io.savemat(folder / "lists" / f"{part}_list.mat", {"file_list": listed, "labels": labels})
        return folder
    (folder / "devkit").mkdir()
    for part, file, count in (("train", "cars_train_annos", 3), ("test", "cars_test_annos_withlabels", 1)):
        rows = np.zeros((1, count), dtype=[("class", object), ("fname", object)])
        for index in range(count):
            rows[0, index] = (index + 1, write_picture(folder / f"cars_{part}" / f"{index:05d}.jpg").name)
        io.savemat(folder / "devkit" / f"{file}.mat", {"annotations": rows})
    return folder


@pytest.mark.parametrize(("name", "labels"), [("dogs", [0, 1, 0]), ("cars", [0, 1, 2])])
def test_lists_in_matlab_files(tmp_path, name, labels):
    data = load_images(name, write_lists(tmp_path, name), size=8)
    assert data.train.labels.tolist() == labels
    assert len(data.test) == 1
    damaged = next(tmp_path.rglob("*train*.mat"))
    pytest.importorskip("scipy.io").savemat(damaged, {"other": [1, 2]})
    with pytest.raises(DataError, match=rf"{damaged} does not hold its lists: '(file_list|annotations)'"):
        load_images(name, tmp_path)
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(DataError, match=rf"{damaged} cannot be read as a Matlab file"):
        load_images(name, tmp_path)


@pytest.mark.parametrize("name", ["dogs", "cars"])
def test_without_scipy_lists_of_matlab_are_refused_with_a_way_out(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    for folder in ("Images", "lists", "devkit"):
        (tmp_path / folder).mkdir()
    with pytest.raises(DataError, match=r"only scipy can read here\. Install it .*, or sort the images into train/<cl"):
        load_images(name, tmp_path)


@pytest.mark.parametrize(
    ("mode", "size"), [("RGB", (40, 20)), ("L", (20, 40)), ("RGBA", (33, 17)), ("P", (16, 16)), ("CMYK", (9, 90))]
)
def test_images_of_all_kinds_become_the_centre_in_rgb(tmp_path, mode, size):
    image = Image.new("RGB", size, (250, 20, 30))
    image.paste((10, 220, 30), (size[0] // 2 - 2, size[1] // 2 - 2, size[0] // 2 + 2, size[1] // 2 + 2))
    path = tmp_path / f"image.{'jpg' if mode == 'CMYK' else 'png'}"
    image.convert(mode).save(path)
    pixels = decode_image(path, size=14).float()
    assert pixels.shape == (3, 14, 14)
    middle, corner = pixels[:, 6:8, 6:8].mean((1, 2)), pixels[:, 0, 0]
    grey = mode == "L"
    assert grey == bool((middle[0] - middle[1]).abs() < 2)
    assert grey or (middle[1] > 150 > middle[0] and corner[0] > 150 > corner[1])


def test_a_file_is_read_as_pillow_reads_it(tmp_path):
    path = write_picture(tmp_path / "image.png", size=(96, 64))
    expected = Image.open(path).resize((48, 32), Image.Resampling.BILINEAR).crop((10, 2, 38, 30))
    found = decode_image(path, size=28)
    assert np.array_equal(found.permute(1, 2, 0).numpy(), np.asarray(expected))


def test_limits_take_some_of_each_class(tmp_path):
    data = load_images("folder", write_class_folders(tmp_path), train_limit=3, test_limit=3, size=8)
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([0, 1, 2], [0, 1, 2])


def test_mixup_reads_the_other_images_from_their_files(tmp_path):
    data = load_images("folder", write_class_folders(tmp_path), size=16)
    augment = Augmentation(data, ["crop", "mixup"], seed=0)
    whole, probabilities = augment(*data.train.__getitems__(range(9)), epoch=0)
    assert probabilities.shape == (9, 3)
    assert torch.equal(augment(*data.train.__getitems__([4]), epoch=0)[0], whole[4:5])


def test_unreadable_images_are_named_before_training_or_left_out_if_asked(tmp_path, caplog):
    folder = write_class_folders(tmp_path)
    bad = folder / "train" / "bee" / "bee_1.png"
    bad.write_bytes(b"no image")
    with pytest.raises(DataError, match=rf"the image {bad} cannot be read: .*Replace the file .*skip_unreadable"):
        load_images("folder", folder)
    with caplog.at_level(logging.WARNING):
        data = load_images("folder", folder, skip_unreadable=True, size=8)
    assert (len(data.train), data.skipped) == (8, (bad,))
    assert str(bad) in caplog.text
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert len(data.train.images) == 8


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_an_image_that_is_cut_short_is_named_when_it_is_needed_or_left_out_if_asked(tmp_path, suffix):
    folder = write_class_folders(tmp_path, suffix=suffix)
    bad = folder / "test" / "cat" / f"cat_1.{suffix}"
    bad.write_bytes(bad.read_bytes()[:-200])
    data = load_images("folder", folder, size=8)
    with pytest.raises(DataError, match=f"the image {bad} cannot be read"):
        data.test[5]
    kept = load_images("folder", folder, size=8, skip_unreadable=True)
    assert (len(kept.test), kept.skipped) == (5, (bad,))


def test_a_class_of_unreadable_images_only_is_refused_also_if_asked_to_skip(tmp_path):
    folder = write_class_folders(tmp_path)
    for path in (folder / "train" / "bee").iterdir():
        path.write_bytes(b"")
    with pytest.raises(DataError, match=r"no image is left of the class of .*bee_0\.png"):
        load_images("folder", folder, skip_unreadable=True)


def test_without_pillow_the_extra_is_named(tmp_path, monkeypatch):
    folder = write_class_folders(tmp_path)
    true_import = builtins.__import__

    def without(name, *rest, **named):
        if name == "PIL":
            raise ImportError(name)
        return true_import(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"Pillow, which decodes them, is not installed\. .*evenly\[images\]"):
        load_images("folder", folder)


def empty_class(folder):
    (folder / "train" / "dog").mkdir()
    (folder / "train" / "dog" / "notes.txt").write_text("none yet")


def untrained_class(folder):
    write_picture(folder / "test" / "dog" / "dog.png")


def no_classes(folder):
    for path in (folder / "test").rglob("*.png"):
        path.rename(folder / "test" / path.name)
    for path in (folder / "test").iterdir():
        if path.is_dir():
            path.rmdir()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (empty_class, r"the class {folder}/train/dog has no image file\. Put images there"),
        (untrained_class, r"{folder}/test has the class 'dog', which no training image has"),
        (no_classes, r"{folder}/test has no folder of a class\. Sort the images into {folder}/test/<class>/"),
        (
            lambda folder: (folder / "train").rename(folder / "other"),
            r"no folder train in {folder}\. Put train/<class>/",
        ),
        (lambda folder: (folder / "test").rename(folder / "other"), r"no folder val in {folder}\. Put train/<class>/"),
    ],
)
def test_other_class_folders_are_refused(tmp_path, damage, told):
    damage(write_class_folders(tmp_path))
    with pytest.raises(DataError, match=told.format(folder=tmp_path)):
        load_images("folder", tmp_path)


def replaced(file, old, new):
    return lambda folder: (folder / file).write_text((folder / file).read_text().replace(old, new))


@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        ("cub200", replaced("image_class_labels.txt", "6 2\n", ""), "image_class_labels.txt 5; they .* about image 6"),
        ("cub200", replaced("train_test_split.txt", "6 0\n", "6 0\n7 0\n"), "train_test_split.txt 7; .* about image 7"),
        ("cub200", replaced("image_class_labels.txt", "6 2", "6 3"), "gives bird_2_2.jpg the class 3, not 1 to 2"),
        ("cub200", replaced("image_class_labels.txt", "6 2", "6 x"), "the class 'x', not a number"),
        ("cub200", replaced("images.txt", "6 002.Bird_2/bird_2_2.jpg", "6"), "has the line '6', not two words"),
        ("cub200", replaced("train_test_split.txt", " 0", " 1"), "the test part has no image"),
        ("cub200", replaced("images.txt", "bird_2_2", "lost"), "1 listed images are not there, first .*lost.jpg"),
        ("cub200", lambda folder: (folder / "images.txt").unlink(), "images.txt cannot be read: No such file"),
        ("aircraft", replaced("data/images_variant_test.txt", "172", "208"), "has the class 'Cessna 208', which no tr"),
        ("aircraft", lambda folder: (folder / "data/images/0062765.jpg").unlink(), "not there, first .*0062765.jpg"),
        ("aircraft", replaced("data/images_variant_trainval.txt", "Cessna 172", "737-700"), "the class 'Cessna 172'"),
    ],
)  # fmt: skip
def test_lists_that_do_not_fit_are_refused(tmp_path, name, damage, told):
    folder = {"cub200": write_birds, "aircraft": write_aircraft}[name](tmp_path)
    damage(folder)
    with pytest.raises(DataError, match=told):
        list_images(name, folder, title=name)
