"""The ways to train that `exchange.py` runs in turns: peers, and our own exchange in each form.

fairscale's SlowMo and hivemind need an environment of their own; without it they are left out:
    python -m venv .peers/exchange; its pip: install -c constraints.txt torch numpy pydantic pydantic-settings typer
    rich psutil accelerate hivemind setuptools wheel; then install --no-build-isolation --no-deps fairscale==0.4.13.
"""

import importlib.metadata
import importlib.util
import os
import socket
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

PERIOD = 8
BATCH = 32
MOST_BUSY = 64  # samples of a rank with which the busy network is tried
Nodes = list[list[int]]


def network() -> nn.Module:
    """Returns two convolutions and two linear layers: 2.0 million parameters and little work for each."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 7 * 7, 640), nn.ReLU(), nn.Linear(640, 10),
    )  # fmt: skip


def busy_network() -> nn.Module:
    """Returns three convolutions and two linear layers: 0.56 million parameters and more work for each."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 7 * 7, 160), nn.ReLU(), nn.Linear(160, 10),
    )  # fmt: skip


class Method:
    """One way to train: `model` is called, `step` follows backward; `lead` steps after an exchange it is all there."""

    def __init__(
        self, model: nn.Module, plain: nn.Module, step: Callable[[], None], zero: Callable[[], None], *, lead: int = 0
    ) -> None:
        self.model, self.plain, self.step, self.zero, self.lead = model, plain, step, zero, lead
        self.close: Callable[[], Any] = lambda: None
        self.seconds: list[float] = []  # of each step's share of a round
        self.sent: list[list[int]] = []  # bytes per node of each round


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def global_ddp(nodes: Nodes, plain: nn.Module) -> Method:
    optimizer = optimizer_of(plain)
    return Method(nn.parallel.DistributedDataParallel(plain), plain, optimizer.step, optimizer.zero_grad)


