"""The loop of accelerate_plain.py by node-based communications: compare the two files line by line.

Run it on three ranks of two pretended nodes: evenly launch --nodes 2,1 examples/tools/accelerate_evenly.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evenly.integrations.accelerate import prepare


def spirals(count: int, seed: int) -> TensorDataset:
    """Returns the points of two spiral arms and which arm each is on."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.arange(count) % 2
    turn = torch.rand(count, generator=generator)
    angle = 7 * turn + torch.pi * label
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1)  # [count, 2]
    return TensorDataset(points + 0.01 * torch.randn(count, 2, generator=generator), label)


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 60, gamma=0.7)
    loader = DataLoader(spirals(1500, seed=0), batch_size=25, shuffle=True)
    checks = accelerator.prepare_data_loader(DataLoader(spirals(501, seed=1), batch_size=50))
    model, optimizer, loader, schedule = prepare(accelerator, model, optimizer, loader, schedule, every=5)

    for _ in range(12):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.end_epoch()
        accelerator.save_state("checkpoint")
    model.finish()

    with torch.no_grad():
        rights = [accelerator.gather_for_metrics(model(x).argmax(1) == y) for x, y in checks]
    right = torch.cat(rights).float().mean()
    print(f"rank {accelerator.process_index} of {accelerator.num_processes}: {100 * right:.1f} % right")
    accelerator.end_training()


if __name__ == "__main__":
    main()
