"""Every step of node-based training equals the single-process reference, in float64."""

import copy
import threading

import pytest
import torch
from torch import nn

from evenly.nodes import join_nodes
from evenly.spec import Exchange, period_of
from tests.ranks import cluster_of, ragged, run_ranks
from tests.reference import Reference

CLUSTERS = {"1x1": ragged(1), "2x2": ragged(2, 2), "3+1": ragged(3, 1), "1+1+2": ragged(1, 1, 2)}
OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.5),
}
SEEDING = threading.Lock()


def network(seed: int = 0) -> nn.Module:
    with SEEDING:  # threads share torch's generator
        torch.manual_seed(seed)
        return _network()


def _network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1, bias=False),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(5 * 16, 7),
        nn.Tanh(),
        nn.Linear(7, 3),
    ).double()


def batches(ranks: int, steps: int, *, uneven: bool = True) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Returns [step][rank] batches; sizes differ by rank and the last step is shorter."""
    g = torch.Generator().manual_seed(5)
    rows = []
    for step in range(steps):
        sizes = [4 + (rank + step) % 3 if uneven else 4 for rank in range(ranks)]
        if uneven and step == steps - 1:
            sizes = [2 + rank % 2 for rank in range(ranks)]
        rows.append(
            [
                (torch.randn(n, 2, 4, 4, generator=g, dtype=torch.float64), torch.randint(3, (n,), generator=g))
                for n in sizes
            ]
        )
    return rows


def state_of(model: nn.Module) -> list[torch.Tensor]:
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


def train(rank_group, nodes, make_optimizer, every, data, exchange=None, clip=None):
    model = network(seed=rank_group.rank)  # unequal on purpose: rank 0's weights must win
    optimizer = make_optimizer(model)
    synchronized = join_nodes(
        model, optimizer, rank_group=rank_group, cluster=cluster_of(nodes), period=period_of(every), exchange=exchange
    )
    trace = [state_of(model)]
    for row in data:
        x, y = row[rank_group.rank]
        optimizer.zero_grad()
        nn.functional.cross_entropy(synchronized(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(synchronized.parameters(), clip)
        optimizer.step()
        trace.append(state_of(model))
    synchronized.finish()
    trace.append(state_of(model))
    synchronized.close()
    return trace


def expected(nodes, make_optimizer, every, data, *, average_state=False, clip=None):
    reference = Reference(network(), make_optimizer, nodes, average_state=average_state)
    reference.clip = clip
    trace = [[state_of(replica) for replica in reference.replicas]]
    for step, row in enumerate(data, start=1):
        reference.step(row, nn.functional.cross_entropy)
        if step % every == 0:
            reference.exchange()
        trace.append([state_of(replica) for replica in reference.replicas])
    if len(data) % every:
        reference.exchange()
    trace.append([state_of(replica) for replica in reference.replicas])
    return trace


def compare(traces, reference, *, tolerance=1e-11):
    for step, row in enumerate(reference):
        for rank, wanted in enumerate(row):
            for got, want in zip(traces[rank][step], wanted, strict=True):
                note = f"step {step} rank {rank}: "
                torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, msg=note.__add__)


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("shape", CLUSTERS)
def test_parameters_and_buffers_after_every_step(shape, name, every):
    nodes = CLUSTERS[shape]
    data = batches(sum(map(len, nodes)), 7)
    traces = run_ranks(sum(map(len, nodes)), train, nodes, OPTIMIZERS[name], every, data)
    compare(traces, expected(nodes, OPTIMIZERS[name], every, data))


@pytest.mark.parametrize("shape", ["2x2", "3+1"])
def test_optimizer_state_is_averaged_when_asked(shape):
    nodes, make = CLUSTERS[shape], OPTIMIZERS["adam"]
    data = batches(4, 6)
    traces = run_ranks(4, train, nodes, make, 2, data, Exchange(optimizer_state="average"))
    compare(traces, expected(nodes, make, 2, data, average_state=True))


def test_gradient_clipping():
    nodes, make = CLUSTERS["3+1"], OPTIMIZERS["momentum"]
    data = batches(4, 5)
    compare(run_ranks(4, train, nodes, make, 2, data, None, 0.05), expected(nodes, make, 2, data, clip=0.05))


@pytest.mark.parametrize("name", ["sgd", "momentum"])
@pytest.mark.parametrize("shape", ["2x2", "1+1+2"])
def test_every_step_equals_global_data_parallel(shape, name):
    """K' = 1 with SGD and equal weights is global data parallelism, to rounding."""
    nodes, make = CLUSTERS[shape], OPTIMIZERS[name]
    equal = batches(4, 6, uneven=False)
    if shape == "1+1+2":  # equal weights of nodes: the node of two ranks splits what the others take whole
        equal = [[*row[:2], *((x[:2], y[:2]) for x, y in row[2:])] for row in equal]
    node_based = run_ranks(4, train, nodes, make, 1, equal)
    everybody = run_ranks(4, train, nodes, make, "global", equal)
    parameters = len(list(network().parameters()))
    for ours, theirs in zip(node_based, everybody, strict=True):
        for step in range(len(equal) + 2):
            for a, b in zip(ours[step][:parameters], theirs[step][:parameters], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_global_mode_is_the_one_device_gradient_of_the_whole_batch():
    nodes, make = CLUSTERS["3+1"], OPTIMIZERS["sgd"]
    plain = nn.Sequential(nn.Flatten(), nn.Linear(32, 3)).double()

    def act(rank_group):
        model = copy.deepcopy(plain)
        optimizer = make(model)
        synchronized = join_nodes(
            model, optimizer, rank_group=rank_group, cluster=cluster_of(nodes), period=period_of("global")
        )
        for row in data:
            x, y = row[rank_group.rank]
            optimizer.zero_grad()
            nn.functional.cross_entropy(synchronized(x), y).backward()
            optimizer.step()
        synchronized.close()
        return state_of(model)

    data = batches(4, 5)
    results = run_ranks(4, act)
    optimizer = make(plain)
    for row in data:
        x, y = torch.cat([x for x, _ in row]), torch.cat([y for _, y in row])
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
    for result in results:
        torch.testing.assert_close(result, state_of(plain), rtol=1e-11, atol=1e-12)
