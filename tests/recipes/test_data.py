"""Reading Fashion-MNIST: whole files as tensors, anything else as a sentence that names the file."""

import gzip

import pytest
import torch

from evenly.errors import DataError
from evenly.recipes.fashion_data import DEBIAN, load_fashion
from evenly.recipes.idx import read_idx
from tests.recipes.images import idx, write_images

CUBE = torch.arange(24).reshape(2, 3, 4)


@pytest.mark.parametrize("tensor", [CUBE, torch.arange(5), torch.tensor([[255]])])
def test_an_idx_file_packed_or_plain(tmp_path, tensor):
    plain, packed = tmp_path / "file", tmp_path / "file.gz"
    plain.write_bytes(idx(tensor))
    packed.write_bytes(gzip.compress(idx(tensor)))
    for path in (plain, packed):
        assert torch.equal(read_idx(path), tensor.to(torch.uint8))


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


@pytest.mark.parametrize("packed", [True, False])
def test_a_folder_of_four_files(tmp_path, packed):
    train, test = load_fashion(write_images(tmp_path, packed=packed), limit=50)
    assert (len(train), len(test)) == (50, 20)
    image, label = train[13]
    assert image.shape == (1, 28, 28)
    assert image.dtype == torch.float32
    assert (label.dtype, int(label)) == (torch.int64, 3)


@pytest.mark.parametrize("lost", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
def test_a_missing_file_is_named_with_both_ways_to_get_it(tmp_path, lost):
    (write_images(tmp_path) / f"{lost}.gz").unlink()
    with pytest.raises(DataError) as caught:
        load_fashion(tmp_path)
    for words in (f"no {lost}(.gz) in {tmp_path}", "apt-get install dataset-fashion-mnist", "--data DIR"):
        assert words in str(caught.value)


def test_files_that_do_not_fit_together_are_refused(tmp_path):
    write_images(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(torch.arange(63))))
    with pytest.raises(DataError, match=r"train files hold images \[64, 28, 28\] and labels \[63\]"):
        load_fashion(tmp_path)


@pytest.mark.skipif(not DEBIAN.is_dir(), reason=f"The real images are not in {DEBIAN}: install dataset-fashion-mnist.")
def test_the_real_images():
    train, test = load_fashion()
    assert (len(train), len(test)) == (60_000, 10_000)
    images, labels = train.tensors
    assert torch.bincount(labels).tolist() == [6000] * 10
    assert images.mean().abs() < 1e-2
    assert (images.std() - 1).abs() < 1e-2
