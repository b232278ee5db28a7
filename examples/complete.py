"""A whole training script in plain torch: DDP, BatchNorm, AdamW, OneCycleLR, bf16, gradient accumulation, clipping,
early stopping and the best checkpoint. complete_by_hand.py and complete_evenly.py are the same script with evenly.

Run it on one rank or several: torchrun --nproc-per-node 2 examples/complete.py runs/plain
"""

import argparse
import contextlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCHES = 2  # of one step


def open_group() -> torch.device:
    if "RANK" in os.environ:  # torchrun, evenly launch, evenly lab
        dist.init_process_group("gloo")
    else:  # a single process
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    index = int(os.environ.get("LOCAL_RANK", 0)) % max(1, torch.cuda.device_count())
    return torch.device("cuda", index) if torch.cuda.is_available() else torch.device("cpu")


def waves(count: int, *, seed: int) -> TensorDataset:
    """Returns noisy images of waves, and in which of four directions each wave runs."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(4, (count,), generator=generator)
    angle = (label * torch.pi / 4)[:, None, None]
    phase = 2 * torch.pi * torch.rand(count, 1, 1, generator=generator)
    y, x = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    images = torch.sin(1.5 * (x * angle.cos() + y * angle.sin()) + phase)  # [count, 12, 12]
    return TensorDataset((images + 1.5 * torch.randn(count, 12, 12, generator=generator))[:, None], label)


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 9, 4))


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """Returns how many samples the network classifies correctly."""
    model.eval()
    right = sum((model(x.to(device)).argmax(1) == y.to(device)).sum().item() for x, y in loader)
    model.train()
    return right


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the best weights are saved")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--patience", type=int, default=2, help="epochs without a better accuracy that end the run")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    device = open_group()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    data, validation = waves(1200, seed=0), waves(500, seed=1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    checks = DataLoader(validation, batch_size=250)

    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps = -(-len(loader) // BATCHES)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=arguments.epochs * steps)
    model = DistributedDataParallel(model)

    best = waited = 0
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for index, (x, y) in enumerate(loader, start=1):
            is_last = index % BATCHES == 0 or index == len(loader)
            with contextlib.nullcontext() if is_last else model.no_sync():
                with torch.autocast(device.type, torch.bfloat16):
                    loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
                (loss / BATCHES).backward()
            if is_last:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()

        with torch.no_grad():
            accuracy = evaluate(model, checks, device) / len(validation)
            is_best = accuracy > best
            if is_best and dist.get_rank() == 0:
                torch.save(model.module.state_dict(), arguments.folder / "best.pt")
        best, waited = (accuracy, 0) if is_best else (best, waited + 1)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.4f}")
        if waited == arguments.patience:
            break

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
