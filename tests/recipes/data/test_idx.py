"""Reading MNIST and Fashion-MNIST: whole files as bytes, anything else as a sentence that names the file."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from evenly.errors import DataError
from evenly.recipes.data import DATASETS, load_images
from evenly.recipes.data.readers.idx import read_idx
from tests.recipes.images import idx, write_images

CUBE = torch.arange(24).reshape(2, 3, 4)
DATA = Path(__file__).parents[3] / "data"


@pytest.mark.parametrize("tensor", [CUBE, torch.arange(5), torch.tensor([[255]])])
def test_an_idx_file_packed_or_plain(tmp_path, tensor):
    plain, packed = tmp_path / "file", tmp_path / "file.gz"
    plain.write_bytes(idx(tensor))
    packed.write_bytes(gzip.compress(idx(tensor)))
    for path in (plain, packed):
        assert np.array_equal(read_idx(path), tensor.numpy())


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"", "does not begin like an idx file"),
        (b"\0\0\x08", "does not begin like an idx file"),
        (b"\x89PNG and so on", "does not begin like an idx file"),
        (idx(CUBE, kind=13), "does not begin like an idx file of bytes"),
        (idx(CUBE)[:9], "header is cut short"),
        (idx(CUBE)[:-1], r"should hold 24 bytes for \(2, 3, 4\) but holds 23"),
        (idx(CUBE) + b"x", "but holds 25"),
        (idx(CUBE, dims=2), r"should hold 6 bytes for \(2, 3\) but holds 28"),
        (idx(torch.zeros(0, 28, 28)), r"holds nothing: \(0, 28, 28\)"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_is_not_whole_is_refused(tmp_path, raw, told, packed):
    path = tmp_path / f"images{'.gz' * packed}"
    path.write_bytes(gzip.compress(raw) if packed else raw)
    with pytest.raises(DataError, match=rf"{path} cannot be read as an idx file: .*{told}.*Fetch the file again"):
        read_idx(path)


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-20], lambda raw: b"plain", lambda raw: raw[:30] + b"zz" + raw[32:]]
)
def test_a_packed_file_that_cannot_be_unpacked_is_refused(tmp_path, damage):
    path = tmp_path / "images.gz"
    path.write_bytes(damage(gzip.compress(idx(CUBE))))
    with pytest.raises(DataError, match=str(path)):
        read_idx(path)


@pytest.mark.parametrize("name", ["mnist", "fashion"])
@pytest.mark.parametrize("packed", [True, False])
def test_a_folder_of_four_files(tmp_path, name, packed):
    data = load_images(name, write_images(tmp_path, packed=packed), train_limit=50, test_limit=7)
    assert (len(data.train), len(data.test), data.classes) == (50, 7, 10)
    assert (data.channels, data.size) == (1, (28, 28))
    image, label, index = data.train[13]
    assert (image.shape, image.dtype) == ((1, 28, 28), torch.uint8)
    assert (label.dtype, int(label), int(index)) == (torch.int64, 3, 13)


@pytest.mark.parametrize(
    ("name", "lost", "told"),
    [
        ("fashion", "train-images-idx3-ubyte", "apt-get install dataset-fashion-mnist"),
        ("mnist", "t10k-labels-idx1-ubyte", "evenly data fetch mnist"),
    ],
)
def test_a_missing_file_is_named_with_both_ways_to_get_it(tmp_path, name, lost, told):
    (write_images(tmp_path) / f"{lost}.gz").unlink()
    with pytest.raises(DataError) as caught:
        load_images(name, tmp_path)
    for words in (f"{DATASETS[name].title} was asked for", f"no {lost}(.gz) in {tmp_path}", told, "give a folder with"):
        assert words in str(caught.value)


def test_files_that_do_not_fit_together_are_refused(tmp_path):
    write_images(tmp_path)
    labels = tmp_path / "train-labels-idx1-ubyte.gz"
    labels.write_bytes(gzip.compress(idx(torch.arange(63) % 10)))
    with pytest.raises(DataError, match=r"train files hold images \[64, 28, 28\] and labels \[63\].*folder of MNIST"):
        load_images("mnist", tmp_path)
    labels.write_bytes(gzip.compress(idx(torch.arange(64) % 11)))
    with pytest.raises(DataError, match=rf"MNIST .* in {tmp_path} the train labels go up to 10, not 9\. Give the"):
        load_images("mnist", tmp_path)


def test_images_are_normalised_by_the_figures_of_their_set(tmp_path):
    write_images(tmp_path, packed=False)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(torch.full((64, 28, 28), 255)))
    train, _ = load_images("mnist", tmp_path).normalised()
    assert torch.allclose(train.tensors[0], torch.tensor((1 - 0.1307) / 0.3081))


def test_a_whole_file_of_another_data_set_is_refused(tmp_path):
    write_images(tmp_path, packed=False)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(torch.arange(10_000) % 10))
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx(torch.zeros(10_000, 28, 28, dtype=torch.uint8)))
    with pytest.raises(
        DataError, match=r"MNIST .*t10k-images-idx3-ubyte has the md5 sum \w+, not 2646.*another data set"
    ):
        load_images("mnist", tmp_path)


FASHION = DATASETS["fashion"].system_folder


@pytest.mark.skipif(not FASHION.is_dir(), reason=f"The real images are not in {FASHION}: evenly data fetch fashion.")
def test_the_real_clothes():
    data = load_images("fashion", FASHION)
    assert (len(data.train), len(data.test)) == (60_000, 10_000)
    assert torch.bincount(data.train.labels).tolist() == [6000] * 10
    pixels = data.train.images.float()
    assert (pixels.mean() / 255 - data.mean[0]).abs() < 1e-4
    assert (pixels.std() / 255 - data.std[0]).abs() < 1e-4
    with pytest.raises(DataError, match=r"MNIST was asked for, but .* has the md5 sum f4a8.*another data set"):
        load_images("mnist", FASHION)


@pytest.mark.skipif(
    not (DATA / "mnist").is_dir(), reason=f"The real images are not in {DATA}: evenly data fetch mnist."
)
def test_the_real_digits():
    data = load_images("mnist", DATA / "mnist")
    assert (len(data.train), len(data.test)) == (60_000, 10_000)
    assert torch.bincount(data.train.labels).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    images = data.normalise(data.train.images)
    assert images.mean().abs() < 1e-3
    assert (images.std() - 1).abs() < 1e-3
