"""What tests of networks that torch shards run on every rank, in processes of their own."""

import os
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import TensorDataset

import evenly
from evenly.spec import EverySteps, Exchange
from tests.exchange.overlapped import Overlapped
from tests.nodes.test_exactness import OPTIMIZERS, batches, network

Nodes = list[list[int]]


def mesh_of(nodes: Nodes, device: str = "cpu") -> DeviceMesh:
    """Returns the mesh of this rank's node."""
    group, _ = dist.new_subgroups_by_enumeration(nodes)
    return DeviceMesh.from_group(group, device)


def wide_network(seed: int = 0) -> nn.Module:
    """Returns one whose layers can be divided evenly, as torch needs it for DTensors by hand."""
    torch.manual_seed(seed)
    layers = [nn.Conv2d(2, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(80, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def sharded(
    mesh: DeviceMesh, seed: int = 0, *, kind: str = "fsdp", device: str = "cpu", is_wide: bool = False
) -> nn.Module:
    """Returns the network of the tests, in shards; unequal seeds are for ranks whose weights must not win."""
    model = (wide_network if is_wide else network)(seed).to(device)
    if kind == "fsdp":
        fully_shard(model[4], mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "tensor":
        parallelize_module(model, mesh, {"4": ColwiseParallel(), "6": RowwiseParallel()})
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all of a tensor, on the CPU."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def state_of(model: nn.Module) -> list[torch.Tensor]:
    for part in model.modules():
        if hasattr(part, "reshard"):
            part.reshard()
    return [whole(tensor) for tensor in (*model.parameters(), *model.buffers())]


def largest_difference(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    return max(float((a.double() - b.detach().double()).abs().max()) for a, b in zip(got, want, strict=True))


def train(
    nodes: Nodes,
    *,
    optimizer: str,
    every: int,
    kinds: list[str],
    steps: int = 7,
    exchange: dict[str, Any] | None = None,
    device: str = "cpu",
) -> list[float]:
    """Trains with the network sharded in the way of each node's kind; returns the largest difference from the
    reference after each step, and after the end."""
    with evenly.Session(device=device) as session:
        rank, settings = session.rank, Exchange(**(exchange or {}))
        index = next(i for i, members in enumerate(nodes) if rank in members)
        is_shared = "tensor" in kinds  # the ranks of a node have one batch
        model = sharded(mesh_of(nodes, device), seed=index, kind=kinds[index], device=device, is_wide=is_shared)
        made = OPTIMIZERS[optimizer](model)
        trained = evenly.synchronize(model, made, every=every, nodes=nodes, **(exchange or {}))
        single = [[i] for i in range(len(nodes))] if is_shared else nodes
        reference = Overlapped(
            network() if not is_shared else wide_network(),
            OPTIMIZERS[optimizer],
            single,
            EverySteps(every),
            settings,
            rows=False,
        )
        place = index if is_shared else rank
        differences = [largest_difference(state_of(model), _state(reference, place))]
        for row in batches(len(reference.replicas), steps):
            x, y = (tensor.to(device) for tensor in row[place])
            made.zero_grad()
            output = trained(x)
            nn.functional.cross_entropy(output, y).backward()
            made.step()
            reference.train(row)
            differences.append(largest_difference(state_of(model), _state(reference, place)))
        trained.finish()
        reference.finish()
        differences.append(largest_difference(state_of(model), _state(reference, place)))
        trained.close()
        return differences


def _state(reference: Overlapped, place: int) -> list[torch.Tensor]:
    replica = reference.replicas[place]
    return [*replica.parameters(), *replica.buffers()]


def odd_steps(nodes: Nodes) -> dict[str, float]:
    """Trains with batches without samples, accumulated ones, several forwards in a backward, and evaluation between
    steps; returns the largest difference from the gradients of one process in each case."""
    with evenly.Session(device="cpu") as session:
        rank = session.rank
        node = next(members for members in nodes if rank in members)
        model = _plain()
        fully_shard(model, mesh=mesh_of(nodes))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        trained = evenly.synchronize(model, optimizer, every=100, nodes=nodes)
        found = {}
        for name, sizes in CASES.items():
            plain = _plain()
            data = [[batch(number, step) for step, number in enumerate(sizes[r])] for r in range(len(sizes))]
            parts = [torch.zeros(()) for _ in plain.parameters()]
            total = sum(sum(sizes[r]) for r in node)
            for r in node:
                plain.zero_grad()
                losses = [loss_of(plain, *pair) for pair in data[r] if len(pair[0])]
                if losses:
                    sum(losses).backward()
                    gradients = [p.grad for p in plain.parameters()]
                    parts = [a + sum(sizes[r]) / total * g for a, g in zip(parts, gradients, strict=True)]
            _backward(trained, data[rank], name)
            model.reshard()
            gradients = [whole(p.grad) for p in model.parameters()]
            found[name] = largest_difference(gradients, parts)
            optimizer.step()
            optimizer.zero_grad()
        trained.finish()
        trained.close()
        return found


CASES = {
    "one": [[3], [1], [2]],
    "empty": [[3], [0], [2]],
    "accumulated": [[3, 1], [2, 2], [2, 2]],
    "together": [[3, 2], [2, 2], [2, 1]],
    "evaluated": [[3], [2], [2]],
}


def _backward(trained: nn.Module, pairs: list[tuple[torch.Tensor, torch.Tensor]], name: str) -> None:
    if name == "together":
        sum(loss_of(trained, *pair) for pair in pairs).backward()
        return
    for number, (x, y) in enumerate(pairs):
        with nullcontext() if number == len(pairs) - 1 else trained.no_sync():
            loss_of(trained, x, y).backward()
        if name == "evaluated":
            with torch.no_grad():
                trained(torch.zeros(2, 4, dtype=torch.float64))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean()


def _plain() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def batch(number: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(10 * number + step)
    return torch.randn(number, 4, generator=g).double(), torch.randn(number, 1, generator=g).double()


def resumed(
    nodes: Nodes,
    folder: str,
    *,
    kinds: list[str],
    end_step: int = 0,
    exchange: dict[str, Any] | None = None,
    weights: str = "",
) -> dict[str, Any]:
    """Trains in a session with checkpoints, dies after `end_step`, and returns the parameters that it ended with."""
    rows = [row[0] for row in batches(1, 12)]
    data = TensorDataset(torch.cat([x for x, _ in rows]), torch.cat([y for _, y in rows]))
    with evenly.Session(folder, checkpoint_every=3, device="cpu", progress=False) as session:
        index = next(i for i, members in enumerate(nodes) if session.rank in members)
        model = sharded(mesh_of(nodes), seed=index, kind=kinds[index])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        plan = session.plan(batch_size=3, every=4, **(exchange or {}))
        trained, optimizer, loader = session.prepare(model, optimizer, data, plan=plan)
        for _ in session.epochs(3):
            for x, y in loader:
                nn.functional.cross_entropy(trained(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if trained.schedule.step == end_step:
                    os._exit(9)
        if weights:
            session.save(weights)
        return {
            "parameters": [tensor.double().flatten().tolist() for tensor in state_of(model)],
            "state": [whole(v).double().flatten().tolist() for s in optimizer.state.values() for v in s.values()],
            "step": trained.schedule.step,
        }


def refusals(nodes: Nodes) -> dict[str, str]:
    """Returns the error of each network that cannot be synchronized."""
    found = {}
    with evenly.Session(device="cpu", progress=False) as session:
        mesh = mesh_of(nodes)
        square = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("node", "rank"))

        def attempt(name: str, model: nn.Module, **wishes: Any) -> None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            try:
                evenly.synchronize(model, optimizer, **{"every": 2, "nodes": nodes, **wishes}).close()
            except evenly.EvenlyError as error:
                found[name] = f"{type(error).__name__}: {error}"

        attempt("global", sharded(mesh), every="global")
        attempt("one node", sharded(mesh), nodes=[[0, 1, 2, 3]])
        partly = network()
        fully_shard(partly[4], mesh=mesh)
        attempt("partly", partly)
        attempt("mesh", sharded(square))
        attempt("mixed", sharded(mesh, kind="fsdp" if session.rank < 2 else "tensor"))
        attempt("good", sharded(square["rank"]))
    return found


def poisoned(nodes: Nodes) -> list[str]:
    """Trains with a NaN on rank 1 in step 3; returns the errors, and the steps made where such steps are skipped."""
    found = []
    with evenly.Session(device="cpu", progress=False) as session:
        mesh = mesh_of(nodes)
        for policy in ("skip", "stop"):
            model = sharded(mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            trained = evenly.synchronize(model, optimizer, every=2, nodes=nodes, nonfinite=policy)
            try:
                for step, row in enumerate(batches(3, 6), start=1):
                    x, y = row[session.rank]
                    loss = nn.functional.cross_entropy(trained(x), y)
                    (loss * (float("nan") if session.rank == 1 and step == 3 else 1.0)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                trained.finish()
                is_finite = all(bool(tensor.isfinite().all()) for tensor in state_of(model))
                found.append(f"{trained.schedule.step} {is_finite}")
                trained.close()
            except evenly.EvenlyError as error:
                found.append(f"{type(error).__name__}: {error}")
                break
    return found


def corners(nodes: Nodes) -> dict[str, object]:
    """Returns what came of loops in which FSDP holds gathered parameters, or gradients that are not added up yet."""
    with evenly.Session(device="cpu", progress=False) as session:
        mesh = mesh_of(nodes)
        x = batch(2 + session.rank, 0)
        return {
            case.__name__: case(mesh, nodes, x) for case in (_closure, _loaded, _foreign, _zeroed, _skipped, _frozen)
        }


def _tiny(mesh: DeviceMesh, nodes: Nodes, **wishes: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = _plain()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, evenly.synchronize(model, optimizer, **{"every": 50, "nodes": nodes, **wishes})


def _apart(model: nn.Module) -> float:
    """Returns how far ranks are from each other."""
    values = torch.cat([tensor.flatten() for tensor in state_of(model)])
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, values)
    return max(float((row - rows[0]).abs().max()) for row in rows)


def _closure(mesh: DeviceMesh, nodes: Nodes, pair: tuple[torch.Tensor, torch.Tensor]) -> float:
    """A closure ends with a look at the network, which gathers its parameters, just before an exchange."""
    model, optimizer, trained = _tiny(mesh, nodes, every=1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(trained, *pair)
        loss.backward()
        with torch.no_grad():
            trained(pair[0])
        return loss

    optimizer.step(closure)
    apart = _apart(model)
    trained.finish()
    trained.close()
    return apart


def _loaded(mesh: DeviceMesh, nodes: Nodes, pair: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Weights are loaded after an evaluation."""
    model, optimizer, trained = _tiny(mesh, nodes)
    best = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        loss_of(trained, *pair).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            trained(pair[0])
        model.load_state_dict(best)
    trained.finish()
    trained.close()
    return largest_difference(state_of(model), list(_plain().parameters()))


def _foreign(mesh: DeviceMesh, nodes: Nodes, pair: tuple[torch.Tensor, torch.Tensor]) -> str:
    """The plain network is used between two micro-batches, whose gradients FSDP adds up only in the end."""
    _, optimizer, trained = _tiny(mesh, nodes)
    with trained.no_sync():
        loss_of(trained, *pair).backward()
    loss_of(trained.module, *pair).backward()
    loss_of(trained, *pair).backward()
    try:
        optimizer.step()
    except evenly.errors.SpecError as error:
        return str(error)
    finally:
        trained.close(may_differ=True)
    return "nothing was noticed"


def _zeroed(mesh: DeviceMesh, nodes: Nodes, pair: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Gradients are set to zero in place: their samples do not count. Returns the batches counted."""
    _, optimizer, trained = _tiny(mesh, nodes)
    loss_of(trained, *pair).backward()
    optimizer.zero_grad(set_to_none=False)
    loss_of(trained, *pair).backward()
    optimizer.step()
    trained.close(may_differ=True)
    return trained.samples / len(pair[0])


def _skipped(mesh: DeviceMesh, nodes: Nodes, pair: tuple[torch.Tensor, torch.Tensor]) -> int:
    """A gradient is not finite, and the loop looks at the network before it makes the step; returns the steps."""
    model, _, trained = _tiny(mesh, nodes)
    (loss_of(trained, *pair) * float("nan")).backward()
    with torch.no_grad():
        trained(pair[0])
    steps = trained.schedule.step
    model.zero_grad()
    trained.close(may_differ=True)
    return steps


def _frozen(mesh: DeviceMesh, nodes: Nodes, pair: tuple[torch.Tensor, torch.Tensor]) -> float:
    """A frozen layer is in no module of FSDP."""
    model = _plain()
    model[0].requires_grad_(False)
    fully_shard(model[2], mesh=mesh)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    trained = evenly.synchronize(model, optimizer, every=1, nodes=nodes)
    loss_of(trained, *pair).backward()
    optimizer.step()
    trained.finish()
    trained.close()
    return _apart(model)


def accumulated(nodes: Nodes) -> float:
    """Returns how far gradients of accumulated batches in a session are from those of one process."""
    data = TensorDataset(*batch(24, 0))
    with evenly.Session(device="cpu", progress=False) as session:
        model = _plain()
        fully_shard(model[0], mesh=mesh_of(nodes))
        fully_shard(model, mesh=mesh_of(nodes))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        plan = session.plan(batch_size=2, every=50)
        trained, optimizer, loader = session.prepare(model, optimizer, data, plan=plan, shuffle=False)
        seen, furthest = [], 0.0
        for _ in session.epochs(1):
            for x, y in loader:
                with session.accumulate(2) as accumulating:
                    accumulating.backward(loss_of(trained, x, y))
                seen.append((x, y))
                if len(seen) == 2:
                    node = next(members for members in nodes if session.rank in members)
                    everywhere = session.gather([torch.cat(tensors) for tensors in zip(*seen, strict=True)])
                    plain = _plain()
                    rows = [torch.cat([everywhere[rank][part] for rank in node]) for part in (0, 1)]
                    loss_of(plain, *rows).backward()
                    model.reshard()
                    got = [whole(parameter.grad) for parameter in model.parameters()]
                    furthest = max(furthest, largest_difference(got, [p.grad for p in plain.parameters()]))
                    optimizer.step()
                    optimizer.zero_grad()
                    seen = []
        return furthest
