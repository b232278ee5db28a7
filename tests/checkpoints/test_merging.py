"""A run for another cluster starts from what `agreed()` shows on the old one, for tensors of every kind."""

from contextlib import closing, contextmanager

import pytest
import torch
from torch import nn

from evenly.checkpoints import folder
from evenly.checkpoints.full_state import TrainedModel, full_state, put_state
from evenly.checkpoints.merge import merge
from evenly.checkpoints.saving import _local_state
from evenly.errors import CheckpointError
from tests.nodes.test_corners import join
from tests.ranks import ragged, run_ranks

NODES = ragged(2, 1)


class Odd(nn.Module):
    """Parameters and buffers of many types and shapes, some in shared memory."""

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.wave = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64, generator=g))
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.complex128, generator=g))
        self.scale = nn.Parameter(torch.randn((), dtype=torch.float64, generator=g))
        self.phase = nn.Parameter(torch.randn((), dtype=torch.complex64, generator=g))
        self.short = nn.Parameter(torch.randn(4, generator=g).bfloat16())
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.tied = nn.Parameter(torch.randn(2, 3, generator=g))
        self.view = nn.Parameter(torch.zeros(3))
        self.view.data = self.tied.data[0]
        self.register_buffer("rotation", torch.zeros(2, dtype=torch.complex128))
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flag", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("lowest", torch.tensor([torch.inf, -torch.inf]))
        self.register_buffer("queue", torch.zeros(3).to(torch.float8_e4m3fn))
        self.register_buffer("memory", torch.zeros(4))
        self.register_buffer("inside", self.memory[1:3])
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x):
        self.rotation.add_(x.mean() * 1j)
        self.mean.add_(x.mean())
        self.counter.add_(int(x.sum()))
        self.flag[0] = bool(self.flag[0]) or float(x.max()) > 2.5
        self.lowest[0] = self.lowest[0].clamp(max=-x.mean())
        self.queue.copy_(x[0, :3])
        self.memory.add_(x.mean())
        terms = [p.abs().double().square().sum() for p in self.parameters()]
        return sum(terms) * x.mean().double()


BUFFERS = {"lowest": "min", "queue": "first"}


@contextmanager
def odd_training(rank_group, how):
    """Trains a network with tensors of many kinds; yields the module, its optimizer and the plain network."""
    model = Odd()
    optimizer = how["optimizer"](model.parameters())
    synchronized, _ = join(rank_group, NODES, model, every=2, optimizer=optimizer, buffers=BUFFERS, **how["exchange"])
    with closing(synchronized):
        for step in range(3):
            synchronized(torch.full((1 + rank_group.rank, 4), 1.0 + rank_group.rank + 0.1 * step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if how.get("loads"):
            wide = {True: torch.complex128, False: torch.float64}
            twice = {name: (2 * t.to(wide[t.is_complex()])).to(t.dtype) for name, t in model.state_dict().items()}
            model.load_state_dict(twice)
        yield synchronized, optimizer, model


def trained(rank_group, folder_of, how):
    with odd_training(rank_group, how) as (synchronized, optimizer, model):
        trained_model = TrainedModel("m", synchronized, optimizer, None)
        full = full_state(trained_model)
        node = {"m": {key: full[key] for key in ("parameters", "optimizer", "pending")}}
        rank = {"trainees": {"m": _local_state(trained_model, full)}, "tracked": {}, "random": {}}
        digests = folder.write_part(folder_of, folder.copied(f"rank-{rank_group.rank}", rank))
        digests |= folder.write_part(folder_of, folder.copied(f"node-{rank_group.rank}", node))
        with synchronized.agreed():
            shown = {name: t.detach().clone() for name, t in model.state_dict().items()}
        slots = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in model.parameters()]
        return digests, shown, slots, synchronized.samples


HOW = {
    "plain": {"exchange": {}, "optimizer": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)},
    "overlap": {"exchange": {"overlap": 2}, "optimizer": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)},
    "loaded": {
        "exchange": {"overlap": 2, "outer": "nesterov"},
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        "loads": True,
    },
    "averaged state": {
        "exchange": {"overlap": 2, "optimizer_state": "average"},
        "optimizer": lambda p: torch.optim.Adam(p, lr=0.01),
    },
}


@pytest.mark.parametrize("how", HOW)
def test_another_cluster_goes_on_from_what_the_next_exchange_would_have_made(tmp_path, how):
    results = run_ranks(3, trained, tmp_path, HOW[how])
    digests = {key: value for row in results for key, value in row[0].items()}
    parts = [folder.read_part(tmp_path, f"rank-{rank}", digests) for rank in range(3)]
    nodes = [folder.read_part(tmp_path, f"node-{ranks[0]}", digests) for ranks in NODES]
    node, rank = merge(nodes, parts, NODES)
    model = Odd()
    optimizer = HOW[how]["optimizer"](model.parameters())

    class Alone:
        module = model

    put_state(TrainedModel("m", Alone(), optimizer, None), node["m"], rank["trainees"]["m"])
    shown = results[0][1]
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, shown[name], msg=lambda text, name=name: f"{name}: {text}")
    for name in ("wave", "scale", "tied", "rotation", "mean", "counter", "lowest", "memory"):
        assert not torch.equal(shown[name], Odd().state_dict()[name]), name
    if how == "plain":
        samples = [sum(results[r][3] for r in ranks) for ranks in NODES]
        for place, (parameter, slots) in enumerate(zip(model.parameters(), results[0][2], strict=True)):
            other = results[2][2][place]
            for slot, value in optimizer.state[parameter].items():
                mean = (samples[0] * slots[slot] + samples[1] * other[slot]) / sum(samples)
                torch.testing.assert_close(value, mean.to(value.dtype))


def test_tensors_that_no_file_can_hold_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="odd"):
        folder.copied("x", {"odd": torch.eye(2).to_sparse()})
