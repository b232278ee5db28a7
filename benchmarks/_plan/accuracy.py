"""Accuracy on Fashion-MNIST with equal and with unequal batches of the same 64 samples, three seeds each."""

import json

import torch

import evenly
from benchmarks._plan.lab import run_command
from benchmarks.common import Row
from evenly.lab import Lab, LabCluster, LabNode
from evenly.recipes.data import load_images
from evenly.recipes.networks.small_resnet import SmallResNet
from evenly.spec import Plan, Role

BATCHES = ("32/32", "49/15")  # samples of the two ranks
SEEDS = range(3)
EPOCHS = 2
NUM_TRAINED = 5120  # images of an epoch
NUM_TESTED = 2000


def accuracy_row() -> Row:
    """Returns a row with the accuracies of all batches and seeds."""
    accuracies: dict[str, list[float]] = {samples: [] for samples in BATCHES}
    with Lab(LabCluster(nodes=(LabNode(name="n", ranks=2),))) as lab:
        for seed in SEEDS:
            for samples in BATCHES:
                printed = run_command(lab, "--accuracy", samples, str(seed), timeout_s=300)
                accuracies[samples].append(printed["accuracy"])
    figures = "; ".join(
        f"{samples} {', '.join(f'{accuracy:.1%}' for accuracy in values)}" for samples, values in accuracies.items()
    )
    return {"cluster": "accuracy", "plan": f"Fashion-MNIST, {EPOCHS} epochs of {NUM_TRAINED}, three seeds: {figures}"}


def run_accuracy_rank(samples: str, seed: int) -> None:
    """Trains with these samples on each rank, as in "49/15"; rank 0 prints the test accuracy."""
    torch.set_num_threads(1)
    train, test = load_images("fashion", None, train_limit=NUM_TRAINED).normalised()
    with evenly.Session(device="cpu", seed=seed) as session:
        torch.manual_seed(seed)
        model: torch.nn.Module = SmallResNet(8)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        roles = [Role(rank=rank, node=0, samples=int(count)) for rank, count in enumerate(samples.split("/"))]
        model, optimizer, loader = session.prepare(model, optimizer, train, plan=Plan(roles=tuple(roles)))
        for _ in session.epochs(EPOCHS):
            for x, y in loader:
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        images, labels = (tensor[:NUM_TESTED] for tensor in test.tensors)
        with torch.no_grad():
            accuracy = (model(images).argmax(1) == labels).float().mean().item()
        if session.rank == 0:
            print(json.dumps({"accuracy": accuracy}), flush=True)
