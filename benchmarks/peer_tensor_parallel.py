"""The peer of shards.py: tensor_parallel's even split of the same networks, in an environment of its own.

It holds all shards in one process, so it gets the CPU time of all devices together and sends nothing over a link.
Make its environment: python -m venv .peers/tensor_parallel; install torch==2.13.0, "setuptools<80", tensor_parallel.
"""

import json
import sys
import time
import warnings

sys.path.pop(0)  # this folder, whose cuda.py would be taken for the package of that name

import torch
from torch import nn

warnings.filterwarnings("ignore")


def convolutions(inputs: int, filters: list[int]) -> list[nn.Module]:
    """Returns convolutions with so many filters, with a pooling layer after every second one."""
    layers: list[nn.Module] = []
    for number, outputs in enumerate(filters):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if number % 2 else []
        inputs = outputs
    return layers


def network_and_batch(name: str, batch_size: int) -> tuple[nn.Module, torch.Tensor]:
    """Returns the network of `shards.py` with this name, and a batch for it."""
    if name == "cifar":
        body = convolutions(3, [60, 60, 120, 120, 240, 240, 480, 480])
        head = [nn.Flatten(), nn.Linear(1920, 256), nn.ReLU(), nn.Linear(256, 10)]
        return nn.Sequential(*body, *head), torch.randn(batch_size, 3, 32, 32)
    head = [nn.Flatten(), nn.Linear(1920, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)]
    return nn.Sequential(*convolutions(120, [240, 240, 480, 480]), *head), torch.randn(batch_size, 120, 8, 8)


def main() -> None:
    """Prints the seconds of each step as one JSON object."""
    import tensor_parallel

    torch.set_num_threads(1)
    name, batch_size, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.manual_seed(0)
    model, x = network_and_batch(name, batch_size)
    split = tensor_parallel.TensorParallel(model, device_ids=["cpu"] * 3, sharded=False)
    y = torch.randint(10, (batch_size,))
    optimizer = torch.optim.SGD(split.parameters(), lr=0.01, momentum=0.9)
    seconds = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        nn.functional.cross_entropy(split(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"seconds": seconds[1:]}), flush=True)


if __name__ == "__main__":
    main()
