"""Folders of image files -> which file belongs to which part and class, in the layouts of the published sets."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from evenly.errors import DataError
from evenly.recipes.data.readers.matlab import read_mat

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
CAR_MODELS = 196
Labelled = tuple[Path, int]


@dataclass(frozen=True)
class Listing:
    """The image files of a data set, each with the number of its class."""

    classes: tuple[str, ...]
    train: tuple[Labelled, ...]
    test: tuple[Labelled, ...]


def list_images(name: str, folder: Path, *, title: str) -> Listing:
    """Returns the files of a data set in the layout of that name; raises `DataError` for another layout."""
    if name == "cub200":
        return _list_birds(folder, title=title)
    if name == "aircraft":
        return _list_aircraft(folder, title=title)
    if name == "dogs":
        return _list_dogs(folder, title=title)
    if name == "cars" and (folder / "devkit").is_dir() and not (folder / "car_data").is_dir():
        return _list_cars(folder, title=title)
    if name == "cars" and (folder / "car_data").is_dir():
        folder = folder / "car_data"
    return _list_class_folders(folder, title=title)


def _list_class_folders(folder: Path, *, title: str) -> Listing:
    """Lists train/<class>/* and test/<class>/* (or val); classes are in the order of their names."""
    test_name = "test" if (folder / "test").is_dir() else "val"
    parts = {}
    for part in ("train", test_name):
        if not (folder / part).is_dir():
            raise DataError(
                f"{title} was asked for, but there is no folder {part} in {folder}. "
                "Put train/<class>/ and test/<class>/ (or val/<class>/) with image files there."
            )
        parts[part] = _class_folders(folder / part, title=title)
    classes = tuple(sorted(parts["train"]))
    number = {label: index for index, label in enumerate(classes)}
    only_tested = sorted(parts[test_name].keys() - number.keys())
    if only_tested:
        raise _only_tested(folder / test_name, only_tested, title=title)
    train, test = (
        tuple((path, number[label]) for label in sorted(parts[part]) for path in parts[part][label])
        for part in ("train", test_name)
    )
    return Listing(classes, train, test)


def _class_folders(folder: Path, *, title: str) -> dict[str, list[Path]]:
    """Returns the image files of each class; raises `DataError` for an empty class and for none at all."""
    files = {path.name: _image_files(path) for path in sorted(folder.iterdir()) if _is_class(path)}
    if not files:
        raise DataError(
            f"{title} was asked for, but {folder} has no folder of a class. "
            f"Sort the images into {folder}/<class>/, one folder for each class."
        )
    empty = [name for name, paths in files.items() if not paths]
    if empty:
        raise DataError(
            f"{title} was asked for, but the class {folder / empty[0]} has no image file"
            f"{f', and {len(empty) - 1} others have none either' if len(empty) > 1 else ''}. Put images there "
            f"({', '.join(sorted(SUFFIXES))}), or remove the folder."
        )
    return files


def _is_class(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".")


def _image_files(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:  # sets have a million files
        names = sorted(entry.name for entry in entries if not entry.name.startswith("."))
    return [folder / name for name in names if os.path.splitext(name)[1].lower() in SUFFIXES]  # noqa: PTH122


def _list_birds(folder: Path, *, title: str) -> Listing:
    """Lists CUB-200-2011: images.txt has numbers and paths, two other files the class and the part of each number."""
    paths, labels, is_train = (
        _numbered_lines(folder / name, title=title)
        for name in ("images.txt", "image_class_labels.txt", "train_test_split.txt")
    )
    for name, values in (("image_class_labels.txt", labels), ("train_test_split.txt", is_train)):
        lacking = sorted(paths.keys() ^ values.keys())
        if lacking:
            raise DataError(
                f"{title} was asked for, but in {folder} images.txt has {len(paths)} images and {name} {len(values)}; "
                f"they do not agree about image {lacking[0]}. Take all lists from the same archive."
            )
    classes = _lines_after_number(folder / "classes.txt") or sorted({Path(path).parent.name for path in paths.values()})
    entries = {key: (folder / "images" / path, _label(labels[key], folder, title=title)) for key, path in paths.items()}
    _refuse_range(entries.values(), len(classes), folder / "image_class_labels.txt", title=title)
    train = tuple(entry for key, entry in entries.items() if is_train[key] == "1")
    test = tuple(entry for key, entry in entries.items() if is_train[key] != "1")
    return _checked(Listing(tuple(classes), train, test), folder, title=title)


def _label(text: str, folder: Path, *, title: str) -> int:
    """Returns the class, from 0, of a number from 1."""
    if not text.isdecimal():
        raise DataError(
            f"{title} was asked for, but in {folder} image_class_labels.txt has the class {text!r}, not a number. "
            "Take the file from its archive again."
        )
    return int(text) - 1


def _numbered_lines(path: Path, *, title: str) -> dict[str, str]:
    """Returns the second word of each line by its first."""
    pairs = [line.split(maxsplit=1) for line in _lines(path, title=title)]
    wrong = [pair for pair in pairs if len(pair) != 2]
    if wrong:
        raise DataError(
            f"{title} was asked for, but {path} has the line {' '.join(wrong[0])!r}, not two words. Take the file from "
            "its archive again."
        )
    return {first: second.strip() for first, second in pairs}


def _lines_after_number(path: Path) -> list[str]:
    if not path.is_file():
        return []
    return [line.split(maxsplit=1)[-1].strip() for line in path.read_text().splitlines() if line.strip()]


def _list_aircraft(folder: Path, *, title: str) -> Listing:
    """Lists FGVC-Aircraft: each line of two files has an image and its variant, which may have spaces."""
    base = folder / "data" if (folder / "data").is_dir() else folder
    named = {part: _numbered_lines(base / f"images_variant_{part}.txt", title=title) for part in ("trainval", "test")}
    variants = base / "variants.txt"
    listed = [line.strip() for line in _lines(variants, title=title)] if variants.is_file() else []
    classes = tuple(listed or sorted(set(named["trainval"].values())))
    number = {label: index for index, label in enumerate(classes)}
    for part in named:
        unknown = sorted(set(named[part].values()) - number.keys())
        if unknown:
            raise _only_tested(base / f"images_variant_{part}.txt", unknown, title=title)
    train, test = (
        tuple((base / "images" / f"{image}.jpg", number[label]) for image, label in named[part].items())
        for part in ("trainval", "test")
    )
    return _checked(Listing(classes, train, test), base, title=title)


def _list_cars(folder: Path, *, title: str) -> Listing:
    """Lists Stanford Cars from the devkit's .mat files."""
    devkit = folder / "devkit"
    parts = []
    for part, file in (("train", "cars_train_annos.mat"), ("test", "cars_test_annos_withlabels.mat")):
        path = devkit / file if (devkit / file).is_file() else folder / file
        table = read_mat(path, title=title)
        with _lists_of(path, title=title):
            parts.append(cars_entries(table["annotations"], folder / f"cars_{part}"))
    classes = tuple(str(number + 1) for number in range(CAR_MODELS))
    for entries in parts:
        _refuse_range(entries, len(classes), devkit, title=title)
    return _checked(Listing(classes, *parts), folder, title=title)


def cars_entries(annotations: Iterable[Mapping[str, object]], folder: Path) -> tuple[Labelled, ...]:
    """Returns the files of the devkit's annotations; classes are numbered from 1 there."""
    return tuple((folder / str(row["fname"]), int(str(row["class"])) - 1) for row in annotations)


def _list_dogs(folder: Path, *, title: str) -> Listing:
    """Lists Stanford Dogs from the two .mat files; a class is a folder of Images/."""
    lists = folder / "lists" if (folder / "lists").is_dir() else folder
    parts = []
    for part in ("train", "test"):
        path = lists / f"{part}_list.mat"
        table = read_mat(path, title=title)
        with _lists_of(path, title=title):
            parts.append(dogs_entries(table["file_list"], table["labels"], folder / "Images"))
    classes = tuple(path.name for path in sorted((folder / "Images").iterdir()) if _is_class(path))
    for entries in parts:
        _refuse_range(entries, len(classes), lists, title=title)
    return _checked(Listing(classes, *parts), folder, title=title)


def dogs_entries(files: Sequence[object], labels: Sequence[object], folder: Path) -> tuple[Labelled, ...]:
    """Returns the files of a list; classes are numbered from 1 there. Raises `ValueError` for unequal numbers."""
    if len(files) != len(labels):
        raise ValueError(f"there are {len(files)} files and {len(labels)} labels")
    return tuple((folder / str(file), int(str(label)) - 1) for file, label in zip(files, labels, strict=True))


@contextmanager
def _lists_of(path: Path, *, title: str) -> Iterator[None]:
    """Raises `DataError` where a Matlab file does not have the lists that are read inside."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise DataError(
            f"{title} was asked for, but {path} does not hold its lists: {error}. Take the file from its archive."
        ) from None


def _checked(listing: Listing, folder: Path, *, title: str) -> Listing:
    """Returns the listing; raises `DataError` for an empty part, a class that is only tested, or a missing file."""
    for part, entries in (("training", listing.train), ("test", listing.test)):
        if not entries:
            raise DataError(f"{title} was asked for, but in {folder} the {part} part has no image. Check the lists.")
    trained = {label for _, label in listing.train}
    only_tested = sorted({listing.classes[label] for _, label in listing.test if label not in trained})
    if only_tested:
        raise _only_tested(folder, only_tested, title=title)
    present = _present([path for path, _ in (*listing.train, *listing.test)])
    missing = [path for path, _ in (*listing.train, *listing.test) if path not in present]
    if missing:
        raise DataError(
            f"{title} was asked for, but {len(missing)} listed images are not there, first {missing[0]}. "
            "Unpack the archive of the images again."
        )
    return listing


def _present(paths: Sequence[Path]) -> set[Path]:
    """Returns which of these files exist, by listing each folder once."""
    folders = {path.parent for path in paths}
    return {path for folder in folders if folder.is_dir() for path in folder.iterdir()}


def _refuse_range(entries: Iterable[Labelled], classes: int, file: Path, *, title: str) -> None:
    for path, label in entries:
        if not 0 <= label < classes:
            raise DataError(
                f"{title} was asked for, but {file} gives {path.name} the class {label + 1}, not 1 to {classes}. "
                "Take the lists from their archive again."
            )


def _only_tested(place: Path, classes: Sequence[str], *, title: str) -> DataError:
    others = f" and {len(classes) - 1} more classes" if len(classes) > 1 else ""
    return DataError(
        f"{title} was asked for, but {place} has the class {classes[0]!r}{others}, which no training image has. "
        "Add training images of it, or remove it from the test part."
    )


def _lines(path: Path, *, title: str) -> list[str]:
    try:
        return [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise DataError(
            f"{title} was asked for, but {path} cannot be read: {reason}. Take the file from its archive."
        ) from None
