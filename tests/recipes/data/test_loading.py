"""Finding and loading data sets by name: folders, sizes, batches, and what is refused."""

from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader

from evenly.errors import DataError, SpecError
from evenly.recipes.data import DATASETS, ImageSet, find_folder, load_images, look_for
from tests.recipes.cifar import write_cifar
from tests.recipes.data.pictures import write_class_folders
from tests.recipes.images import write_images


def test_a_given_folder_comes_first_then_data_then_the_system_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = write_images(tmp_path / "given")
    with pytest.raises(DataError, match=r"MNIST .* no folder data/mnist\. Fetch it"):
        find_folder("mnist", None)
    write_images(tmp_path / "data" / "mnist")
    assert str(find_folder("mnist", None)) == "data/mnist"
    assert find_folder("mnist", given) == given
    with pytest.raises(DataError, match=rf"MNIST was asked for, but there is no folder {tmp_path}/absent\. Fetch it"):
        find_folder("mnist", tmp_path / "absent")


def test_a_system_package_is_used_unless_data_has_all_files(tmp_path, monkeypatch):
    system = write_images(tmp_path / "system")
    monkeypatch.setitem(DATASETS, "fashion", replace(DATASETS["fashion"], system_folder=system))
    (tmp_path / "data" / "fashion").mkdir(parents=True)
    assert find_folder("fashion", None, root=tmp_path / "data") == system
    write_images(tmp_path / "data" / "fashion")
    assert find_folder("fashion", None, root=tmp_path / "data") == tmp_path / "data" / "fashion"


@pytest.mark.parametrize(("name", "near"), [("minst", "mnist"), ("cifar-100", "cifar100"), ("imgnet", "imagenet")])
def test_an_unknown_name_gets_the_nearest_one(name, near):
    with pytest.raises(SpecError, match=rf"data set '{name}' .* Did you mean '{near}'\? There are: mnist, fashion"):
        load_images(name, None)


def test_drawn_digits_need_no_files(tmp_path):
    data = load_images("digits", None, test_limit=20)
    assert (len(data.train), len(data.test), data.classes) == (6000, 20, 10)
    assert torch.equal(data.test.images, load_images("digits", None).test.images[:20])
    pixels = data.train.images.float() / 255
    assert abs(float(pixels.mean()) - data.mean[0]) < 1e-3
    assert abs(float(pixels.std()) - data.std[0]) < 1e-3
    with pytest.raises(DataError, match=r"but they have no files\. They are drawn: give no folder"):
        load_images("digits", tmp_path)


@pytest.mark.parametrize("size", [16, 28, 40])
def test_images_in_memory_are_resized(tmp_path, size):
    data = load_images("mnist", write_images(tmp_path), size=size)
    assert data.train.images.shape == (64, 1, size, size)
    assert data.size == (size, size)
    plain = load_images("mnist", tmp_path).train.images.double().mean((1, 2, 3))
    assert torch.allclose(data.train.images.double().mean((1, 2, 3)), plain, atol=1.0)


@pytest.mark.parametrize("argument", ["train_limit", "test_limit", "size"])
def test_numbers_below_one_are_refused(tmp_path, argument):
    with pytest.raises(SpecError, match=f"{argument}=0 was given for MNIST"):
        load_images("mnist", write_images(tmp_path), **{argument: 0})
    with pytest.raises(SpecError, match=r"images of 'shakespeare' .* Use load_text"):
        load_images("shakespeare", tmp_path)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gets_whole_batches_with_indices(tmp_path, workers):
    data = load_images("cifar10", write_cifar(tmp_path))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()
    loader = DataLoader(data.train, batch_size=16, sampler=order, num_workers=workers, collate_fn=ImageSet.collate)
    batches = list(loader)
    images, labels, indices = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert [len(batch[0]) for batch in batches] == [16, 16, 8]
    assert indices.tolist() == order
    assert torch.equal(images, data.train.images[order])
    assert torch.equal(labels, data.train.labels[order])


def test_a_set_is_a_sequence_of_samples(tmp_path):
    data = load_images("cifar10", write_cifar(tmp_path))
    assert [int(index) for _, _, index in data.train] == list(range(40))
    assert int(data.train[-1][2]) == 39
    with pytest.raises(IndexError):
        data.train[40]


def test_how_much_is_there_is_told_from_names_and_headers(tmp_path):
    assert look_for("mnist", root=tmp_path).folder is None
    write_images(tmp_path / "mnist")
    write_cifar(tmp_path / "cifar10")
    write_class_folders(tmp_path / "folder")
    assert look_for("mnist", root=tmp_path).counts == (64, 20)
    assert look_for("cifar10", root=tmp_path).counts == (40, 10)
    assert look_for("folder", root=tmp_path).counts == (9, 6)
    assert look_for("mnist", root=tmp_path).is_whole(DATASETS["mnist"]) is False
    assert look_for("folder", root=tmp_path).is_whole(DATASETS["folder"]) is None
    assert look_for("digits", root=tmp_path).is_whole(DATASETS["digits"]) is True
    (tmp_path / "cifar10" / "test_batch.bin").unlink()
    assert "no test_batch.bin" in look_for("cifar10", root=tmp_path).problem
