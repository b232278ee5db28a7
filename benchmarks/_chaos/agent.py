"""One machine of the chaos benchmark: it has torch imported, starts its ranks by fork, and again when they are lost.

The last machine has no ranks: it runs the coordinator, and starts it again when it is killed.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

RESTART_S = 0.2  # the least time between two starts
NODES = 3
RANKS = 2
PORT = 29400
SECRET = "chaos" * 8


def main() -> None:
    """Starts what this machine has to run until the folder has a file `stop`."""
    folder, index = Path(sys.argv[1]), int(os.environ["RANK"])
    name = f"node{index}"
    if index == NODES:
        keep_running(folder, "coordinator", [lambda: serve(folder)])
        return
    import benchmarks._chaos.training  # noqa: F401  # imports torch once for all starts

    os.environ |= {
        "EVENLY_COORDINATOR": f"{os.environ['CHAOS_COORDINATOR']}:{PORT}",
        "EVENLY_NODE": name,
        "EVENLY_JOB": "chaos",
        "EVENLY_SECRET": SECRET,
    }
    keep_running(folder, name, [lambda rank=rank: train(folder, name, rank) for rank in range(RANKS)])


def keep_running(folder: Path, name: str, programs: list) -> None:
    """Runs the programs in processes; if one is lost, all are started again."""
    starts = 0
    while not (folder / "stop").exists():
        os.environ["EVENLY_START"] = f"{name}-{starts}"
        children = [fork(program) for program in programs]
        write(folder / f"pids-{name}.json", {"start": starts, "pids": children})
        append(folder, name, {"kind": "start", "number": starts})
        starts += 1
        codes = wait_for(children)
        append(folder, name, {"kind": "end", "codes": codes})
        if all(code == 0 for code in codes):
            return
        time.sleep(RESTART_S)


def fork(program) -> int:
    """Returns the pid of a new process that runs `program`."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        program()
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def wait_for(children: list[int]) -> list[int]:
    """Returns the exit codes, once all have ended; when one is lost the others are ended, too."""
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid] != 0:
            time.sleep(0.3)  # the others notice by themselves
            for other in set(children) - codes.keys():
                os.kill(other, signal.SIGKILL)
    return [codes[pid] for pid in children]


def serve(folder: Path) -> None:
    """Runs the coordinator."""
    from evenly.coordination import Coordinator, RoundSettings

    settings = RoundSettings(expected_nodes=NODES, straggler_wait_s=1.0)
    coordinator = Coordinator(("0.0.0.0", PORT), secret=SECRET.encode(), settings=settings)
    append(folder, "coordinator", {"kind": "listens"})
    coordinator.start()
    while not (folder / "stop").exists():
        time.sleep(0.1)
    time.sleep(5)
    coordinator.close()


def train(folder: Path, name: str, rank: int) -> None:
    """Runs one rank."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    from benchmarks._chaos.training import run

    run(folder, name, rank)


def append(folder: Path, name: str, event: dict) -> None:
    """Adds a line to the events of a node."""
    with (folder / f"events-{name}.jsonl").open("a") as file:
        file.write(json.dumps({"t": time.time(), "node": name, **event}) + "\n")


def write(path: Path, value: object) -> None:
    """Replaces a file at once."""
    path.with_suffix(".new").write_text(json.dumps(value))
    path.with_suffix(".new").replace(path)


if __name__ == "__main__":
    main()