def post_local(nodes: Nodes, plain: nn.Module, *, hierarchical: bool = False) -> Method:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    subgroup, _ = dist.new_subgroups_by_enumeration(nodes)
    ddp = nn.parallel.DistributedDataParallel(plain)
    ddp.register_comm_hook(PostLocalSGDState(None, subgroup, start_localSGD_iter=0), post_localSGD_hook)
    if hierarchical:
        periods = OrderedDict([(PERIOD // 2, len(nodes[0])), (PERIOD, sum(map(len, nodes)))])
        averager = HierarchicalModelAverager(period_group_size_dict=periods, warmup_steps=0)
    else:
        averager = PeriodicModelAverager(period=PERIOD, warmup_steps=0)
    optimizer = PostLocalSGDOptimizer(optim=optimizer_of(plain), averager=averager)
    return Method(ddp, plain, optimizer.step, optimizer.zero_grad)


def fp16_hook(nodes: Nodes, plain: nn.Module) -> Method:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    method = global_ddp(nodes, plain)
    method.model.register_comm_hook(None, fp16_compress_hook)
    return method


def accelerate_local(nodes: Nodes, plain: nn.Module) -> Method:
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(plain, optimizer_of(plain))
    local = LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=PERIOD, enabled=True)
    local.__enter__()

    def step() -> None:
        optimizer.step()
        local.step()

    return Method(model, plain, step, optimizer.zero_grad)


def diloco(nodes: Nodes, plain: nn.Module) -> Method:
    """DiLoCo as one writes it with torch's own averaging: DDP inside the node, outer SGD with Nesterov's momentum."""
    from torch.distributed.algorithms.model_averaging.utils import average_parameters

    subgroup, _ = dist.new_subgroups_by_enumeration(nodes)
    ddp = nn.parallel.DistributedDataParallel(plain, process_group=subgroup)
    inner, points = optimizer_of(plain), [nn.Parameter(p.detach().clone()) for p in plain.parameters()]
    outer = torch.optim.SGD(points, lr=0.7, momentum=0.9, nesterov=True)
    made = [0]

    def step() -> None:
        inner.step()
        made[0] += 1
        if made[0] % PERIOD == 0:
            average_parameters(plain.parameters(), dist.group.WORLD)
            for point, parameter in zip(points, plain.parameters(), strict=True):
                point.grad = point.detach() - parameter.detach()
            outer.step()
            with torch.no_grad():
                for point, parameter in zip(points, plain.parameters(), strict=True):
                    parameter.copy_(point)

    return Method(ddp, plain, step, inner.zero_grad)


def slowmo(nodes: Nodes, plain: nn.Module) -> Method:
    """SlowMo of fairscale: it wants equal nodes, so where they are not every rank is a node."""
    from fairscale.experimental.nn.data_parallel import SlowMoBaseAlgorithm, SlowMoDistributedDataParallel

    sizes = {len(node) for node in nodes}
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda device=None: None  # it calls this on a CPU too
    model = SlowMoDistributedDataParallel(
        plain,
        nprocs_per_node=sizes.pop() if len(sizes) == 1 else 1,
        slowmo_base_algorithm=SlowMoBaseAlgorithm.LOCALSGD,
        slowmo_frequency=PERIOD,
        localsgd_frequency=PERIOD,
        slowmo_momentum=0.5,
    )
    optimizer = optimizer_of(plain)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        model.perform_slowmo(optimizer)

    return Method(model, plain, step, optimizer.zero_grad)


def hive(nodes: Nodes, plain: nn.Module, *, batch: int = MOST_BUSY) -> Method:
    """Local updates of hivemind: each rank is a peer, parameters are averaged in the background."""
    import hivemind

    world, address = dist.get_world_size(), _own_address()
    known: list[Any] = [None]
    if dist.get_rank() == 0:
        dht = hivemind.DHT(host_maddrs=[f"/ip4/{address}/tcp/0"], start=True)
        known = [[str(a) for a in dht.get_visible_maddrs()]]
    dist.broadcast_object_list(known)
    if dist.get_rank() > 0:
        dht = hivemind.DHT(initial_peers=known[0], host_maddrs=[f"/ip4/{address}/tcp/0"], start=True)
    optimizer = hivemind.Optimizer(
        dht=dht, run_id="exchange", optimizer=optimizer_of(plain), use_local_updates=True,
        batch_size_per_step=batch, target_batch_size=PERIOD * batch * world,
        matchmaking_time=1.0, averaging_timeout=20.0,
        tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.2, "max_refresh_period": 1.0},
    )  # fmt: skip
    method = Method(plain, plain, optimizer.step, optimizer.zero_grad)
    method.close = _end  # its own way to end waits for ever now and then
    return method


def _end() -> None:
    """Ends this process and those that it has started."""
    sys.stdout.flush()
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(0)


def _own_address() -> str:
    """Returns this rank's address on the link between nodes."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        return str(probe.getsockname()[0])


def ours(nodes: Nodes, plain: nn.Module, *, every: int | str = PERIOD, **exchange: Any) -> Method:
    import evenly

    optimizer = optimizer_of(plain)
    model = evenly.synchronize(plain, optimizer, every=every, nodes=nodes, **exchange)
    method = Method(model, plain, optimizer.step, optimizer.zero_grad, lead=exchange.get("overlap", 0))
    method.close = model.close
    return method


Make = Callable[[Nodes, nn.Module], Method]
METHODS: dict[str, Make] = {
    "global DDP": global_ddp,
    "post_localSGD": post_local,
    "hierarchical": partial(post_local, hierarchical=True),
    "evenly": ours,
    "evenly, global": partial(ours, every="global"),
    "no exchange": partial(ours, every=10**9),
}
FULL: dict[str, Make] = {
    "no exchange": partial(ours, every=10**9),
    "global DDP": global_ddp,
    "DDP, fp16 hook": fp16_hook,
    "post_localSGD": post_local,
    "accelerate LocalSGD": accelerate_local,
    "DiLoCo by hand": diloco,
    "fairscale SlowMo": slowmo,
    "evenly, fp32 waited for": ours,
    "evenly, fp32": partial(ours, overlap=3),
    "evenly, bf16": partial(ours, overlap=3, codec="bf16"),
    "evenly, int8": partial(ours, overlap=3, codec="int8"),
    "evenly, int4": partial(ours, overlap=3, codec="int4"),
    "evenly, int8, 2 fragments": partial(ours, overlap=3, codec="int8", fragments=2),
    "evenly, int8, Nesterov": partial(ours, overlap=3, codec="int8", outer="nesterov"),
}
APART = {name: FULL[name] for name in ("no exchange", "evenly, fp32")}  # and hivemind, one after the other
PACE = {"no exchange": FULL["no exchange"]}
SLOW = ("global DDP", "DDP, fp16 hook")  # one period a round is enough of them
NEEDS = {"accelerate LocalSGD": "accelerate", "fairscale SlowMo": "fairscale", "hivemind": "hivemind"}


def versions() -> str:
    """Returns the versions of torch and of the peers that are there."""
    packages = ["torch", *sorted(set(NEEDS.values()))]
    known = [(name, importlib.metadata.version(name)) for name in packages if importlib.util.find_spec(name)]
    return ", ".join(f"{name} {version}" for name, version in known)


def ways_of(sitting: str, batch: int) -> dict[str, Make]:
    """Returns the ways of one run of the lab whose packages are there."""
    apart = APART | {"hivemind": partial(hive, batch=batch)}
    ways = {"short": METHODS, "full": FULL, "apart": apart, "pace": PACE}[sitting]
    return {name: make for name, make in ways.items() if name not in NEEDS or importlib.util.find_spec(NEEDS[name])}
