"""The training of the chaos benchmark, as any script would have it: Fashion-MNIST, a small network, dealt samples."""

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import evenly
from benchmarks._chaos.agent import RANKS, append
from evenly.recipes.data.readers.idx import read_idx

FASHION = Path("/usr/share/datasets/fashion-mnist")
SAMPLES, TESTS, BATCH, EVERY = 6000, 1000, 16, 6
GAP_S = 0.25


class Log(logging.Handler):
    """Writes what evenly says about exchanges into the events."""

    def __init__(self, record) -> None:
        super().__init__()
        self.record = record

    def emit(self, line: logging.LogRecord) -> None:
        """Writes one line."""
        self.record({"kind": "log", "text": line.getMessage()[:300]})


def run(folder: Path, name: str, rank: int) -> None:
    """Trains epochs until the folder has a file `stop`."""
    torch.set_num_threads(1)
    start = os.environ["EVENLY_START"]
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / f"store-{start}")), rank=rank, world_size=RANKS)
    record = partial(append, folder, name) if rank == 0 else (lambda event: None)
    logging.getLogger("evenly.exchange").addHandler(Log(record))
    logging.getLogger("evenly.exchange").setLevel(logging.INFO)
    train, tests = images("train", SAMPLES), images("t10k", TESTS)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    model = evenly.synchronize(network, optimizer, every=EVERY, nodes=[list(range(RANKS))], timeout_s=60)
    model.on_exchange.append(lambda done: record({"kind": "commit", "nodes": len(done.weights), "met_s": done.met_s}))
    loader = model.deal(train, batch_size=BATCH, seed=1)
    record({"kind": "joined", "step": model.schedule.step})
    watch = Watch(folder, name, rank, start, record)
    while not (folder / "stop").exists():
        for x, y, numbers in loader:
            epoch = loader.epoch  # of a node that joins it is known only now
            watch.before_step(x)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.after_step(epoch, numbers.tolist() if loader.samples else [])
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(network(tests.tensors[0]), tests.tensors[1]))
        ledger = loader.ledger
        accounts = {"lost": sum(ledger.lost.values()), "repeated": sum(ledger.repeated.values())}
        record({"kind": "epoch", "epoch": epoch, "loss": loss, **accounts})
    model.close(may_differ=True)
    record({"kind": "done"})


class Watch:
    """Writes which samples a rank trains and when it makes no steps, and makes a batch ill when it is told to."""

    def __init__(self, folder: Path, name: str, rank: int, start: str, record: Callable[[dict[str, object]], None]):
        self.ill, self.record = (folder / f"nan-{name}") if rank == 0 else None, record
        self.trained = (folder / f"trained-{name}-{rank}-{start}.txt").open("a")
        self.stepped = time.time()

    def before_step(self, batch: torch.Tensor) -> None:
        """Fills a batch with NaN, once for each request."""
        if self.ill is not None and self.ill.exists():
            self.ill.unlink()
            batch.fill_(torch.nan)

    def after_step(self, epoch: int, numbers: list[int]) -> None:
        """Writes the samples of a step, and a long time since the one before."""
        if numbers:
            self.trained.write(f"{epoch} {' '.join(map(str, numbers))}\n")
            self.trained.flush()
        time.sleep(0.004)
        now = time.time()
        if now - self.stepped > GAP_S:
            self.record({"kind": "gap", "seconds": now - self.stepped})
        self.stepped = now


def images(kind: str, count: int) -> torch.utils.data.TensorDataset:
    """Returns images, labels and their numbers."""
    pixels = read_idx(FASHION / f"{kind}-images-idx3-ubyte.gz")[:count]
    labels = read_idx(FASHION / f"{kind}-labels-idx1-ubyte.gz")[:count]
    x = (torch.as_tensor(pixels).float() / 255 - 0.2860) / 0.3530
    return torch.utils.data.TensorDataset(x, torch.as_tensor(labels).long(), torch.arange(len(x)))
