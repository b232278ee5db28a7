"""What tests of plans in sessions run on every rank."""

import os
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import evenly
from evenly.spec import Plan, Role


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)).double()


class Slow(nn.Module):
    """Takes its time for every sample, from some step on."""

    def __init__(self, body: nn.Module, sample_s: float, after: int) -> None:
        super().__init__()
        self.body, self.sample_s, self.after, self.steps = body, sample_s, after, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        time.sleep(len(x) * self.sample_s * (1 if self.steps <= self.after else 4))
        return self.body(x)


def fit(
    session: evenly.Session,
    plan: Plan,
    epochs: int = 2,
    size: int = 50,
    slow_s: float = 0.0,
    after: int = 10**9,
    batches: int = 1,
) -> dict[str, Any]:
    """Trains with so many batches a step and returns the parameters, the samples of each batch and the rank."""
    torch.manual_seed(5)
    dataset = TensorDataset(torch.randn(size, 6, dtype=torch.float64), torch.randint(4, (size,)))
    model = Slow(network(), slow_s, after)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trained, optimizer, loader = session.prepare(model, optimizer, dataset, plan=plan)
    sizes = []
    for _ in session.epochs(epochs):
        for x, y in loader:
            sizes.append(loader.samples)
            is_last = len(sizes) % batches == 0
            with nullcontext() if is_last else trained.no_sync():
                nn.functional.cross_entropy(trained(x), y).backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
    told = [value.flatten().tolist() for value in trained.module.parameters()]
    return {
        "parameters": told,
        "sizes": sizes,
        "rank": session.rank,
        "world": session.world_size,
        "summed_by_the_script": sum_of_ranks(session),
    }


def sum_of_ranks(session: evenly.Session) -> list[int]:
    """Returns ones and the numbers of ranks, summed by a collective of the script over torch's default group."""
    summed = torch.tensor([1, session.rank])
    dist.all_reduce(summed)
    return [int(number) for number in summed]


def uneven(*, samples: list[int], folder: str | None = None, epochs: int = 2, local: bool = False) -> dict[str, Any]:
    """Trains with these samples on each rank; 0 leaves a rank out. Folders may be local to each rank."""
    own = f"{folder}/{os.environ['RANK']}" if folder and local else folder
    with evenly.Session(own, device="cpu") as session:
        roles = [
            Role(rank=rank, node=session.cluster.node_of(rank), samples=count, left_out="" if count else "too slow")
            for rank, count in enumerate(samples)
        ]
        return fit(session, Plan(roles=tuple(roles)), epochs=epochs)
    return {"left_out": True}


def uneven_in_a_group_of_the_script(*, samples: list[int]) -> dict[str, Any]:
    """Trains likewise in a process group that was open before."""
    dist.init_process_group("gloo")
    with evenly.Session(device="cpu") as session:
        roles = [Role(rank=rank, node=rank, samples=n, left_out="" if n else "slow") for rank, n in enumerate(samples)]
        _, _, loader = session.prepare(
            model := nn.Linear(2, 2),
            torch.optim.SGD(model.parameters()),
            list(torch.ones(10, 2)),
            plan=Plan(roles=roles),
        )
        return {"world": session.world_size, "batches": len(list(loader))}
    dist.destroy_process_group()
    return {"left_out": True}


def slowed(
    *,
    samples: list[int],
    slow_s: list[float],
    after: int,
    rebalance: bool,
    most: list[int] | None = None,
    batches: int = 1,
) -> dict[str, Any]:
    """Trains on ranks that take their time for each sample; the last one four times as much after some steps."""
    with evenly.Session(device="cpu") as session:
        own = slow_s[session.rank]
        limits = most or [0] * len(samples)
        roles = [
            Role(rank=rank, node=0, samples=count, most_samples=limits[rank]) for rank, count in enumerate(samples)
        ]
        last = session.rank == len(samples) - 1
        return fit(
            session,
            Plan(roles=tuple(roles), rebalance=rebalance),
            size=1200,
            slow_s=own,
            after=after if last else 10**9,
            batches=batches,
        )
    return {}


def measured(*, batch: int, folder: str | None = None, size: int = 50) -> dict[str, Any]:
    """Measures, plans and trains."""
    with evenly.Session(folder, device="cpu", checkpoint_every=None) as session:
        plan = session.plan(network(), torch.randn(batch, 6, dtype=torch.float64), global_batch=batch)
        result = fit(session, plan, epochs=1, size=size)
        result["planned"] = [role.samples for role in plan.roles]
        result["replicas"] = [list(replica.ranks) for replica in plan.replicas]
        result["explained"] = plan.explain()
        result["step_s"] = plan.predicted.step_s if plan.predicted else 0.0
        return result
    return {"left_out": True}


def doubted() -> dict[str, Any]:
    """Plans by a profile of steps that lie far apart."""
    example = torch.randn(32, 6, dtype=torch.float64)
    with evenly.Session(device="cpu") as session:
        profile = evenly.Profile.from_speeds(session.cluster, evenly.trace(network(), example), [1, 1])
        devices = tuple(device.model_copy(update={"spread": 0.9}) for device in profile.devices)
        shaky = profile.model_copy(update={"devices": devices, "is_measured": True})
        plan = session.plan(network(), example, global_batch=32, profile=shaky)
        return {"planned": [role.samples for role in plan.roles]}
    return {}


def wide() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 4)).double()


def _rest(seconds: float, _: torch.Tensor) -> None:
    time.sleep(seconds)


def cut_and_slowed(*, nodes: int, after: int, rebalance: bool, size: int = 1200, unit_s: float = 0.0) -> dict[str, Any]:
    """Trains a network cut over the two ranks of each node; the last rank needs four times as long after some steps."""
    with evenly.Session(device="cpu", nodes=[[2 * node, 2 * node + 1] for node in range(nodes)]) as session:
        torch.manual_seed(5)
        dataset = TensorDataset(torch.randn(size, 6, dtype=torch.float64), torch.randint(4, (size,)))
        model = wide()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        plan = session.plan(model, torch.randn(12, 6, dtype=torch.float64), batch_size=12, shares=[1, 1], every=4)
        plan = plan.model_copy(update={"rebalance": rebalance})
        events: list[Any] = []
        session.listen(events.append)
        trained, optimizer, loader = session.prepare(model, optimizer, dataset, plan=plan)
        losses, rows, sizes = [], [], []
        slows = session.rank == session.world_size - 1
        for _ in session.epochs(2):
            for x, y in loader:
                weight = dict(trained.module.named_parameters())["0.weight"]
                rows.append(len(weight))
                sizes.append(loader.samples)
                unit = unit_s * (4 if slows and len(rows) > after else 1)
                hook = weight.register_hook(partial(_rest, len(weight) * unit))
                loss = nn.functional.cross_entropy(trained(x), y)
                loss.backward()
                hook.remove()
                losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
        full = evenly.shards.full_state_dict(trained, optimizer)
        told = [value.flatten().tolist() for value in full["model"].values()]
        moves = [event.shares for event in events if event.event == "rebalanced"]
        return {"parameters": told, "losses": losses, "rows": rows, "sizes": sizes, "moves": moves}
    return {}
