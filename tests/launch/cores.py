"""What the ranks of the tests of `--bind` run: say on which cores they, and a process that they start, may run."""

import json
import os
import subprocess
import sys
from dataclasses import asdict

from evenly.launch import find_place
from evenly.launch.binding import bind_rank

CHILD = "import os; print(*sorted(os.sched_getaffinity(0)))"


def main() -> None:
    child = subprocess.run([sys.executable, "-S", "-c", CHILD], capture_output=True, text=True, check=True)
    line = {
        "place": asdict(find_place()),
        "cores": sorted(os.sched_getaffinity(0)),
        "of a child": [int(core) for core in child.stdout.split()],
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "args": sys.argv[1:],
        "bound again": bind_rank(find_place()),
    }
    os.write(1, f"greeting {json.dumps(line)}\n".encode())  # in one piece: ranks share the pipe


def train() -> list[int]:
    """Starts a recipe without data by the command line, and returns the cores of the process."""
    from evenly.cli import app
    from evenly.errors import DataError

    try:
        app(["train", "fashion", "--bind", "--data", "/no/such/folder"], standalone_mode=False)
    except DataError:
        return sorted(os.sched_getaffinity(0))
    raise AssertionError("trained without data")


if __name__ == "__main__":
    main()
