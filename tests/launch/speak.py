"""What a rank says: the help, the cluster, a usage error, and the progress of a run."""

import sys
from contextlib import suppress

import torch

import evenly
from evenly.cli import main


def command(*words: str) -> None:
    sys.argv = ["evenly", *words]
    with suppress(SystemExit):
        main()


def train() -> None:
    with evenly.Session() as session:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = torch.utils.data.TensorDataset(torch.randn(64, 4))
        plan = session.plan(batch_size=4)
        synchronized, _, loader = session.prepare(model, optimizer, data, plan=plan)
        session._counters._recorded_at = -1e9  # progress is recorded at the first step, not after a second
        for _ in session.epochs(2):
            for (x,) in loader:
                synchronized(x).mean().backward()
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    command("train", "--help")
    command("train", "no-recipe", "--no-option")
    command("discover")
    train()
