"""What the blocks of random networks are made of: lines of forward code with a name, activations, residual forms."""

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

Draw = random.Random
Shape = tuple[int, ...]  # of one sample: (channels, *spatial), (tokens, channels) or (channels,)


class Do(nn.Module):
    """A few lines of forward code with its modules and parameters; `text` says which in a failure."""

    def __init__(self, text: str, act: Callable[..., Any], *parts: nn.Module, **tensors: Tensor) -> None:
        super().__init__()
        self.text, self.act = text, act
        self.parts = nn.ModuleList(parts)
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                self.register_parameter(name, nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)

    def forward(self, *args: Any) -> Any:
        return self.act(self, *args)

    def extra_repr(self) -> str:
        return self.text


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


PLAIN: list[Callable[[], nn.Module]] = [
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.ELU, nn.CELU, nn.SELU, nn.LeakyReLU, nn.Hardswish,
    nn.Hardsigmoid, nn.Hardtanh, nn.Softplus, nn.Mish, nn.LogSigmoid, nn.Softsign, nn.Tanhshrink, nn.Identity,
    lambda: nn.ReLU(inplace=True), lambda: nn.SiLU(inplace=True), lambda: nn.LeakyReLU(0.3, inplace=True),
]  # fmt: skip


def in_place(_: nn.Module, x: Tensor) -> Tensor:
    x = x * 0.5
    y = x
    x += 1
    return x * y


def activation(draw: Draw, shape: Shape) -> nn.Module:
    """Returns an activation of [batch, channels, ...]; some look along a dim."""
    if shape[0] % 2 == 0 and draw.random() < 0.1:
        return nn.GLU(1)
    if draw.random() < 0.15:
        return draw.choice([nn.Softmax, nn.LogSoftmax])(draw.choice([1, -1, len(shape)]))
    if draw.random() < 0.2:
        return nn.PReLU(draw.choice([1, shape[0]]))
    if draw.random() < 0.2:
        calls = [
            ("x.relu_()", lambda _, x: (x * 1).relu_()),
            ("F.relu(x, inplace=True)", lambda _, x: F.relu(x.clone(), inplace=True)),
            ("x *= 0.5; x += 1", in_place),
            ("torch.clamp(x, -1, 1)", lambda _, x: torch.clamp(x, -1, 1)),
            ("x.abs() ** 2 / 3 - 1", lambda _, x: x.abs() ** 2 / 3 - 1),
            ("torch.where(x > 0, x, 0.1 * x)", lambda _, x: torch.where(x > 0, x, 0.1 * x)),
            ("x.masked_fill(x < 0, 0.5)", lambda _, x: x.masked_fill(x < 0, 0.5)),
            ("torch.maximum(x, -x * 0.2)", lambda _, x: torch.maximum(x, -x * 0.2)),
            ("1 - x", lambda _, x: 1 - x),
        ]
        return Do(*draw.choice(calls))
    return draw.choice(PLAIN)()


def joined(draw: Draw, shape: Shape, branch: nn.Module) -> nn.Module:
    """Returns a residual block in one of the ways people write it."""
    gamma = torch.randn(shape[0], *[1] * (len(shape) - 1))

    def added_in_place(self: Do, x: Tensor) -> Tensor:
        y = self.parts[0](x)
        y += x
        return F.relu(y, inplace=True)

    ways: list[tuple[str, Callable[..., Any], dict[str, Tensor]]] = [
        ("x + f(x)", lambda self, x: x + self.parts[0](x), {}),
        ("f(x) - x", lambda self, x: self.parts[0](x) - x, {}),
        ("y = f(x); y += x; relu_(y)", added_in_place, {}),
        ("x + gamma * f(x)", lambda self, x: x + self.gamma * self.parts[0](x), {"gamma": gamma}),
        ("f(f(x))", lambda self, x: self.parts[0](self.parts[0](x)), {}),
        ("x * sigmoid(f(x))", lambda self, x: x * torch.sigmoid(self.parts[0](x)), {}),
        ("torch.add(x, f(x), alpha=2)", lambda self, x: torch.add(x, self.parts[0](x), alpha=2), {}),
    ]
    text, act, tensors = draw.choice(ways)
    return Do(text, act, branch, **tensors)
