"""What users do to a cut network and around it: exact as on one device, or refused with a typed error on all ranks."""

import copy
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from evenly._errors import EvenlyError
from evenly.comm import Party
from evenly.shards import full_state_dict, shard_model
from tests.ranks import RankError, run_ranks

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
SETTINGS = {"scale": 1.0}


class Net(nn.Module):
    """Two layers that are cut, a norm with statistics, a parameter that all ranks hold whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8)
        self.act = nn.ReLU()
        self.second = nn.Linear(8, 4)
        self.gain = nn.Parameter(torch.ones(4))
        self.power = 1.0

    def forward(self, x: Tensor) -> Any:
        h = self.act(self.norm(self.first(x)))
        return self.second(h) * self.gain * self.power * SETTINGS["scale"]


Act = Callable[[nn.Module], Any]


def build(kind: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind().to(dtype)


def learn(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """Returns the output of a step of plain gradient descent."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    output = model(*args, **kwargs) if args or kwargs else model(X.to(next(model.parameters()).dtype))
    loss = sum((y.square().mean() for y in torch.utils._pytree.tree_leaves(output) if isinstance(y, Tensor)), torch.zeros(()))
    loss.backward()
    optimizer.step()
    return output


def twice(act: Act) -> Act:
    """Trains, acts, and trains again."""

    def run(model: nn.Module) -> Any:
        return [learn(model), act(model), learn(model)]

    return run


def verdict(kind: Callable[[], nn.Module], act: Act, example: Any = X, dtype: torch.dtype = torch.float64) -> str:
    """Returns "exact" or "refused"; anything else says what is wrong."""
    try:
        plain = build(kind, dtype)
        truth = _flat(act(plain)), plain.state_dict()
    except Exception as error:
        return f"one device: {type(error).__name__}: {error}"

    given = [build(kind, dtype) for _ in range(2)]  # ranks are threads, which share torch's generator

    def on_rank(party: Party) -> Any:
        model = shard_model(given[party.rank], example, party=party, shares=[3, 1], timeout_s=15.0)
        try:
            found = _flat(act(model))
            return found, full_state_dict(model)["model"]
        finally:
            model.close()

    try:
        results = run_ranks(2, on_rank, limit_s=50.0)
    except RankError as caught:
        errors = caught.errors
        if all(isinstance(error, EvenlyError) for error in errors):
            return "refused"
        return f"{[f'{type(e).__name__}: {str(e)[:300]}' for e in errors]}"
    for outputs, state in results:
        if len(outputs) != len(truth[0]) or list(state) != list(truth[1]):
            return f"other outputs or names: {len(outputs)} {len(truth[0])} {list(state)}"
        for name, one, other in [*zip(range(99), outputs, truth[0]), *((n, state[n], truth[1][n]) for n in state)]:
            if one.shape != other.shape or not torch.allclose(one.double(), other.double(), rtol=1e-9, atol=1e-11):
                return f"wrong without a word: {name}"
    return "exact"


def _flat(result: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(result)
    return [leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor)]


def _set(path: str, value: Any) -> Act:
    def act(model: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, value() if isinstance(value, types.LambdaType) else value)

    return act


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * x


def scripted() -> nn.Module:
    net = Net()
    net.act = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double())
    return net


