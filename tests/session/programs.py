"""Training programs that the session tests run in processes of their own."""

import errno
import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evenly
from evenly.checkpoints import folder as folders
from evenly.checkpoints.ownership import take_folder


def dataset(size: int = 53) -> TensorDataset:
    g = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(size, 6, 5, generator=g), torch.randint(3, (size,), generator=g))


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(6, 9, 3), nn.BatchNorm1d(9), nn.Dropout(0.3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 3)
    )


def digest(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(t.detach().cpu().contiguous().numpy().tobytes() for t in tensors)).hexdigest()[:16]


def hold(folder: str, *, ready: str, forks: bool = False) -> None:
    """Takes a folder, says so in a file and waits to be killed; a child may wait beside it."""
    take_folder(Path(folder), "other")
    if forks and os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    Path(ready).touch()
    time.sleep(60)


def train(
    folder: str,
    *,
    every: int | str = 4,
    epochs: int = 3,
    checkpoint_every: int | str | None = 3,
    crash_rank: int = -1,
    crash_step: int = 0,
    how: str = "exit",
    timeout_s: float = 60.0,
    own_folders: bool = False,
    pause_s: float = 0.0,
    device: str = "cpu",
    accumulate: int = 1,
    slow_disk_s: float = 0.0,
    full_disk_rank: int = -1,
    checkpoint_errors: str = "raise",
    exchange: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Trains, fails in the way and at the place that is asked for, and returns what the rank ended with."""
    torch.manual_seed(17)
    torch.backends.cudnn.deterministic = True
    rank = int(os.environ["RANK"])
    if own_folders:
        folder = f"{folder}-{os.environ['GROUP_RANK']}"
    if how.endswith("while saving") and rank == crash_rank:
        _die_while_saving(crash_step, signal.SIGSTOP if how.startswith("stop") else signal.SIGKILL)
    if slow_disk_s:
        _write_slowly(slow_disk_s)
    if rank == full_disk_rank:
        _fill_disk(times=1)
    with evenly.Session(
        folder,
        checkpoint_every=checkpoint_every,
        checkpoint_errors=checkpoint_errors,
        keep=3,
        timeout_s=timeout_s,
        device=device,
    ) as session:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        plan = session.plan(batch_size=4, every=every, **(exchange or {}))
        synchronized, _, loader = session.prepare(model, optimizer, dataset(), plan=plan)
        session.track(schedule=schedule)
        made = 0
        for _ in session.epochs(epochs):
            for number, (x, y) in enumerate(loader):
                nn.functional.cross_entropy(synchronized(x), y).backward()
                if (number + 1) % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    made += 1
                if rank == crash_rank and not how.endswith("while saving") and synchronized.schedule.step == crash_step:
                    if how == "exit" and isinstance(checkpoint_every, int):
                        wait_for_checkpoint(folder, crash_step - crash_step % checkpoint_every)
                    _crash(how)
                time.sleep(pause_s)
            schedule.step()
        return {
            "rank": session.rank,
            "nodes": session.cluster.rank_lists(),
            "made": made,
            "step": synchronized.schedule.step,
            "model": digest(*model.parameters(), *model.buffers()),
            "optimizer": digest(*(v for s in optimizer.state.values() for v in s.values())),
            "lr": optimizer.param_groups[0]["lr"],
            "random": float(torch.rand(())),
        }


def wait_for_checkpoint(folder: str, step: int) -> None:
    """Waits until the checkpoint of a step is complete: a thread writes it."""
    until = time.monotonic() + 30
    while step and not Path(folder, "checkpoints", f"step-{step:09d}").is_dir() and time.monotonic() < until:
        time.sleep(0.01)


def _crash(how: str) -> None:
    if how == "raise":
        raise KeyError("a broken sample")
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(9)


def _fill_disk(times: int) -> None:
    """Lets this rank have no room for its part of the first checkpoints."""
    plain, count = folders.write_part, 0

    def write_part(folder: Path, part: Any) -> dict[str, str]:
        nonlocal count
        count += part.name.startswith("rank")
        if count <= times and part.name.startswith("rank"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(folder, part)

    folders.write_part = write_part


def _write_slowly(seconds: float) -> None:
    """Lets every file of a checkpoint take so long."""
    plain = folders.write_part

    def write_part(folder: Path, part: Any) -> dict[str, str]:
        time.sleep(seconds)
        return plain(folder, part)

    folders.write_part = write_part


def _die_while_saving(times: int, number: int) -> None:
    """Kills or stops this process inside the `times`-th checkpoint, when its files are half written."""
    plain, count = folders.write_part, 0

    def write_part(folder: Path, part: Any) -> dict[str, str]:
        nonlocal count
        digests = plain(folder, part)
        if part.name.startswith("rank"):
            count += 1
            if count == times:
                os.kill(os.getpid(), number)
        return digests

    folders.write_part = write_part


def fail_early(where: str) -> str:
    """Fails on rank 1 before it prepares, and returns what the other rank hears and after how long."""
    rank = int(os.environ["RANK"])
    began = time.monotonic()
    try:
        with evenly.Session(device="cuda:9" if rank and where == "device" else "cpu", timeout_s=60.0) as session:
            began = time.monotonic()
            if rank and where == "data":
                raise FileNotFoundError("no data here")
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            session.prepare(model, optimizer, dataset(), plan=session.plan(batch_size=4))
            return "nothing was noticed"
    except (evenly.EvenlyError, FileNotFoundError) as error:
        return f"{time.monotonic() - began < 15} {type(error).__name__}: {error}"


def scale(folder: str) -> list[Any]:
    """Trains with a GradScaler that skips on one node where a checkpoint by steps is due."""
    torch.manual_seed(17)
    with evenly.Session(folder, checkpoint_every=2, timeout_s=30.0, device="cpu") as session:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        plan = session.plan(batch_size=4, every=3)
        synchronized, _, loader = session.prepare(model, optimizer, dataset(), plan=plan)
        for _ in session.epochs(1):
            for number, (x, y) in enumerate(loader, start=1):
                loss = nn.functional.cross_entropy(synchronized(x), y)
                bad = session.rank == 1 and number in (2, 3)
                scaler.scale(loss * (float("inf") if bad else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        return [synchronized.schedule.step, digest(*model.parameters())]


def by_hand(what: str, victim: int, *, timeout_s: float) -> None:
    """Trains without a session, in a group that the program opened, until rank `victim` stops itself in step 3."""
    torch.manual_seed(17)
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo")
    x, y = dataset().tensors
    model = nn.Sequential(nn.Flatten(), nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 3))
    if what == "shard":
        model = evenly.shard(model, x[:8], timeout_s=timeout_s)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if what == "synchronize":
        model = evenly.synchronize(model, optimizer, every=50, timeout_s=timeout_s)
    for step in range(10_000):
        if rank == victim and step == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        nn.functional.cross_entropy(model(x[:8]), y[:8]).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
