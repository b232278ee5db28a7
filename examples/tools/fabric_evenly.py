"""The loop of fabric_plain.py by node-based communications: compare the two files line by line.

Run it on three ranks of two pretended nodes: evenly launch --nodes 2,1 examples/tools/fabric_evenly.py
"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evenly.integrations.lightning import EvenlyFabricStrategy


def spirals(count: int, seed: int) -> TensorDataset:
    """Returns the points of two spiral arms and which arm each is on."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.arange(count) % 2
    turn = torch.rand(count, generator=generator)
    angle = 7 * turn + torch.pi * label
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1)  # [count, 2]
    return TensorDataset(points + 0.01 * torch.randn(count, 2, generator=generator), label)


def main() -> None:
    fabric = lightning.Fabric(strategy=EvenlyFabricStrategy(every=5))
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(spirals(1500, seed=0), batch_size=25, shuffle=True))

    for _ in range(12):
        for number, (x, y) in enumerate(loader, start=1):
            is_last = number % 2 == 0 or number == len(loader)
            with fabric.no_backward_sync(model, enabled=not is_last):
                fabric.backward(nn.functional.cross_entropy(model(x), y) / 2)
            if is_last:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        fabric.strategy.end_epoch()
        fabric.save("fabric.ckpt", {"model": model, "optimizer": optimizer})
    fabric.strategy.finish()

    with torch.no_grad():
        points, labels = spirals(501, seed=1).tensors
        right = (model(points).argmax(1) == labels).float().mean()
    print(f"rank {fabric.global_rank} of {fabric.world_size}: {100 * right:.1f} % right")


if __name__ == "__main__":
    main()
