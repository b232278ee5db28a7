"""What users do to a cut network and around it: networks, and what is done with them."""

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils import _pytree as pytree

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


def learn(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """Returns the output of a step of plain gradient descent."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    output = model(*args, **kwargs) if args or kwargs else model(X.to(next(model.parameters()).dtype))
    loss = sum((y.square().mean() for y in pytree.tree_leaves(output) if isinstance(y, Tensor)), torch.zeros(()))
    loss.backward()
    kept = pytree.tree_map_only(Tensor, lambda y: y.detach().clone(), output)  # a parameter may be returned
    optimizer.step()
    return kept


def twice(act: Act) -> Act:
    """Trains, acts, and trains again."""

    def run(model: nn.Module) -> Any:
        return [learn(model), act(model), learn(model)]

    return run


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


def hook_everywhere(model: nn.Module) -> Any:
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, _, out: out * 1.5 if isinstance(module, nn.ReLU) else None
    )
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


class Louder(nn.Linear):
    """Calls itself in its own way."""

    def __call__(self, x: Tensor) -> Tensor:
        return 2.0 * super().__call__(x)


class Raw(nn.Module):
    """Computes its weight where it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.randn(8, 5))

    @property
    def weight(self) -> Tensor:
        return self.raw.tanh()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Hidden(nn.Module):
    """Has its parameters behind __getattr__."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = nn.ParameterDict({"weight": nn.Parameter(torch.randn(8, 5))})

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            return self.tensors["weight"] * 2.0
        return super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def keeps(self: Any, x: Tensor) -> Tensor:
    self.last = self.first(x)
    return self.second(self.act(self.last))


def keeps_loss(self: Any, x: Tensor) -> Tensor:
    h = self.first(x)
    self.aux = h.square().mean()
    return self.second(self.act(h))


def with_aux(model: nn.Module) -> Any:
    loss = model(X).square().mean() + model.aux
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)
    return loss


def hooks_inside(self: Any, x: Tensor) -> Tensor:
    h = self.first(x)
    if h.requires_grad:
        h.register_hook(lambda g: g * 2)
    return self.second(self.act(h))


def class_patched(model: nn.Module) -> Any:
    kind = type(model.act)
    plain = kind.forward
    kind.forward = lambda self, x: plain(self, x) * 3
    try:
        return learn(model)
    finally:
        kind.forward = plain


def view_in_place(self: Any, x: Tensor) -> Tensor:
    h = self.first(x)
    h = h * 1.0
    h[:, :2] += 1.0
    h[h < 0] = 0.1
    h.view(-1)[0] = 0.0
    h[0].zero_()
    return self.second(h)


def unregistered() -> nn.Module:
    net = variant(lambda self, x: self.second(self.layers[0](x)))()
    net.layers = [nn.Linear(5, 8).double()]
    return net


class Square(torch.autograd.Function):
    """A function with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3.0 * ctx.saved_tensors[0] * grad


def first_of(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = Net()
        net.first = kind()
        return net

    return make


def swap(model: nn.Module) -> None:
    model.norm.weight, model.norm.bias = model.norm.bias, model.norm.weight


def counted_mode(model: nn.Module) -> Any:
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        return learn(model)


def through_list(self: Any, xs: Any) -> Tensor:
    return Net.forward(self, xs[0]) + Net.forward(self, xs[1])


def through_dict(self: Any, batch: Any) -> Tensor:
    return Net.forward(self, batch["x"])


def flagged(self: Any, x: Tensor, loud: bool = False, times: int = 1) -> Tensor:
    y = Net.forward(self, x) * times
    return y * 2 if loud else y


def nothing(_: nn.Module) -> None:
    """The network is called as it is."""


def plainly(self: Any, x: Tensor) -> Tensor:
    return self.second(self.act(self.first(x)))


def with_mask(self: Any, x: Tensor) -> Tensor:
    return self.second(self.first(x) * self.mask)


def eight() -> Tensor:
    return torch.ones(8, dtype=torch.float64)


def with_constant(self: Any, x: Tensor) -> Tensor:
    scale = torch.linspace(0, 1, 8).to(x) if float(torch.ones(1)) else x  # a number, which fx cannot follow
    return self.second(self.first(x) * scale)


def summed(self: Any, x: Tensor) -> Tensor:
    return self.second(sum(layer(x) for layer in self.many))


def two_layers() -> nn.Module:
    return nn.ModuleList([nn.Linear(5, 8), nn.Linear(5, 8)])


def add_layer(model: nn.Module) -> None:
    model.many.append(two_layers().double()[0])


def constant_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 0.1)


def double_weight(layer: nn.Module) -> None:
    parametrize.register_parametrization(layer, "weight", Double())


def own_activation() -> nn.Module:
    return type("Own", (nn.ReLU,), {"forward": lambda _, x: x.relu()})()


def without_grad_mode(model: nn.Module) -> Any:
    with torch.set_grad_enabled(False):
        return model(X)


