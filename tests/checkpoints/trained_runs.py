"""Small runs of ranks as threads that save a checkpoint inside a period, and what `agreed()` shows there."""

from contextlib import contextmanager

import torch
from torch import nn

from evenly.checkpoints import Checkpoints, KeptCheckpoints, TrainedModel
from evenly.comm import FailureMonitor, ObjectGatherer, close_groups, open_group
from evenly.shards import Sharded, full_state_dict
from tests.checkpoints.test_merging import NODES, odd_training
from tests.nodes.test_shards import World

PLANS = {"whole": [[None, None], [None]], "cut": [[[1, 2]], [None]]}  # 2 + 1 ranks


class Network(nn.Module):
    """Tied weights, a frozen layer, one that is not used, statistics, and a buffer that is not part of the state."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.middle = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.middle.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.last = nn.Linear(6, 3)
        self.register_buffer("scale", torch.tensor(0.1), persistent=False)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x))).mean((2, 3))
        x = torch.tanh(self.tied(torch.tanh(self.middle(x)))) + self.frozen(x) * self.scale
        return self.last(x)


def build(seed=0):
    torch.manual_seed(seed)
    return Network()


def batch(rank, step):
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3 + rank, 2, 4, 4, generator=g), torch.randint(3, (3 + rank,), generator=g)


@contextmanager
def gatherer_of(rank_group):
    """Yields the gatherer of all ranks, as a session has it."""
    monitor = FailureMonitor(rank_group.scoped("saving"))
    group = open_group(rank_group.scoped("saving"), "world", range(rank_group.size), backend="gloo", timeout_s=30)
    try:
        yield ObjectGatherer(monitor, group, timeout_s=30)
    finally:
        monitor.close()
        close_groups([group], failed=False)


def whole_state(module):
    state = full_state_dict(module)["model"] if isinstance(module, Sharded) else module.state_dict()
    return {name: value.detach().clone() for name, value in state.items()}


def train(rank_group, plan, root, *, steps=3, save=None, **settings):
    """Trains, saves a checkpoint, and returns the state that `agreed()` shows and the output of the whole network."""
    world = World(plan, build)
    with world.joined(rank_group, lambda m: torch.optim.Adam(m.parameters(), lr=0.05), **settings) as joined:
        synchronized, optimizer = joined
        for step in range(steps):
            x, y = batch(world.replica_of(rank_group.rank), step)
            nn.functional.cross_entropy(synchronized(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained_model = TrainedModel("model", synchronized, optimizer, None)
        with gatherer_of(rank_group) as gatherer:
            checkpoints = Checkpoints(root / "checkpoints", gatherer, rank=rank_group.rank, nodes=world.nodes)
            checkpoints.save(steps, [trained_model], {}, epoch=0, keep=KeptCheckpoints(2))
            if save is not None:
                save(trained_model, gatherer, rank_group.rank)
        with synchronized.agreed():
            return whole_state(synchronized.module)


def train_odd(rank_group, root, how):
    """Trains a network with tensors of many kinds, saves a checkpoint, and returns the state that `agreed()` shows."""
    with odd_training(rank_group, how) as (synchronized, optimizer, model), gatherer_of(rank_group) as gatherer:
        checkpoints = Checkpoints(root / "checkpoints", gatherer, rank=rank_group.rank, nodes=NODES)
        trained_model = TrainedModel("odd", synchronized, optimizer, None)
        checkpoints.save(3, [trained_model], {}, epoch=0, keep=KeptCheckpoints(1))
        with synchronized.agreed():
            return {name: t.float() if t.itemsize == 1 else t for name, t in whole_state(model).items()}
