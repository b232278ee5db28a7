"""A session opens the world, feeds the ranks, keeps checkpoints and a record, whatever started the script.

Run it alone, or on three ranks of two pretended nodes: evenly launch --nodes 2,1 examples/session.py runs/spirals
Run it again with the same folder and more epochs, and it goes on where it stood.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evenly


def spirals(count: int = 1500) -> TensorDataset:
    """Returns the points of two spiral arms and which arm each is on."""
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(count) % 2
    turn = torch.rand(count, generator=generator)
    angle = 7 * turn + torch.pi * label
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1)  # [count, 2]
    return TensorDataset(points + 0.01 * torch.randn(count, 2, generator=generator), label)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="of the record and the checkpoints; without it nothing is kept")
    parser.add_argument("--epochs", type=int, default=10)
    wish = parser.parse_args()

    torch.manual_seed(0)
    data = spirals()
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)  # before prepare, which may resume

    with evenly.Session(wish.folder) as session:
        plan = session.plan(batch_size=50, every=5)
        session.print(plan.explain())
        model, optimizer, loader = session.prepare(model, optimizer, data, plan=plan)
        session.track(schedule=schedule)  # kept in checkpoints too

        for _ in session.epochs(wish.epochs):
            for x, y in loader:
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
            session.log(loss=loss)

        right = 0.0
        with torch.no_grad():  # all ranks hold the same model now, so each may look at its part of the data
            for x, y in session.feed(data, train=False, batch_size=500):
                right += (model(x).argmax(1) == y).sum().item()
        accuracy = session.sum(right)[0] / len(data)
        session.log(accuracy=accuracy)
        session.print(f"{100 * accuracy:.1f} % right")


if __name__ == "__main__":
    main()