def normed(how: Callable[..., Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = Net()
        how(net.first)
        return net

    return make


def variant(forward: Callable[..., Any], **extra: Any) -> Callable[[], nn.Module]:
    """Returns what makes a network with another forward."""

    def make() -> nn.Module:
        net = type("Variant", (Net,), {"forward": forward})()
        for name, value in extra.items():
            setattr(net, name, value())
        return net

    return make


def flips(self: Any, x: Tensor) -> Tensor:
    h = self.first(x)
    self.norm.eval()
    h = self.act(self.norm(h))
    self.norm.train()
    return self.second(h)


def counts(self: Any, x: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return Net.forward(self, x) * self.calls


def changes_input(self: Any, x: Tensor) -> Tensor:
    x.mul_(2.0)
    return Net.forward(self, x)


def default_tensor(self: Any, x: Tensor, bias: Tensor = torch.full((8,), 0.3, dtype=torch.float64)) -> Tensor:  # noqa: B008
    return self.second(self.act(self.first(x) + bias))


def stops(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = self.norm(self.first(x))
    return self.second(self.act(h.detach() + self.first(x)))


class Pair(NamedTuple):
    """Two outputs."""

    out: Tensor
    weight: Tensor


GLOBAL_HOOKS: list[Any] = []


def hook_everywhere(model: nn.Module) -> Any:
    handle = nn.modules.module.register_module_forward_hook(lambda module, _, out: out * 1.5 if isinstance(module, nn.ReLU) else None)
    try:
        return learn(model)
    finally:
        handle.remove()


def in_inference(model: nn.Module) -> Any:
    model.eval()
    with torch.inference_mode():
        first = model(X)
    with torch.no_grad():
        second = model(X)
    model.train()
    return first, second


def functionally(model: nn.Module) -> Any:
    own = {name: (p.detach() * 1.1).requires_grad_() for name, p in model.named_parameters()}
    output = torch.func.functional_call(model, own, (X,))
    output.square().mean().backward()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.sub_(own[name].grad, alpha=0.1)
    return output


def patched(model: nn.Module) -> None:
    model.act.forward = types.MethodType(lambda self, x: x.abs(), model.act)


def twice_back(model: nn.Module) -> Any:
    loss = model(X).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad, alpha=0.1)


def inputs_gradient(model: nn.Module) -> Any:
    x = X.clone().requires_grad_()
    model(x * 2.0).square().mean().backward()
    return x.grad


def saved_elsewhere(model: nn.Module) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        return learn(model)


def forward_mode(model: nn.Module) -> Any:
    return torch.func.jvp(model, (X,), (torch.ones_like(X),))


def outside(model: nn.Module) -> Any:
    loss = model(X).square().mean() + 0.1 * model.gain.square().sum()
    loss.backward()
    with torch.no_grad():
        model.gain.sub_(model.gain.grad)
    return loss


def global_setting(model: nn.Module) -> Any:
    first = learn(model)
    SETTINGS["scale"] = 2.0
    try:
        return first, learn(model)
    finally:
        SETTINGS["scale"] = 1.0


def strided(model: nn.Module) -> Any:
    return [learn(model, x) for x in (X.t().contiguous().t(), X[:1].expand(4, 5), X[::2], X[3:4].repeat(2, 1))]


def frozen_norm(model: nn.Module) -> Any:
    model.norm.eval()
    first = learn(model)
    model.norm.train()
    model.norm.momentum = 0.5
    second = learn(model)
    model.norm.eps = 0.1
    return first, second, learn(model)


ATTACKS: dict[str, tuple[Any, ...]] = {
    "plain": (Net, twice(lambda m: None)),
    "forward hook": (Net, twice(lambda m: m.second.register_forward_hook(lambda *a: a[2] * 2) and None)),
    "pre-hook": (Net, twice(lambda m: m.second.register_forward_pre_hook(lambda _, a: (a[0] * 2,)) and None)),
    "backward hook": (Net, twice(lambda m: m.act.register_full_backward_hook(lambda _, i, o: (i[0] * 2,)) and None)),
    "hook on the network": (Net, twice(lambda m: m.register_forward_hook(lambda *a: a[2] * 2) and None)),
    "hook on all modules": (Net, hook_everywhere),
    "parametrized after": (Net, twice(lambda m: parametrize.register_parametrization(m.first, "weight", Double()) and None)),
    "parametrized before": (normed(lambda l: parametrize.register_parametrization(l, "weight", Double())), twice(lambda m: None)),
    "weight norm before": (normed(parametrizations.weight_norm), twice(lambda m: None)),
    "spectral norm before": (normed(parametrizations.spectral_norm), twice(lambda m: None)),
    "old weight norm": (normed(lambda l: l.register_forward_pre_hook(lambda _, a: (a[0] * 2,))), twice(lambda m: None)),
    "float32": (Net, lambda m: [m.double(), learn(m), learn(m)][1:], X.float(), torch.float32),
    "frozen": (Net, twice(lambda m: m.first.requires_grad_(False) and None)),
    "all frozen": (Net, lambda m: [learn(m), m.requires_grad_(False)(X), m.requires_grad_(True)(X)]),
    "module added": (Net, twice(_set("extra", nn.ReLU))),
    "layer added": (Net, twice(_set("extra", lambda: nn.Linear(2, 2).double()))),
    "layer replaced": (Net, twice(_set("second", lambda: nn.Linear(8, 4).double()))),
    "activation replaced": (Net, twice(_set("act", nn.Tanh()))),
    "activation double": (Net, twice(_set("act", Double()))),
    "bias gone": (Net, twice(_set("first.bias", None))),
    "attribute": (Net, twice(_set("power", 0.5))),
    "global": (Net, global_setting),
    "patched": (Net, twice(patched)),
    "init constant": (Net, twice(lambda m: m.apply(lambda l: isinstance(l, nn.Linear) and nn.init.constant_(l.weight, 0.1)) and None)),
    "sync batch norm": (Net, twice(lambda m: nn.SyncBatchNorm.convert_sync_batchnorm(m) and None)),
    "norm": (Net, frozen_norm),
    "norm without statistics": (Net, twice(_set("norm.track_running_stats", False))),
    "flips modes": (variant(flips), twice(lambda m: None)),
    "counts calls": (variant(counts), twice(lambda m: None)),
    "changes the input": (variant(changes_input), lambda m: [learn(m, x := X.clone()), x]),
    "default tensor": (variant(default_tensor), twice(lambda m: None)),
    "stops gradients": (variant(stops), twice(lambda m: None)),
    "returns a weight": (variant(lambda self, x: Pair(Net.forward(self, x), self.first.weight)), twice(lambda m: None)),
    "returns an odd thing": (variant(lambda self, x: {"a": [Net.forward(self, x), None, "text", 3]}), twice(lambda m: None)),
    "scripted child": (scripted, twice(lambda m: None)),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3)), lambda m: learn(m, X)),
    "inference": (Net, twice(in_inference)),
    "functional call": (Net, functionally),
    "functional call after": (Net, twice(functionally)),
    "vmap": (variant(lambda self, x: self.second(self.act(self.first(x)))), lambda m: torch.vmap(m)(torch.stack([X, X * 2]))),
    "forward mode": (variant(lambda self, x: self.second(self.act(self.first(x)))), forward_mode),
    "compiled": (Net, lambda m: learn(torch.compile(m, backend="eager", dynamic=False), X)),
    "checkpointed": (Net, lambda m: learn(m, X) * torch.utils.checkpoint.checkpoint(m, X, use_reentrant=False)),
    "backward twice": (Net, twice_back),
    "gradient of inputs": (Net, inputs_gradient),
    "saved elsewhere": (Net, saved_elsewhere),
    "second gradients": (Net, lambda m: torch.autograd.grad(m(X).sum(), m.gain, create_graph=True)[0].sum().backward()),
    "whole parameter outside": (Net, outside),
    "strides": (Net, strided),
    "keyword": (Net, lambda m: learn(m, x=X)),
    "empty batch": (variant(lambda self, x: self.second(self.act(self.first(x)))), lambda m: [m(X[:0]), learn(m, X)]),
    "buffer put": (Net, twice(lambda m: m.norm.register_buffer("running_mean", torch.zeros(8).double()))),
    "statistics reset": (Net, twice(lambda m: m.norm.reset_running_stats())),
    "norm reset": (Net, twice(lambda m: m.norm.reset_parameters())),
    "other dtype of input": (Net, lambda m: [learn(m), learn(m, X.float().double())]),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_a_cut_network_is_exact_or_refuses(name: str) -> None:
    assert verdict(*ATTACKS[name]) in ("exact", "refused")
