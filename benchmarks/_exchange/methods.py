"""The methods that `exchange.py` runs in turns: peers, and our own exchange in each form."""

import importlib.metadata
import importlib.util
from functools import partial
from typing import Any, Literal

from torch import nn

import evenly
from benchmarks._exchange import peers
from benchmarks._exchange.method import PERIOD, Method, MethodFactory, Nodes, make_optimizer

# short: the methods of the plain command. full: all methods of --full. apart: hivemind, with two methods to compare it
# with, one after another. pace: only the limit, to choose a batch.
MethodSet = Literal["short", "full", "apart", "pace"]
NEVER = 10**9  # a period longer than any run


def evenly_method(nodes: Nodes, plain: nn.Module, *, every: int | str = PERIOD, **exchange: Any) -> Method:
    """Returns `evenly.synchronize` with this period and form of exchange."""
    optimizer = make_optimizer(plain)
    model = evenly.synchronize(plain, optimizer, every=every, nodes=nodes, **exchange)
    return Method(
        model,
        plain,
        optimizer.step,
        optimizer.zero_grad,
        overlap_steps=exchange.get("overlap", 0),
        close=model.close,
    )


def by_itself(_nodes: Nodes, plain: nn.Module) -> Method:
    """Returns ranks that train each for itself and send nothing, not even inside a node."""
    optimizer = make_optimizer(plain)
    return Method(plain, plain, optimizer.step, optimizer.zero_grad)


SHORT: dict[str, MethodFactory] = {
    "global DDP": peers.global_ddp,
    "post_localSGD": peers.post_local_sgd,
    "hierarchical": partial(peers.post_local_sgd, hierarchical=True),
    "evenly": evenly_method,
    "evenly, global": partial(evenly_method, every="global"),
    "no exchange": partial(evenly_method, every=NEVER),
}
FULL: dict[str, MethodFactory] = {
    "no communication at all": by_itself,
    "no exchange": partial(evenly_method, every=NEVER),
    "global DDP": peers.global_ddp,
    "DDP, fp16 hook": peers.ddp_fp16,
    "post_localSGD": peers.post_local_sgd,
    "accelerate LocalSGD": peers.accelerate_local_sgd,
    "DiLoCo by hand": peers.diloco,
    "fairscale SlowMo": peers.slowmo,
    "evenly, fp32 waited for": evenly_method,
    "evenly, fp32": partial(evenly_method, overlap=3),
    "evenly, bf16": partial(evenly_method, overlap=3, codec="bf16"),
    "evenly, int8": partial(evenly_method, overlap=3, codec="int8"),
    "evenly, int4": partial(evenly_method, overlap=3, codec="int4"),
    "evenly, int8, 2 fragments": partial(evenly_method, overlap=3, codec="int8", fragments=2),
    "evenly, int8, Nesterov": partial(evenly_method, overlap=3, codec="int8", outer="nesterov"),
}
SLOW = ("global DDP", "DDP, fp16 hook")  # one period a round is enough for these
PACKAGES = {"accelerate LocalSGD": "accelerate", "fairscale SlowMo": "fairscale", "hivemind": "hivemind"}


def methods_of(method_set: MethodSet, batch_size: int) -> dict[str, MethodFactory]:
    """Returns the methods of a set whose packages are installed, by name."""
    method_sets: dict[MethodSet, dict[str, MethodFactory]] = {
        "short": SHORT,
        "full": FULL,
        "apart": {
            "no exchange": FULL["no exchange"],
            "evenly, fp32": FULL["evenly, fp32"],
            "hivemind": partial(peers.hivemind_local, batch_size=batch_size),
        },
        "pace": {"no exchange": FULL["no exchange"]},
    }
    return {
        name: factory
        for name, factory in method_sets[method_set].items()
        if name not in PACKAGES or importlib.util.find_spec(PACKAGES[name])
    }


def package_versions() -> str:
    """Returns the versions of torch and of the peers' packages that are installed."""
    packages = ["torch", *sorted(set(PACKAGES.values()))]
    installed = [package for package in packages if importlib.util.find_spec(package)]
    return ", ".join(f"{package} {importlib.metadata.version(package)}" for package in installed)
