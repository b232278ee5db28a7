"""Reading MNIST and CIFAR-10: whole files as tensors, anything else as a sentence that names file and remedy."""

import gzip
from pathlib import Path

import pytest
import torch
from evenly.recipes.shares import SharesConfig, train_shares

from evenly.errors import DataError
from evenly.recipes import cifar_data, mnist_data
from evenly.recipes.cifar_data import TEST, TRAIN, load_cifar10
from evenly.recipes.mnist_data import load_mnist
from tests.recipes.cifar import write_cifar
from tests.recipes.images import idx, write_images

DATA = Path(__file__).parents[2] / "data"
FETCH = f"The real images are not in {DATA}: run scripts/fetch-data.py."


@pytest.mark.parametrize("packed", [True, False])
def test_mnist_packed_or_plain(tmp_path, packed):
    train, test = load_mnist(write_images(tmp_path, packed=packed), limit=50)
    assert (len(train), len(test)) == (50, 20)
    image, label = train[13]
    assert (image.shape, image.dtype) == ((1, 28, 28), torch.float32)
    assert (label.dtype, int(label)) == (torch.int64, 3)


def test_mnist_is_normalised_by_its_own_figures(tmp_path):
    write_images(tmp_path, packed=False)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(torch.full((64, 28, 28), 255)))
    train, _ = load_mnist(tmp_path)
    assert torch.allclose(train.tensors[0], torch.tensor((1 - 0.1307) / 0.3081))


@pytest.mark.parametrize("lost", ["train-labels-idx1-ubyte", "t10k-images-idx3-ubyte"])
def test_a_missing_file_of_mnist_is_named_with_the_way_to_get_it(tmp_path, lost):
    (write_images(tmp_path) / f"{lost}.gz").unlink()
    with pytest.raises(DataError) as caught:
        load_mnist(tmp_path)
    for words in ("MNIST was asked for", f"no {lost}(.gz) in {tmp_path}", "scripts/fetch-data.py", "data/mnist"):
        assert words in str(caught.value)
    assert "Fashion" not in str(caught.value)


def test_files_that_are_not_mnist_are_refused(tmp_path):
    write_images(tmp_path)
    images, labels = tmp_path / "train-images-idx3-ubyte.gz", tmp_path / "train-labels-idx1-ubyte.gz"
    whole = gzip.decompress(images.read_bytes())
    labels.write_bytes(gzip.compress(idx(torch.arange(64) % 11)))
    with pytest.raises(DataError, match=rf"MNIST .* in {tmp_path} the train labels go up to 10, not 9\. Give the"):
        load_mnist(tmp_path)
    labels.write_bytes(gzip.compress(idx(torch.arange(63) % 10)))
    with pytest.raises(DataError, match=r"images \[64, 28, 28\] and labels \[63\], .*Give the folder of MNIST"):
        load_mnist(tmp_path)
    images.write_bytes(gzip.compress(whole[:-5]))
    with pytest.raises(DataError, match=f"{images} cannot be read as an idx file: it should hold 50176 bytes"):
        load_mnist(tmp_path)


def test_a_folder_of_cifar(tmp_path):
    train, test = load_cifar10(write_cifar(tmp_path))
    assert (len(train), len(test)) == (40, 10)
    assert train.tensors[1].tolist() == [label % 10 for label in range(40)]
    image, label = train[13]
    assert (image.shape, image.dtype) == ((3, 32, 32), torch.float32)
    assert (label.dtype, int(label)) == (torch.int64, 3)


def test_planes_rows_and_channels_of_cifar_are_in_their_places(tmp_path):
    pixels = torch.arange(3 * 32 * 32) % 251
    write_cifar(tmp_path)
    (tmp_path / TEST[0]).write_bytes(bytes([7, *pixels.tolist()]))
    _, test = load_cifar10(tmp_path)
    expected = pixels.reshape(3, 32, 32).double() / 255
    mean, std = (torch.tensor(values).double()[:, None, None] for values in (cifar_data.MEAN, cifar_data.STD))
    assert torch.allclose(test.tensors[0][0].double(), (expected - mean) / std, atol=1e-6)
    assert test.tensors[1].tolist() == [7]


def test_a_limit_keeps_the_first_training_images_of_cifar(tmp_path):
    write_cifar(tmp_path)
    whole, kept = load_cifar10(tmp_path), load_cifar10(tmp_path, limit=19)
    assert [len(part) for part in kept] == [19, 10]
    for mine, all_of_them in zip(kept[0].tensors, whole[0].tensors, strict=True):
        assert torch.equal(mine, all_of_them[:19])
    assert len(load_cifar10(tmp_path, limit=1000)[0]) == 40


@pytest.mark.parametrize("lost", [TRAIN[0], TRAIN[4], TEST[0]])
def test_a_missing_file_of_cifar_is_named_with_the_way_to_get_it(tmp_path, lost):
    (write_cifar(tmp_path) / lost).unlink()
    with pytest.raises(DataError) as caught:
        load_cifar10(tmp_path, limit=1)
    for words in ("CIFAR-10 was asked for", f"no {lost} in {tmp_path}", "scripts/fetch-data.py", "data/cifar10"):
        assert words in str(caught.value)


@pytest.mark.parametrize("name", [TRAIN[2], TEST[0]])
@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda raw: raw[:-1], r"has \d+ bytes, not whole records of 3073"),
        (lambda raw: raw + b"\0", r"has \d+ bytes, not whole records of 3073"),
        (lambda raw: b"", "has 0 bytes, not whole records of 3073"),
        (lambda raw: raw[:3073] + b"\x0a" + raw[3074:], "gives record 1 the label 10, not 0 to 9"),
        (lambda raw: b"\xff" + raw[1:], "gives record 0 the label 255, not 0 to 9"),
    ],
)
def test_a_damaged_file_of_cifar_is_refused(tmp_path, name, damage, told):
    path = write_cifar(tmp_path) / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=rf"CIFAR-10 was asked for, but {path} {told}\. Fetch the file again"):
        load_cifar10(tmp_path, limit=1)


@pytest.mark.skipif(not (DATA / "mnist").is_dir(), reason=FETCH)
def test_the_real_digits():
    train, test = load_mnist(DATA / "mnist")
    assert (len(train), len(test)) == (60_000, 10_000)
    images, labels = train.tensors
    assert torch.bincount(labels).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert (images * mnist_data.STD).mean().abs() < 1e-3
    assert (images.std() - 1).abs() < 1e-3


@pytest.mark.skipif(not (DATA / "cifar10").is_dir(), reason=FETCH)
def test_the_real_things():
    train, test = load_cifar10(DATA / "cifar10")
    assert (len(train), len(test)) == (50_000, 10_000)
    images, labels = train.tensors
    assert torch.bincount(labels).tolist() == [5000] * 10
    assert images.mean((0, 2, 3)).abs().max() < 1e-3
    assert (images.std((0, 2, 3)) - 1).abs().max() < 1e-3


@pytest.mark.parametrize(("case", "folder"), [("cifar", "data/cifar10"), ("mnist", "data/mnist")])
def test_a_recipe_without_data_names_the_folder_that_the_script_makes(case, folder):
    with pytest.raises(DataError, match=rf"Run scripts/fetch-data.py, then pass --data {folder}\."):
        train_shares(SharesConfig(), case=case)
