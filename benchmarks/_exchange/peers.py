"""The peers of `exchange.py`: torch's own methods, accelerate, fairscale and hivemind.

fairscale's SlowMo and hivemind need an environment of their own; without it they are left out:
    python -m venv .peers/exchange; its pip: install -c constraints.txt torch numpy pydantic pydantic-settings typer
    rich psutil accelerate hivemind setuptools wheel; then install --no-build-isolation --no-deps fairscale==0.4.13.
"""

import os
import socket
import sys
from collections import OrderedDict
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from benchmarks._exchange.method import PERIOD, Method, Nodes, make_optimizer
from benchmarks._exchange.networks import MAX_BATCH_SIZE


def global_ddp(nodes: Nodes, plain: nn.Module) -> Method:
    """Returns torch's DDP: gradients are averaged over all ranks at every step."""
    optimizer = make_optimizer(plain)
    return Method(nn.parallel.DistributedDataParallel(plain), plain, optimizer.step, optimizer.zero_grad)


def post_local_sgd(nodes: Nodes, plain: nn.Module, *, hierarchical: bool = False) -> Method:
    """Returns torch's post-local SGD; `hierarchical` averages over ranks of a node twice as often as over all."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    subgroup, _ = dist.new_subgroups_by_enumeration(nodes)
    ddp = nn.parallel.DistributedDataParallel(plain)
    ddp.register_comm_hook(PostLocalSGDState(None, subgroup, start_localSGD_iter=0), post_localSGD_hook)
    if hierarchical:
        periods = OrderedDict([(PERIOD // 2, len(nodes[0])), (PERIOD, sum(map(len, nodes)))])
        averager: Any = HierarchicalModelAverager(period_group_size_dict=periods, warmup_steps=0)
    else:
        averager = PeriodicModelAverager(period=PERIOD, warmup_steps=0)
    optimizer = PostLocalSGDOptimizer(optim=make_optimizer(plain), averager=averager)
    return Method(ddp, plain, optimizer.step, optimizer.zero_grad)


def ddp_fp16(nodes: Nodes, plain: nn.Module) -> Method:
    """Returns torch's DDP with gradients sent in fp16."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    method = global_ddp(nodes, plain)
    ddp: Any = method.model
    ddp.register_comm_hook(None, fp16_compress_hook)
    return method


def accelerate_local_sgd(nodes: Nodes, plain: nn.Module) -> Method:
    """Returns LocalSGD of accelerate, with every rank a node."""
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(plain, make_optimizer(plain))
    local_sgd = LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=PERIOD, enabled=True)
    local_sgd.__enter__()

    def step() -> None:
        """Makes a step, and averages parameters at the end of a period."""
        optimizer.step()
        local_sgd.step()

    return Method(model, plain, step, optimizer.zero_grad)


def diloco(nodes: Nodes, plain: nn.Module) -> Method:
    """Returns DiLoCo from torch's own averaging: DDP inside the node, an outer SGD with Nesterov's momentum."""
    from torch.distributed.algorithms.model_averaging.utils import average_parameters

    subgroup, _ = dist.new_subgroups_by_enumeration(nodes)
    ddp = nn.parallel.DistributedDataParallel(plain, process_group=subgroup)
    inner = make_optimizer(plain)
    anchors = [nn.Parameter(parameter.detach().clone()) for parameter in plain.parameters()]
    outer = torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)
    num_steps = 0

    def step() -> None:
        """Makes an inner step, and an outer one at the end of a period."""
        nonlocal num_steps
        inner.step()
        num_steps += 1
        if num_steps % PERIOD == 0:
            average_parameters(plain.parameters(), dist.group.WORLD)
            for anchor, parameter in zip(anchors, plain.parameters(), strict=True):
                anchor.grad = anchor.detach() - parameter.detach()
            outer.step()
            with torch.no_grad():
                for anchor, parameter in zip(anchors, plain.parameters(), strict=True):
                    parameter.copy_(anchor)

    return Method(ddp, plain, step, inner.zero_grad)


def slowmo(nodes: Nodes, plain: nn.Module) -> Method:
    """Returns SlowMo of fairscale. It needs nodes of equal size; where they differ, every rank is a node."""
    from fairscale.experimental.nn.data_parallel import SlowMoBaseAlgorithm, SlowMoDistributedDataParallel

    node_sizes = {len(node) for node in nodes}
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda device=None: None  # it calls this on a CPU too
    model = SlowMoDistributedDataParallel(
        plain,
        nprocs_per_node=node_sizes.pop() if len(node_sizes) == 1 else 1,
        slowmo_base_algorithm=SlowMoBaseAlgorithm.LOCALSGD,
        slowmo_frequency=PERIOD,
        localsgd_frequency=PERIOD,
        slowmo_momentum=0.5,
    )
    optimizer = make_optimizer(plain)

    def step() -> None:
        """Makes a step, and one of SlowMo at the end of a period."""
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        model.perform_slowmo(optimizer)

    return Method(model, plain, step, optimizer.zero_grad)


def hivemind_local(nodes: Nodes, plain: nn.Module, *, batch_size: int = MAX_BATCH_SIZE) -> Method:
    """Returns local updates of hivemind: each rank is a peer, parameters are averaged in the background."""
    import hivemind

    optimizer = hivemind.Optimizer(
        dht=_open_hash_table(),
        run_id="exchange",
        optimizer=make_optimizer(plain),
        use_local_updates=True,
        batch_size_per_step=batch_size,
        target_batch_size=PERIOD * batch_size * dist.get_world_size(),
        matchmaking_time=1.0,
        averaging_timeout=20.0,
        tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.2, "max_refresh_period": 1.0},
    )
    return Method(plain, plain, optimizer.step, optimizer.zero_grad, close=_end_process)  # its shutdown may hang


def _open_hash_table() -> Any:
    """Returns hivemind's distributed hash table, which rank 0 starts and the other ranks join."""
    import hivemind

    own_addresses = [f"/ip4/{_own_address()}/tcp/0"]
    first_addresses: list[Any] = [None]
    if dist.get_rank() == 0:
        table = hivemind.DHT(host_maddrs=own_addresses, start=True)
        first_addresses = [[str(address) for address in table.get_visible_maddrs()]]
    dist.broadcast_object_list(first_addresses)
    if dist.get_rank() > 0:
        table = hivemind.DHT(initial_peers=first_addresses[0], host_maddrs=own_addresses, start=True)
    return table


def _end_process() -> None:
    """Ends this process and its children."""
    sys.stdout.flush()
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(0)


def _own_address() -> str:
    """Returns this rank's address on the link between nodes."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        return str(probe.getsockname()[0])
