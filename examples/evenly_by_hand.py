"""The loop of plain.py by node-based communications: compare the two files line by line."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import evenly


def open_group() -> None:
    if "RANK" in os.environ:  # torchrun, evenly launch, evenly lab
        dist.init_process_group("gloo")
    else:  # a single process
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def spirals(count: int = 1500) -> TensorDataset:
    """Returns the points of two spiral arms and which arm each is on."""
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(count) % 2
    turn = torch.rand(count, generator=generator)
    angle = 7 * turn + torch.pi * label
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1)  # [count, 2]
    return TensorDataset(points + 0.01 * torch.randn(count, 2, generator=generator), label)


def main() -> None:
    open_group()
    torch.manual_seed(0)
    data = spirals()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=50, sampler=sampler)

    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model = evenly.synchronize(model, optimizer, every=5)  # nodes average every 5 steps

    for epoch in range(10):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.end_epoch()
    model.finish()

    with torch.no_grad():
        points, labels = data.tensors
        right = (model(points).argmax(1) == labels).float().mean()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {100 * right:.1f} % right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
