"""A rank without torch, to be quick: says who it is and stays; with --fail FOLDER the last one fails after all came."""

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.write(1, f"greeting {json.dumps({'place': {'rank': rank}, 'pid': os.getpid()})}\n".encode())
    if "--fail" in sys.argv:
        folder = Path(sys.argv[sys.argv.index("--fail") + 1])
        (folder / str(rank)).touch()
        while rank == world_size - 1:
            if len(list(folder.iterdir())) == world_size:
                sys.exit(3)
            time.sleep(0.02)
    time.sleep(100)


if __name__ == "__main__":
    main()
