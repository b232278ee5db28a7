"""The script of complete.py in a session, which also resumes and records: compare the two files line by line.

Run it on three ranks of two pretended nodes: evenly launch --nodes 2,1 examples/complete_evenly.py runs/waves
Then `evenly export runs/waves --to best.safetensors --best` writes the best weights.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenly

BATCHES = 2  # of one step


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
    with evenly.Session(arguments.folder, keep_best="accuracy") as session:
        device = session.device
        torch.manual_seed(0)
        data, validation = waves(1200, seed=0), waves(500, seed=1)
        plan = session.plan(batch_size=20, every=5)  # nodes average every 5 steps
        checks = DataLoader(validation, batch_size=250)

        model = network().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        steps = session.steps_per_epoch(data, plan, accumulate=BATCHES)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=arguments.epochs * steps)
        model, optimizer, loader = session.prepare(model, optimizer, data, plan=plan)
        session.track(schedule=schedule)

        best = waited = 0
        for _ in session.epochs(arguments.epochs):
            for x, y in loader:
                with session.accumulate(BATCHES) as batch:
                    with torch.autocast(device.type, torch.bfloat16):
                        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
                    batch.backward(loss)
                if batch.is_last:
                    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()

            with model.agreed():  # the average of all nodes
                accuracy = evaluate(model, checks, device) / len(validation)
            is_best = accuracy > best
            best, waited = (accuracy, 0) if is_best else (best, waited + 1)
            session.log(accuracy=accuracy)
            if waited == arguments.patience:
                break


if __name__ == "__main__":
    main()
