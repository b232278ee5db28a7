"""Runs the programs that fetch packages: npm, pip, apt-get. Their own settings say from where packages come."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from evenly.errors import DataError

LIMIT_S = 1800.0
LINE_S = 10.0  # between two lines of progress
Say = Callable[[str], None]


def npm_pack(package: str, scratch: Path, *, say: Say) -> Path:
    """Returns the archive of an npm package, fetched into `scratch`."""
    program = shutil.which("npm")
    if program is None:
        raise DataError(
            f"{package} comes by npm, but there is no npm on the PATH. Install it (Debian: apt-get install npm)."
        )
    _run([program, "pack", "--silent", "--ignore-scripts", package], f"npm pack {package}", scratch, say=say)
    return _only_archive(scratch, "*.tgz", f"npm pack {package}")


def pip_download(package: str, scratch: Path, *, say: Say) -> Path:
    """Returns the source archive of a Python package, fetched into `scratch`."""
    command = [sys.executable, "-m", "pip", "download", package, "--no-binary", ":all:", "--no-deps"]
    options = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    _run([*command, *options], f"pip download {package}", scratch, say=say)
    return _only_archive(scratch, "*.tar.gz", f"pip download {package}")


def apt_install(package: str, scratch: Path, *, say: Say) -> None:
    """Installs a Debian package, as root."""
    by_hand = f"apt-get install {package}"
    program = shutil.which("apt-get")
    if program is None or os.geteuid() != 0:
        lack = "there is no apt-get here" if program is None else f"this is user {os.geteuid()}, not root"
        raise DataError(f"{package} is a Debian package, but {lack}. Run as root on Debian or Ubuntu: {by_hand}.")
    _run([program, "update", "-qq"], "apt-get update", scratch, say=say)
    _run(["env", "DEBIAN_FRONTEND=noninteractive", program, "install", "-y", "-qq", package], by_hand, scratch, say=say)


def _run(command: Sequence[str], words: str, folder: Path, *, say: Say) -> None:
    """Runs a program in `folder` and says every ten seconds that it still runs; raises `DataError` if it fails."""
    say(f"{words} ...")
    began = time.monotonic()
    with subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            output = _wait(process, words, began, say)
        except BaseException:  # also an interrupt: the program ends with us
            process.kill()
            raise
    if process.returncode:
        said = output.strip()[-500:] or "nothing"
        raise DataError(f"{words} ended with {process.returncode} and said: {said}. Run it by hand to see why.")


def _wait(process: "subprocess.Popen[str]", words: str, began: float, say: Say) -> str:
    while True:
        try:
            return process.communicate(timeout=LINE_S)[0]
        except subprocess.TimeoutExpired:
            seconds = time.monotonic() - began
            if seconds > LIMIT_S:
                raise DataError(
                    f"{words} was not done after {LIMIT_S:.0f} s. Check the network and run it again."
                ) from None
            say(f"{words}: {seconds:.0f} s")


def _only_archive(folder: Path, pattern: str, words: str) -> Path:
    archives = list(folder.glob(pattern))
    if len(archives) != 1:
        raise DataError(f"{words} left {len(archives)} archives, not one. Run it by hand to see why.")
    return archives[0]
