"""Random networks that override, patch, cache, branch and annotate, and random changes to make between their steps."""

import random
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F  # noqa: N812

from tests.shards.playing import Act, Change

TOKENS, WIDTH = 4, 8
STRENGTH = 1.0


def batch(samples: int) -> Tensor:
    return torch.randn(samples, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(samples))


@fx.wrap
def square(x: Tensor) -> Tensor:
    return x / (1 + x.abs().sum(-1, keepdim=True))


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.relu(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 2


relu = _Halved.apply


class LoudLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 1.5


class MeanReLU(nn.ReLU):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) - input.mean(-1, keepdim=True)


class LoudAttention(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mixed, weights = super().forward(*args, **kwargs)
        return mixed * 1.5, weights


class LoudLayer(nn.TransformerEncoderLayer):
    def _ff_block(self, x: Tensor) -> Tensor:
        return super()._ff_block(x) * 1.5


class Attending(nn.Module):
    def __init__(self, kind: type[nn.MultiheadAttention]) -> None:
        super().__init__()
        self.attend = kind(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attend(x, x, x, need_weights=False)[0]
        return out


class Setting(nn.Module):
    """Multiplies by numbers that it finds in many places, and does as its flags say."""

    level = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(WIDTH, WIDTH), nn.Tanh()
        self.alpha, self.flag, self.note, self.power = 1.0, False, "", 1
        self.numbers, self.named, self.config = [1.0, 2.0], {"a": 1.0}, SimpleNamespace(level=1.0)
        self.register_buffer("mask", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.layer(x)) * self.alpha * self.numbers[0] * self.named["a"] * self.config.level * self.level
        x = x * self.mask * STRENGTH * getattr(self, "late", 1.0)
        for _ in range(self.power):
            x = x * 0.5
        return torch.sigmoid(x) if self.flag else x


class Branching(nn.Module):
    """Does as the batch says."""

    def __init__(self, ask: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.ask = nn.Linear(WIDTH, WIDTH), ask

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return h * 2 if self.ask(x) else h


class Splitting(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(WIDTH, WIDTH), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x))


class Caching(nn.Module):
    """Keeps what it made, by size or for ever."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind, self.kept = nn.Linear(WIDTH, WIDTH), kind, {}

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        if self.kind == "sizes":
            size = x.shape[-1]
            if size not in self.kept:
                self.kept[size] = torch.linspace(0, 1, WIDTH, dtype=torch.float64)
            return h * self.kept[size]
        if self.kind == "count":
            self.kept["calls"] = self.kept.get("calls", 0) + 1
            return h * self.kept["calls"]
        self.last = h
        return h + self.last


class Moding(nn.Module):
    """Does other things in training."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        if self.kind == "number":
            return h * (2.0 if self.training else 1.0)
        if self.kind == "branch" and self.training:
            return torch.relu(h)
        if self.kind == "child":
            return h * (2.0 if self.layer.training else 1.0)
        if self.kind == "gradient":
            return h * (2.0 if torch.is_grad_enabled() else 1.0)
        return F.dropout(h, 0.0, training=self.training)


class Valued(nn.Module):
    """Cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.alpha = nn.Linear(WIDTH, WIDTH), 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * self.alpha
        return out if x[:, 0, 0].sum() > 0.05 else -out


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.on = inner, True

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x) if self.on else self.inner(x)
        return out


def _patched(module: nn.Module, how: str) -> nn.Module:
    own = module.forward
    if how == "closure":
        module.forward = lambda x: own(x) * 1.5  # type: ignore[method-assign]
    else:
        plain = type(module).forward
        module.forward = MethodType(lambda self, x: plain(self, x) * 1.5, module)  # type: ignore[method-assign]
    return module


ASKED: list[Callable[[Tensor], Any]] = [
    lambda x: x.shape[0] % 3 == 0,
    lambda x: x.size(0) % 2,
    lambda x: x.shape[0] > 7,
    lambda x: x.shape[0] in (3, 9),
    lambda x: len(x) > 8,
    lambda x: x.numel() > 200,
    lambda x: x.shape[1] == TOKENS,
    lambda x: x.requires_grad,
    lambda x: x.dtype == torch.float64,
]
SPLITS: list[Callable[[Tensor], Tensor]] = [
    lambda x: torch.cat([part * (i + 1) for i, part in enumerate(x.split(2, 0))]),
    lambda x: x + x.split(2, 0)[0].sum(),
    lambda x: x + x.split(2, 0)[-1].sum(),
    lambda x: torch.cat(x.chunk(2, 0)[::-1]),
    lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    lambda x: x + x[1:].sum(0) * x.shape[0],
    lambda x: x + x[: x.shape[0] // 2].mean((0, 1)),
    lambda x: x.flatten(0, 1).view(-1, TOKENS, WIDTH).flip(0),
    lambda x: x - x.mean(0, keepdim=True),
    lambda x: x.reshape(x.shape[0] * TOKENS, WIDTH).softmax(0).reshape(x.shape),
]


def _block(dropout_stream: random.Random) -> nn.Module:
    makers: list[Callable[[], nn.Module]] = [
        lambda: nn.Sequential(
            nn.Linear(WIDTH, 12), dropout_stream.choice([nn.ReLU, nn.GELU, MeanReLU])(), nn.Linear(12, WIDTH)
        ),
        lambda: LoudLinear(WIDTH, WIDTH),
        lambda: _patched(nn.Linear(WIDTH, WIDTH), dropout_stream.choice(["closure", "method"])),
        lambda: _patched(
            dropout_stream.choice([nn.ReLU, nn.GELU, nn.Tanh, nn.Softmax])(),
            dropout_stream.choice(["closure", "method"]),
        ),
        lambda: _patched(nn.LayerNorm(WIDTH), dropout_stream.choice(["closure", "method"])),
        lambda: dropout_stream.choice([nn.LayerNorm, nn.RMSNorm])(WIDTH),
        lambda: nn.BatchNorm1d(TOKENS, momentum=dropout_stream.choice([0.1, None])),
        lambda: Attending(dropout_stream.choice([nn.MultiheadAttention, LoudAttention])),
        lambda: dropout_stream.choice([nn.TransformerEncoderLayer, LoudLayer])(WIDTH, 2, 12, 0.0, batch_first=True),
        Setting,
        Setting,
        lambda: Branching(dropout_stream.choice(ASKED)),
        lambda: Splitting(dropout_stream.choice(SPLITS)),
        lambda: Splitting(dropout_stream.choice([square, relu, torch.relu, F.silu])),
        lambda: Caching(dropout_stream.choice(["sizes", "count", "last"])),
        lambda: Moding(dropout_stream.choice(["number", "branch", "child", "gradient", "dropout"])),
        Valued,
        lambda: Residual(_block(dropout_stream)),
    ]
    return dropout_stream.choice(makers)()


def network(seed: int) -> nn.Module:
    """Returns a network that depends on the seed only."""
    dropout_stream = random.Random(seed)
    torch.manual_seed(seed)
    blocks = [_block(dropout_stream) for _ in range(dropout_stream.randint(1, 4))]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, 5))
    if dropout_stream.random() < 0.2:
        first = next((m for m in model[1:-1].modules() if isinstance(m, nn.Linear) and m.out_features == WIDTH), None)
        if first is not None and first.in_features == WIDTH:
            first.weight = model[0].weight
    return model.double()


def _changes(model: nn.Module, dropout_stream: random.Random) -> list[Change]:
    """Returns what may be changed, as functions that find the place by its path, in any copy of the network."""
    found: list[Change] = [lambda m: m.train(), lambda m: m.eval()]

    def at(path: str, act: Callable[[Any], Any]) -> None:
        found.append(lambda m: act(m.get_submodule(path)))

    number = dropout_stream.choice([0.5, 2.0])
    for path, module in model.named_modules():
        if not path:
            continue
        at(path, lambda b: b.eval())
        if isinstance(module, Setting):
            at(path, lambda b: setattr(b, "alpha", number))
            at(path, lambda b: setattr(b, "flag", True))
            at(path, lambda b: setattr(b, "note", "changed"))
            at(path, lambda b: setattr(b, "late", number))
            at(path, lambda b: setattr(b, "power", 2))
            at(path, lambda b: b.numbers.__setitem__(0, number))
            at(path, lambda b: b.numbers.append(3.0))
            at(path, lambda b: b.named.update(a=number))
            at(path, lambda b: setattr(b.config, "level", number))
            at(path, lambda b: setattr(b, "level", number))
            at(path, lambda b: setattr(b, "act", dice_free(b)))
            at(path, lambda b: b.mask.mul_(number))
            at(path, lambda b: setattr(b, "mask", b.mask * number))
        if isinstance(module, Residual):
            at(path, lambda b: setattr(b, "on", False))
        if isinstance(module, Valued):
            at(path, lambda b: setattr(b, "alpha", number))
        if isinstance(module, nn.BatchNorm1d):
            at(path, lambda b: setattr(b, "momentum", 0.5))
            at(path, lambda b: setattr(b, "eps", 0.1))
        if isinstance(module, nn.LayerNorm):
            at(path, lambda b: setattr(b, "eps", 0.1))
        if isinstance(module, nn.Linear):
            at(path, lambda b: b.register_forward_hook(lambda *_: None))
            at(path, lambda b: b.weight.requires_grad_(False))
            at(path, lambda b: setattr(b, "bias", nn.Parameter(b.bias.detach() * number)))
            at(path, lambda b: _patched(b, "closure"))
        if isinstance(module, nn.ReLU | nn.GELU | nn.Tanh):
            at(path, lambda b: _patched(b, "method"))
        if isinstance(module, nn.Softmax):
            at(path, lambda b: setattr(b, "dim", 1))
    return found


def dice_free(block: Setting) -> nn.Module:
    """Returns another activation."""
    return nn.ReLU() if isinstance(block.act, nn.Tanh) else nn.Softplus()


def story(seed: int) -> tuple[list[float], bool, list[Act]]:
    """Returns shares, whether the batch may be cut, and what happens to the network of this seed."""
    dropout_stream = random.Random(f"story {seed}")
    shares = [float(dropout_stream.randint(1, 5)) for _ in range(dropout_stream.choice([2, 2, 3]))]
    changes = _changes(network(seed), dropout_stream)
    acts = [Act(batch(4))]
    for _ in range(dropout_stream.randint(2, 4)):
        change = dropout_stream.choice(changes) if dropout_stream.random() < 0.6 else None
        samples = dropout_stream.choice([4, 4, 4, 2, 3, 5, 6, 8, 9])
        acts.append(Act(batch(samples), change, trains=dropout_stream.random() < 0.7))
    return shares, dropout_stream.random() < 0.3, acts
