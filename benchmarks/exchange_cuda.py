"""What an exchange beside the training costs on a GPU: two nodes of one process each on one device, over gloo.

Steps without exchanges and steps with overlapped ones are made in turns by both processes at the same time, round after
round; figures are medians. A profile of some steps counts the calls that wait for the whole device.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Claim, median, spread, write_result

PERIOD, OVERLAP = 20, 10
FORMS: dict[str, dict[str, Any]] = {
    "fp32": {"overlap": OVERLAP},
    "bf16": {"overlap": OVERLAP, "codec": "bf16"},
    "int8": {"overlap": OVERLAP, "codec": "int8"},
    "int4, 4 fragments": {"overlap": OVERLAP // 2, "codec": "int4", "fragments": 4},
    "fp32, waited for": {},
}


def network() -> Any:
    """Returns a convolutional network of 6.5 million parameters."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in ((3, 64), (64, 128), (128, 256), (256, 512)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 10))


class Way:
    """One form of exchanging."""

    def __init__(self, every: int, exchange: dict[str, Any], batch: int) -> None:
        import torch

        import evenly

        model = network().cuda()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        self.model = evenly.synchronize(model, self.optimizer, every=every, nodes=[[0], [1]], **exchange)
        self.x = torch.randn(batch, 3, 32, 32, device="cuda")
        self.y = torch.randint(10, (batch,), device="cuda")
        self.seconds: list[float] = []
        self.exchanges: list[Any] = []
        self.model.on_exchange.append(self.exchanges.append)

    def run(self, steps: int) -> None:
        """Makes some steps, and notes what one took."""
        import torch
        import torch.distributed as dist

        torch.cuda.synchronize()
        dist.barrier()
        began = time.perf_counter()
        self.steps(steps)
        torch.cuda.synchronize()
        self.seconds.append((time.perf_counter() - began) / steps)

    def steps(self, count: int) -> None:
        """Makes training steps."""
        import torch

        for _ in range(count):
            torch.nn.functional.cross_entropy(self.model(self.x), self.y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def waits_of(way: Way) -> dict[str, int]:
    """Returns how often the program waited for the device in one period of steps."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        way.steps(PERIOD)
    names = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")
    found = dict.fromkeys(names, 0)
    for event in profile.events():
        if event.name in found:
            found[event.name] += 1
    found["cudaDeviceSynchronize"] -= 1  # the profiler's own, at its end
    return found


def worker(rounds: int, batch: int) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.backends.cudnn.benchmark = True
    ways = {"no exchange": Way(10**9, {}, batch)}
    ways |= {name: Way(PERIOD, exchange, batch) for name, exchange in FORMS.items()}
    for way in ways.values():
        way.run(2 * PERIOD)
    for number in range(rounds):
        order = list(ways.values())
        for place in range(len(order)):
            order[(place + number) % len(order)].run(2 * PERIOD)
    waits = {name: waits_of(way) for name, way in ways.items()}
    if dist.get_rank() == 0:
        told = {
            name: {
                "seconds": way.seconds[1:],
                "waits": waits[name],
                "waited": [done.waited_s for done in way.exchanges[2:]],
                "flight": [done.seconds for done in way.exchanges[2:]],
            }
            for name, way in ways.items()
        }
        print(json.dumps(told), flush=True)
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    parser.add_argument("--batch", type=int, default=512, help="samples of each process")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker, arguments.batch)
        return
    rounds = 4 if arguments.quick else 12
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, str(Path(__file__).resolve()), "--worker", str(rounds), "--batch", str(arguments.batch)]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    world |= {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    ranks = []
    for rank in range(2):
        own = {**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(subprocess.Popen(words, env=own, stdout=subprocess.PIPE, text=True))
    outputs = [rank.communicate(timeout=540)[0] for rank in ranks]
    report(json.loads(outputs[0].strip().splitlines()[-1]), rounds, arguments.batch, save=arguments.save)


def report(told: dict[str, Any], rounds: int, batch: int, *, save: bool) -> None:
    limit = told["no exchange"]["seconds"]
    rows = []
    for name, seen in told.items():
        rows.append(
            {
                "method": name,
                "ms_per_step": 1e3 * median(seen["seconds"]),
                "spread_ms": spread([1e3 * s for s in seen["seconds"]]),
                "over_no_exchange": median([s / b for s, b in zip(seen["seconds"], limit, strict=True)]),
                "exchange_ms": 1e3 * median(seen["flight"]) if seen["flight"] else None,
                "waited_ms": 1e3 * median(seen["waited"]) if seen["waited"] else None,
                **{f"{kind}_per_period": count for kind, count in seen["waits"].items()},
            }
        )
    beside = [row for row in rows if row["method"] in FORMS and FORMS[row["method"]]]
    claims = [
        Claim("overlapped_exchange_cost_of_step", max(row["over_no_exchange"] for row in beside) - 1, 0.02, "lower"),
        Claim("device_synchronisations", max(row["cudaDeviceSynchronize_per_period"] for row in beside), 0, "lower"),
    ]
    note = (
        f"Two processes on one GPU, batch {batch} each, K' = {PERIOD}, overlap {OVERLAP} steps, {rounds} rounds of "
        f"{2 * PERIOD} steps in turns."
    )
    write_result("exchange_cuda", rows, claims, note=note, save=save)


if __name__ == "__main__":
    main()
