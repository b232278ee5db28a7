"""Every experiment runs end to end, is killed midway, goes on, and gives the table of the uninterrupted one."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

DATA = Path(os.environ.get("EVENLY_DATA", "data"))
ONLY = {  # two runs of each: the baseline and another
    "cifar": ["nodes=1,1", "every=global,10"],
}
LIMIT_S = 300


def start(folder: Path, name: str, data: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "evenly", "experiment", name, "--quick", "--seeds", "1", "--to", str(folder)]
    command += ["--data", str(data), *more]
    with (folder.parent / f"{folder.name}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, process_group=0)


def table(folder: Path) -> list[dict[str, object]]:
    """Returns what does not depend on the speed of the machine."""
    rows = json.loads((folder / "results.json").read_text())["rows"]
    return [{key: value for key, value in row.items() if key not in ("epoch_s", "sent_bytes")} for row in rows]


def wait_for_checkpoint(folder: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not list(folder.rglob("step-*")):
        assert process.poll() is None, folder.with_suffix(".log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
