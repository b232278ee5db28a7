"""What tests of compiled networks run on every rank, in processes of their own."""

from collections.abc import Callable

import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.distributed.fsdp import fully_shard

import evenly
from evenly.spec import EverySteps, Exchange
from tests.exchange.overlapped import Overlapped
from tests.nodes.test_exactness import OPTIMIZERS, batches, network
from tests.nodes.torch_shard_programs import largest_difference, mesh_of, state_of

EVERY = 3
COMPILED: list[int] = []  # the operations of each part that was compiled
SHARES = [2, 1]


def train(nodes: list[list[int]], form: str, backend: str, device: str = "cpu") -> tuple[float, int]:
    """Trains with the network compiled in one `form`; returns the largest difference from the reference, and how many
    operations of torch the compiled parts have."""
    with evenly.Session(device=device, progress=False) as session:
        index = next(i for i, members in enumerate(nodes) if session.rank in members)
        plain = Network(index).to(device)
        is_cut = form.startswith("shard")
        model, trained, optimizer = _trained(form, plain, nodes, backend, device)
        single = [[i] for i in range(len(nodes))] if is_cut else nodes
        reference = Overlapped(network(), OPTIMIZERS["adam"], single, EverySteps(EVERY), Exchange(), rows=False)
        place = index if is_cut else session.rank
        found = 0.0
        for row in batches(len(reference.replicas), 7, uneven=False):
            x, y = (tensor.to(device) for tensor in row[place])
            nn.functional.cross_entropy(trained(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            reference.train(row)
            if not is_cut:
                replica = reference.replicas[place]
                found = max(found, largest_difference(state_of(model), [*replica.parameters(), *replica.buffers()]))
        if is_cut:
            x = batches(1, 1)[0][0][0]
            reference.replicas[place].eval()
            model.eval()
            with torch.no_grad():
                found = largest_difference([trained(x.to(device)).cpu()], [reference.replicas[place](x)])
        return found, sum(COMPILED)


class Network(nn.Module):
    """The network of the tests as a class of its own: torch does not compile the forward of its own containers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers = network(seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def counting(name: str) -> Callable:
    """Returns a backend of torch.compile, which counts what it is given."""

    def compile_counted(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        COMPILED.append(sum(node.op in ("call_function", "call_method", "call_module") for node in graph.graph.nodes))
        return lookup_backend(name)(graph, inputs)

    return compile_counted


def _trained(form: str, plain: nn.Module, nodes: list[list[int]], name: str, device: str) -> tuple:
    """Returns the network whose state is compared, what the loop calls, and the optimizer."""
    backend = counting(name)

    def synchronized(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        optimizer = OPTIMIZERS["adam"](model)
        return evenly.synchronize(model, optimizer, every=EVERY, nodes=nodes), optimizer

    if form == "before":
        model: nn.Module = torch.compile(plain, backend=backend)
        trained, optimizer = synchronized(model)
    elif form == "method":
        model = plain
        model.compile(backend=backend)
        trained, optimizer = synchronized(model)
    elif form == "after":
        model = plain
        trained, optimizer = synchronized(model)
        trained = torch.compile(trained, backend=backend)
    elif form == "fsdp":
        model = plain
        mesh = mesh_of(nodes, device)
        fully_shard(model.layers[4], mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.compile(backend=backend)
        trained, optimizer = synchronized(model)
    else:
        rank = torch.distributed.get_rank()
        inside = next(members for members in nodes if rank in members)
        groups = [torch.distributed.new_group(members) for members in nodes]
        group = next(g for g, members in zip(groups, nodes, strict=True) if rank in members)
        if form == "shard before":
            plain.compile(backend=backend)
        shares = SHARES[: len(inside)]
        model = evenly.shard(plain, torch.zeros(4, 2, 4, 4).double(), shares=shares, group=group)
        if form == "shard after":
            model.compile(backend=backend)
        trained, optimizer = synchronized(model)
    return model, trained, optimizer
