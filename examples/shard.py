"""One network over unequal devices: torchrun --nproc-per-node 3 examples/shard.py.

Every rank takes its part of each layer, in shares of 70, 25 and 5; all see the same batches. Where there are GPUs, the
first two ranks compute on them and the third on the CPU: `cuda, cuda, cpu`.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import evenly


def open_group() -> None:
    if "RANK" in os.environ:  # torchrun, evenly launch, evenly lab
        dist.init_process_group("gloo")
    else:  # a single process
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def own_device() -> torch.device:
    num_gpus = torch.cuda.device_count()
    return torch.device("cuda", dist.get_rank() % num_gpus) if num_gpus and dist.get_rank() < 2 else torch.device("cpu")


def main() -> None:
    open_group()
    device = own_device()
    shares = [70, 25, 5][: dist.get_world_size()]
    torch.manual_seed(0)  # the same data everywhere; weights come from rank 0
    images, labels = torch.randn(256, 3, 16, 16).to(device), torch.randint(10, (256,)).to(device)
    network = nn.Sequential(
        nn.Conv2d(3, 60, 3, padding=1), nn.ReLU(), nn.Conv2d(60, 60, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(60 * 64, 64), nn.ReLU(), nn.Linear(64, 10),
    ).to(device)  # fmt: skip
    model = evenly.shard(network, images[:32], shares=shares)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if dist.get_rank() == 0:
        print(model.layout.explain())
    for epoch in range(2):
        for x, y in zip(images.split(32), labels.split(32), strict=True):
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}, {model.traffic.sent_bytes / 1e6:.1f} MB so far")
    model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
