"""What each rank of `exchange_cuda.py` does: train with every form of exchange in turns, each on the same GPU.

Rank 0 prints one JSON object by form: `step_s` of each round, `device_waits` in one period, and of each exchange
`waited_s` and `exchange_s`.
"""

import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import evenly

WAITING_CALLS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")
NEVER = 10**9  # a period longer than any run
WARM_UP_EXCHANGES = 2


def run_cuda_rank(rounds: int, batch_size: int, period: int, forms: dict[str, dict[str, Any]]) -> None:
    """Runs steps without exchanges and with each form, in turns; rank 0 prints the figures. Ends the process."""
    dist.init_process_group("gloo")
    torch.backends.cudnn.benchmark = True
    trainers = {"no exchange": Trainer(NEVER, {}, batch_size)}
    trainers |= {name: Trainer(period, form, batch_size) for name, form in forms.items()}
    order = list(trainers.values())
    for trainer in order:
        trainer.run_round(2 * period)
    for number in range(rounds):
        for place in range(len(order)):
            order[(place + number) % len(order)].run_round(2 * period)
    device_waits = {name: _count_device_waits(trainer, period) for name, trainer in trainers.items()}
    if dist.get_rank() == 0:
        figures = {
            name: {
                "step_s": trainer.step_seconds[1:],
                "device_waits": device_waits[name],
                "waited_s": [done.waited_s for done in trainer.exchanges[WARM_UP_EXCHANGES:]],
                "exchange_s": [done.seconds for done in trainer.exchanges[WARM_UP_EXCHANGES:]],
            }
            for name, trainer in trainers.items()
        }
        print(json.dumps(figures), flush=True)
    dist.barrier()
    os._exit(0)


def network() -> nn.Module:
    """Returns a convolutional network of 6.5 million parameters."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, filters in ((3, 64), (64, 128), (128, 256), (256, 512)):
        layers += [nn.Conv2d(inputs, filters, 3, padding=1, bias=False), nn.BatchNorm2d(filters), nn.ReLU()]
        layers += [nn.Conv2d(filters, filters, 3, padding=1, bias=False), nn.BatchNorm2d(filters), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 10))


class Trainer:
    """Trains the network with one form of exchange and keeps the seconds of a step in each round."""

    def __init__(self, period: int, exchange: dict[str, Any], batch_size: int) -> None:
        model = network().cuda()
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        self._model = evenly.synchronize(model, self._optimizer, every=period, nodes=[[0], [1]], **exchange)
        self._x = torch.randn(batch_size, 3, 32, 32, device="cuda")
        self._y = torch.randint(10, (batch_size,), device="cuda")
        self.step_seconds: list[float] = []
        self.exchanges: list[Any] = []
        self._model.on_exchange.append(self.exchanges.append)

    def run_round(self, steps: int) -> None:
        """Makes some steps and records the seconds of one."""
        torch.cuda.synchronize()
        dist.barrier()
        began = time.perf_counter()
        self.run_steps(steps)
        torch.cuda.synchronize()
        self.step_seconds.append((time.perf_counter() - began) / steps)

    def run_steps(self, count: int) -> None:
        """Makes training steps."""
        for _ in range(count):
            nn.functional.cross_entropy(self._model(self._x), self._y).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()


def _count_device_waits(trainer: Trainer, steps: int) -> dict[str, int]:
    """Returns how often each call that waits for the device was made in so many steps."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        trainer.run_steps(steps)
    counts = dict.fromkeys(WAITING_CALLS, 0)
    for event in profile.events():
        if event.name in counts:
            counts[event.name] += 1
    counts["cudaDeviceSynchronize"] -= 1  # the profiler's own, at its end
    return counts