ATTACKS: dict[str, tuple[Any, ...]] = {
    "plain": (Net, twice(nothing)),
    "forward hook": (Net, twice(lambda m: m.second.register_forward_hook(lambda *a: a[2] * 2) and None)),
    "pre-hook": (Net, twice(lambda m: m.second.register_forward_pre_hook(lambda _, a: (a[0] * 2,)) and None)),
    "backward hook": (Net, twice(lambda m: m.act.register_full_backward_hook(lambda _, i, o: (i[0] * 2,)) and None)),
    "hook on the network": (Net, twice(lambda m: m.register_forward_hook(lambda *a: a[2] * 2) and None)),
    "hook on all modules": (Net, hook_everywhere),
    "parametrized after": (Net, twice(lambda m: double_weight(m.first))),
    "parametrized before": (normed(double_weight), twice(nothing)),
    "weight norm before": (normed(parametrizations.weight_norm), twice(nothing)),
    "spectral norm before": (normed(parametrizations.spectral_norm), twice(nothing)),
    "old weight norm": (normed(lambda own: own.register_forward_pre_hook(lambda _, a: (a[0] * 2,))), twice(nothing)),
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
    "init constant": (Net, twice(lambda m: m.apply(constant_weights) and None)),
    "sync batch norm": (Net, twice(lambda m: nn.SyncBatchNorm.convert_sync_batchnorm(m) and None)),
    "norm": (Net, frozen_norm),
    "norm without statistics": (Net, twice(_set("norm.track_running_stats", False))),
    "flips modes": (variant(flips), twice(nothing)),
    "counts calls": (variant(counts), twice(nothing)),
    "changes the input": (variant(changes_input), lambda m: learn(m, X.clone())),
    "default tensor": (variant(default_tensor), twice(nothing)),
    "stops gradients": (variant(stops), twice(nothing)),
    "returns a weight": (variant(lambda self, x: Pair(Net.forward(self, x), self.first.weight)), twice(nothing)),
    "returns an odd thing": (variant(lambda self, x: {"a": [Net.forward(self, x), None, "text", 3]}), twice(nothing)),
    "scripted child": (scripted, twice(nothing)),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3)), lambda m: learn(m, X)),
    "inference": (Net, twice(in_inference)),
    "functional call": (Net, functionally),
    "functional call after": (Net, twice(functionally)),
    "vmap": (variant(plainly), lambda m: torch.vmap(m)(torch.stack([X, X * 2]))),
    "compiled": (Net, lambda m: learn(torch.compile(m, backend="eager", dynamic=False), X)),
    "checkpointed": (Net, lambda m: learn(m, X) * torch.utils.checkpoint.checkpoint(m, X, use_reentrant=False)),
    "backward twice": (Net, twice_back),
    "gradient of inputs": (Net, inputs_gradient),
    "saved elsewhere": (Net, saved_elsewhere),
    "second gradients": (Net, lambda m: torch.autograd.grad(m(X).sum(), m.gain, create_graph=True)[0].sum().backward()),
    "whole parameter outside": (Net, outside),
    "strides": (Net, strided),
    "constant in forward": (variant(with_constant), twice(nothing)),
    "keyword": (Net, lambda m: learn(m, x=X)),
    "empty batch": (variant(plainly), lambda m: [m(X[:0]), learn(m, X)]),
    "buffer put": (Net, twice(lambda m: m.norm.register_buffer("running_mean", torch.zeros(8).double()))),
    "statistics reset": (Net, twice(lambda m: m.norm.reset_running_stats())),
    "norm reset": (Net, twice(lambda m: m.norm.reset_parameters())),
    "own call": (first_of(lambda: Louder(5, 8)), twice(nothing)),
    "property": (first_of(Raw), twice(nothing)),
    "getattr": (first_of(Hidden), twice(nothing)),
    "keeps a tensor": (variant(keeps), lambda m: [learn(m), m.last]),
    "keeps a loss": (variant(keeps_loss), with_aux),
    "hook inside": (variant(hooks_inside), twice(nothing)),
    "class patched": (variant(Net.forward, act=own_activation), twice(class_patched)),
    "views in place": (variant(view_in_place), twice(nothing)),
    "plain tensor changed": (variant(with_mask, mask=eight), twice(lambda m: m.mask.mul_(2.0).sum())),
    "unregistered": (unregistered, twice(nothing)),
    "own gradient": (variant(lambda self, x: self.second(Square.apply(self.first(x)))), twice(nothing)),
    "norm swapped": (Net, twice(swap)),
    "flops counted": (Net, counted_mode),
    "list": (variant(through_list), lambda m: learn(m, [X, X * 2]), ([X, X * 2],)),
    "dict": (variant(through_dict), lambda m: learn(m, {"x": X}), ({"x": X},)),
    "flag": (variant(flagged), lambda m: [learn(m, X), learn(m, X, True)]),
    "number": (variant(flagged), lambda m: [learn(m, X), learn(m, X, times=3)]),
    "flag in the example": (variant(flagged), lambda m: learn(m, x=X, loud=True), {"x": X, "loud": True}),
    "weights tied after": (Net, twice(lambda m: setattr(m.norm, "bias", m.norm.weight))),
    "gain drawn": (Net, twice(lambda m: nn.init.normal_(m.gain, generator=torch.Generator().manual_seed(1)).sum())),
    "full weight set": (Net, twice(lambda m: setattr(m.first.weight, "data", torch.ones(8, 5).double()))),
    "module list": (variant(summed, many=two_layers), twice(add_layer)),
    "grad mode off": (Net, twice(without_grad_mode)),
    "default dtype": (variant(lambda self, x: self.second(self.first(x) + torch.ones(8).to(x))), twice(nothing)),
    "other dtype of input": (Net, lambda m: [learn(m), learn(m, X.float().double())]),
}  # fmt: skip

REFUSED = {
    "forward hook", "pre-hook", "backward hook", "hook on all modules", "parametrized after", "old weight norm",
    "layer added", "layer replaced", "activation double", "bias gone", "patched", "sync batch norm", "flips modes",
    "counts calls", "stops gradients", "scripted child", "lazy", "vmap", "buffer put",
    "keeps a tensor", "keeps a loss", "hook inside", "class patched", "views in place",
    "plain tensor changed", "unregistered", "flops counted", "list", "dict", "flag", "number", "flag in the example",
    "weights tied after", "full weight set", "module list",
}  # fmt: skip
