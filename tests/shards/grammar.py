"""Random networks from all layers that people use: one number gives one network, always the same."""

import copy
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils import _pytree as pytree

Draw = random.Random
Shape = tuple[int, ...]  # of one sample: (channels, *spatial), (tokens, channels) or (channels,)
MOST_ELEMENTS = 400  # of one sample
BATCH = 4
NOISE, MOST_AMPLIFIED = 1e-10, 1e3


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


class Sample(NamedTuple):
    model: nn.Module
    example: tuple[Tensor, ...]
    can_be_smaller: bool  # whether it takes a batch smaller than the example's


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def of_dims(draw: Draw, shape: Shape, name: str) -> type[nn.Module]:
    """Returns the class for this number of spatial dims: Conv2d for (channels, height, width)."""
    return getattr(nn, f"{name}{len(shape) - 1}d")


# Images: [batch, channels, *spatial]


def conv(draw: Draw, shape: Shape, outputs: int | None = None) -> nn.Module:
    groups = draw.choice(divisors(shape[0])) if draw.random() < 0.4 else 1
    if outputs is None:
        outputs = groups * draw.randint(1, max(1, 9 // groups))
    groups = groups if outputs % groups == 0 else 1
    kernel, dilation = draw.choice([1, 2, 3, 3]), draw.choice([1, 1, 2])
    stride, padding = draw.choice([1, 1, 2]), draw.choice([0, 1, "same"])
    kernel, stride = (kernel | 1, 1) if padding == "same" else (kernel, stride)
    mode = draw.choice(["zeros", "zeros", "circular", "reflect", "replicate"])
    settings = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "padding_mode": mode}
    return of_dims(draw, shape, "Conv")(shape[0], outputs, kernel, bias=draw.random() < 0.6, **settings)


def depthwise(draw: Draw, shape: Shape) -> nn.Module:
    outputs = shape[0] * draw.choice([1, 1, 2])
    return of_dims(draw, shape, "Conv")(shape[0], outputs, 3, padding=1, groups=shape[0], bias=draw.random() < 0.5)


def transposed(draw: Draw, shape: Shape) -> nn.Module:
    groups = draw.choice(divisors(shape[0])) if draw.random() < 0.4 else 1
    stride = draw.choice([1, 2])
    settings = {"stride": stride, "groups": groups, "bias": draw.random() < 0.5, "dilation": draw.choice([1, 1, 2])}
    settings |= {"padding": draw.choice([0, 1]), "output_padding": draw.choice([0, stride - 1])}
    outputs = groups * draw.randint(1, max(1, 6 // groups))
    return of_dims(draw, shape, "ConvTranspose")(shape[0], outputs, draw.choice([2, 3]), **settings)


def same_conv(draw: Draw, inputs: int, outputs: int, shape: Shape) -> nn.Module:
    return of_dims(draw, shape, "Conv")(inputs, outputs, 3, padding=1, bias=draw.random() < 0.5)


def image_norm(draw: Draw, shape: Shape) -> nn.Module:
    affine = draw.random() < 0.7
    match draw.choice(["batch", "batch", "group", "group", "instance", "layer", "rms"]):
        case "batch":
            momentum = draw.choice([0.1, 0.3, None])
            settings = {"affine": affine, "momentum": momentum, "track_running_stats": draw.random() < 0.8}
            return of_dims(draw, shape, "BatchNorm")(shape[0], **settings)
        case "group":
            return nn.GroupNorm(draw.choice(divisors(shape[0])), shape[0], affine=affine)
        case "instance":
            settings = {"affine": affine, "track_running_stats": draw.random() < 0.4}
            return of_dims(draw, shape, "InstanceNorm")(shape[0], **settings)
        case "layer":
            return nn.LayerNorm(shape[draw.randint(0, len(shape) - 1) :], elementwise_affine=affine)
    return nn.RMSNorm(shape[draw.randint(0, len(shape) - 1) :], elementwise_affine=affine)


def pooled(draw: Draw, shape: Shape) -> nn.Module:
    names = ["MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "LPPool", "ZeroPad", "ReplicationPad"]
    name = draw.choice([*names, "ReflectionPad", "CircularPad", "ConstantPad"])
    kind = of_dims(draw, shape, name)
    if name.startswith("Adaptive"):
        return kind(draw.choice([1, 2, 3]))
    if name == "LPPool":
        return nn.Sequential(nn.Softplus(), kind(2, 2))
    if name == "ConstantPad":
        return kind(1, 0.5)
    if name.endswith("Pad"):
        return kind(1)
    kernel = draw.choice([2, 3])
    return kind(kernel, stride=draw.choice([1, 2]), padding=draw.choice([0, 1]), ceil_mode=draw.random() < 0.5)


def upsampled(draw: Draw, shape: Shape) -> nn.Module:
    smooth = {2: "linear", 3: "bilinear", 4: "trilinear"}[len(shape)]
    mode = draw.choice(["nearest", "nearest-exact", smooth])
    return nn.Upsample(scale_factor=2, mode=mode, align_corners=draw.random() < 0.5 if mode == smooth else None)


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


def shuffled(draw: Draw, shape: Shape) -> nn.Module | None:
    """Returns a channel shuffle, or a pixel shuffle."""
    if len(shape) == 3 and shape[0] % 4 == 0 and draw.random() < 0.5:
        return nn.PixelShuffle(2)
    groups = draw.choice(divisors(shape[0]))

    def act(_: nn.Module, x: Tensor) -> Tensor:
        b, c, *rest = x.size()
        return x.view(b, groups, c // groups, *rest).transpose(1, 2).contiguous().view(b, c, *rest)

    return Do(f"channel shuffle of {groups}", act)


def image_branch(draw: Draw, shape: Shape) -> nn.Module:
    """Returns layers that keep the shape."""
    hidden = draw.randint(1, 9)
    middle = (hidden, *shape[1:])
    first, second = same_conv(draw, shape[0], hidden, shape), same_conv(draw, hidden, shape[0], shape)
    if draw.random() < 0.2:
        first = weight_norm(first, dim=draw.choice([0, 1]))
    parts = [first, image_norm(draw, middle), draw.choice(PLAIN)(), second]
    if draw.random() < 0.3:
        parts.insert(3, depthwise_same(draw, middle))
    if draw.random() < 0.5:
        parts.append(image_norm(draw, shape))
    return nn.Sequential(*parts)


def depthwise_same(draw: Draw, shape: Shape) -> nn.Module:
    return of_dims(draw, shape, "Conv")(shape[0], shape[0], 3, padding=1, groups=shape[0])


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


def image_residual(draw: Draw, shape: Shape) -> nn.Module:
    return joined(draw, shape, image_branch(draw, shape))


def concatenated(draw: Draw, shape: Shape) -> nn.Module:
    one, two = (same_conv(draw, shape[0], draw.randint(1, 5), shape) for _ in range(2))
    if draw.random() < 0.5:
        return Do("cat([f(x), x, g(x)], 1)", lambda s, x: torch.cat([s.parts[0](x), x, s.parts[1](x)], 1), one, two)
    grow = draw.randint(1, 4)
    first, second = same_conv(draw, shape[0], grow, shape), same_conv(draw, shape[0] + grow, grow, shape)
    norm = image_norm(draw, (shape[0] + 2 * grow, *shape[1:]))

    def dense(self: Do, x: Tensor) -> Tensor:
        features = [x]
        for layer in (self.parts[0], self.parts[1]):
            features.append(F.relu(layer(torch.cat(features, 1))))
        return self.parts[2](torch.cat(features, 1))

    return Do("dense block", dense, first, second, norm)


def squeeze_excite(draw: Draw, shape: Shape) -> nn.Module:
    hidden = draw.randint(1, 5)
    if draw.random() < 0.5:
        first, second = (of_dims(draw, shape, "Conv")(a, b, 1) for a, b in ((shape[0], hidden), (hidden, shape[0])))
        pool = of_dims(draw, shape, "AdaptiveAvgPool")(1)
        parts = nn.Sequential(pool, first, nn.SiLU(), second, nn.Sigmoid())
        return Do("x * scale(x)", lambda self, x: x * self.parts[0](x), parts)

    def act(self: Do, x: Tensor) -> Tensor:
        b, c = x.shape[:2]
        scale = self.parts[0](x.flatten(2).mean(-1)).view(b, c, *[1] * (x.ndim - 2))
        return x * scale.expand_as(x)

    return Do(
        "x * scale(x).expand_as(x)",
        act,
        nn.Sequential(nn.Linear(shape[0], hidden), nn.ReLU(), nn.Linear(hidden, shape[0]), nn.Sigmoid()),
    )


def image_parts(draw: Draw, shape: Shape) -> nn.Module | None:
    """Returns forward code that takes the channels apart."""
    if shape[0] < 2:
        return None
    first = draw.randint(1, shape[0] - 1)
    f = same_conv(draw, first, draw.randint(1, 4), shape)

    def split(self: Do, x: Tensor) -> Tensor:
        a, b = torch.split(x, [first, x.size(1) - first], dim=1)
        return torch.cat((b, self.parts[0](a)), dim=1)

    def chunk(_: Do, x: Tensor) -> Tensor:
        parts = x.chunk(2, 1)
        return torch.cat([parts[1], parts[0] * 2], 1)

    stop = draw.randint(first, shape[0])
    ways = [
        ("a, b = split(x); cat(b, f(a))", split),
        ("a, b = chunk(x); cat(b, 2 a)", chunk),
        (f"f(x.narrow(1, 0, {first}))", lambda self, x: self.parts[0](x.narrow(1, 0, first))),
        (f"f(x[:, :{first}])", lambda self, x: self.parts[0](x[:, :first])),
        (f"x[:, {first - 1}:{stop}]", lambda _, x: x[:, first - 1 : stop]),
        ("x - x.mean(1, keepdim=True)", lambda _, x: x - x.mean(1, keepdim=True)),
        ("x.sum(1, keepdim=True)", lambda _, x: x.sum(1, keepdim=True)),
        ("x * x.amax(1, keepdim=True)", lambda _, x: x * x.amax(1, keepdim=True)),
        ("x / (1 + x.abs().mean())", lambda _, x: x / (1 + x.abs().mean())),
        ("x + x[:, [0]]", lambda _, x: x + x[:, [0]]),
        ("x.flip(1)", lambda _, x: x.flip(1)),
        ("stack((x, -x), 1).flatten(1, 2)", lambda _, x: torch.stack((x, -x), 1).flatten(1, 2)),
        ("x[:, -1:] + x", lambda _, x: x[:, -1:] + x),
    ]
    return Do(*draw.choice(ways), f)


def frozen(draw: Draw, shape: Shape) -> nn.Module:
    layer = conv(draw, shape)
    return layer.requires_grad_(False)


def to_tokens(draw: Draw, shape: Shape) -> nn.Module:
    if draw.random() < 0.5:
        return Do("x.flatten(2).transpose(1, 2)", lambda _, x: x.flatten(2).transpose(1, 2))
    last = len(shape)
    order = (0, *range(2, last + 1), 1)
    return Do("x.permute(0, 2, .., 1).flatten(1, -2)", lambda _, x: x.permute(*order).flatten(1, -2))


def image_to_vector(draw: Draw, shape: Shape) -> nn.Module:
    dims = tuple(range(2, len(shape) + 1))
    ways = [
        ("x.mean(spatial)", lambda _, x: x.mean(dims)),
        ("x.sum(spatial)", lambda _, x: x.sum(dim=dims)),
        ("x.amax(spatial)", lambda _, x: x.amax(dims)),
        ("torch.flatten(x, 1)", lambda _, x: torch.flatten(x, 1)),
        ("x.reshape(len(x), -1)", lambda _, x: x.reshape(x.shape[0], -1)),
        ("x.view(x.size(0), -1)", lambda _, x: x.contiguous().view(x.size(0), -1)),
        ("x.mean(1).flatten(1)", lambda _, x: x.mean(1).flatten(1)),
    ]
    flat = nn.Sequential(of_dims(draw, shape, "AdaptiveAvgPool")(2), nn.Flatten())
    return flat if draw.random() < 0.3 else Do(*draw.choice(ways))


# Tokens: [batch, tokens, channels]


def linear(draw: Draw, shape: Shape, outputs: int | None = None) -> nn.Module:
    layer = nn.Linear(shape[-1], outputs or draw.randint(1, 9), bias=draw.random() < 0.7)
    return weight_norm(layer) if draw.random() < 0.1 else layer


def token_norm(draw: Draw, shape: Shape) -> nn.Module:
    affine = draw.random() < 0.7
    match draw.choice(["layer", "rms", "batch", "group"]):
        case "layer":
            settings = {"elementwise_affine": affine, "bias": draw.random() < 0.7}
            return nn.LayerNorm(shape[draw.randint(0, len(shape) - 1) :], **settings)
        case "rms":
            return nn.RMSNorm(shape[-1], eps=draw.choice([None, 1e-3]), elementwise_affine=affine)
        case "batch":
            act = lambda self, x: self.parts[0](x.transpose(1, 2)).transpose(1, 2)  # noqa: E731
            return Do("norm(x.transpose(1, 2)).transpose(1, 2)", act, nn.BatchNorm1d(shape[-1], affine=affine))
    act = lambda self, x: self.parts[0](x.mT).mT  # noqa: E731
    return Do("norm(x.mT).mT", act, nn.GroupNorm(draw.choice(divisors(shape[-1])), shape[-1], affine=affine))


def token_activation(draw: Draw, shape: Shape) -> nn.Module:
    if shape[-1] % 2 == 0 and draw.random() < 0.2:
        ways = [
            ("glu", lambda _, x: F.glu(x, -1)),
            ("a * silu(b)", lambda _, x: x.chunk(2, dim=-1)[0] * F.silu(x.chunk(2, dim=-1)[1])),
        ]
        return Do(*draw.choice(ways))
    if draw.random() < 0.2:
        return nn.Softmax(draw.choice([1, 2, -1]))
    if draw.random() < 0.1:
        return Do("x.cumsum(1)", lambda _, x: x.cumsum(1) / x.shape[1])
    return draw.choice(PLAIN)()


def heads_of(draw: Draw) -> tuple[int, int, int]:
    """Returns heads, heads of keys and values, and the size of a head."""
    keys = draw.randint(1, 4)
    return keys * draw.choice([1, 1, 2, 3]), keys, draw.choice([1, 2, 3])


def fused_attention(draw: Draw, shape: Shape) -> nn.Module:
    heads, _, size = heads_of(draw)
    qkv, out = nn.Linear(shape[-1], 3 * heads * size), nn.Linear(heads * size, shape[-1])
    causal, by_hand = draw.random() < 0.5, draw.random() < 0.3

    def permuted(self: Do, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.parts[0](x).reshape(b, n, 3, heads, size).permute(2, 0, 3, 1, 4).unbind(0)
        if by_hand:
            scores = (q @ k.transpose(-2, -1)) * size**-0.5
            y = scores.softmax(dim=-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.parts[1](y.transpose(1, 2).reshape(b, n, heads * size))

    def chunked(self: Do, x: Tensor) -> Tensor:
        b, n, _ = x.size()
        q, k, v = (
            part.view(b, n, heads, size).transpose(1, 2) for part in self.parts[0](x).split(heads * size, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.parts[1](y.transpose(1, 2).contiguous().view(b, n, heads * size))

    return Do(f"attention, {heads} heads of {size}", draw.choice([permuted, chunked]), qkv, out)


def grouped_attention(draw: Draw, shape: Shape) -> nn.Module:
    heads, keys, size = heads_of(draw)
    q, k, v = (nn.Linear(shape[-1], count * size, bias=draw.random() < 0.5) for count in (heads, keys, keys))
    out, repeated = nn.Linear(heads * size, shape[-1]), draw.random() < 0.4
    mask = torch.tensor([[i >= j or (i + j) % 3 == 0 for j in range(shape[0])] for i in range(shape[0])])

    def act(self: Do, x: Tensor) -> Tensor:
        b, n = x.shape[:2]
        q, k, v = (self.parts[i](x).view(b, n, -1, size).transpose(1, 2) for i in range(3))
        if repeated:
            k, v = (y.repeat_interleave(heads // keys, dim=1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=not repeated)
        return self.parts[3](y.transpose(1, 2).flatten(2))

    return Do(f"attention, {heads} heads over {keys} of {size}", act, q, k, v, out, mask=mask)


def module_attention(draw: Draw, shape: Shape) -> nn.Module | None:
    heads = draw.choice(divisors(shape[-1]))
    first, asks, average = draw.random() < 0.5, draw.random() < 0.5, draw.random() < 0.5
    attention = nn.MultiheadAttention(shape[-1], heads, batch_first=first, bias=draw.random() < 0.6)
    kind = draw.choice(["none", "bool", "float", "padding"])
    n = shape[0]
    mask = torch.tensor([[i < j for j in range(n)] for i in range(n)])
    if kind == "float":
        mask = torch.randn(n, n)

    def act(self: Do, x: Tensor) -> Tensor:
        settings = {"attn_mask": self.mask} if kind in ("bool", "float") else {}
        if kind == "padding":
            settings["key_padding_mask"] = self.mask[0].unsqueeze(0).expand(x.shape[0], -1)
        y = x if first else x.transpose(0, 1)
        z, weights = self.parts[0](y, y, y, need_weights=asks, average_attn_weights=average, **settings)
        z = z if first else z.transpose(0, 1)
        return z + weights.mean() if asks else z

    return Do(f"{heads} heads, mask {kind}, weights {asks}", act, attention, mask=mask)


def cross_attention(draw: Draw, shape: Shape) -> nn.Module:
    heads, other = draw.choice(divisors(shape[-1])), draw.randint(1, 6)
    attention = nn.MultiheadAttention(shape[-1], heads, kdim=other, vdim=other, batch_first=True)

    def act(self: Do, x: Tensor) -> Tensor:
        memory = self.memory.expand(x.size(0), -1, -1)
        return x + self.parts[0](x, memory, memory, need_weights=False)[0]

    return Do(f"{heads} heads over a learned memory", act, attention, memory=torch.randn(1, 3, other))


def encoder_layer(draw: Draw, shape: Shape) -> nn.Module:
    settings: dict[str, Any] = {"norm_first": draw.random() < 0.5, "activation": draw.choice(["relu", "gelu"])}
    first = draw.random() < 0.7
    heads = draw.choice(divisors(shape[-1]))
    layer = nn.TransformerEncoderLayer(shape[-1], heads, draw.randint(1, 9), 0.0, batch_first=first, **settings)
    if draw.random() < 0.3:
        layer = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(shape[-1]), enable_nested_tensor=False)
    if first:
        return layer
    return Do("f(x.transpose(0, 1)).transpose(0, 1)", lambda s, x: s.parts[0](x.transpose(0, 1)).transpose(0, 1), layer)


def token_branch(draw: Draw, shape: Shape) -> nn.Module:
    hidden = draw.randint(1, 9)
    mlp = nn.Sequential(nn.Linear(shape[-1], hidden), draw.choice(PLAIN)(), nn.Linear(hidden, shape[-1]))
    return nn.Sequential(token_norm(draw, shape), draw.choice([mlp, fused_attention(draw, shape)]))


def token_residual(draw: Draw, shape: Shape) -> nn.Module:
    residual = joined(draw, shape[-1:], token_branch(draw, shape))
    return residual


def token_parts(draw: Draw, shape: Shape) -> nn.Module:
    """Returns forward code with parameters of its own, or that mixes tokens."""
    n, c = shape
    layers = (nn.Linear(n, draw.randint(1, 6)), nn.Conv1d(c, draw.randint(1, 6), 3, padding=1))
    first = draw.randint(1, c)
    tied = nn.Linear(c, draw.randint(1, 6), bias=False)
    ways = [
        ("cat([cls, x], 1)", lambda s, x: torch.cat([s.cls.expand(x.shape[0], -1, -1), x], dim=1)),
        ("x + positions", lambda s, x: x + s.positions[:, : x.size(1)]),
        ("x + positions[0]", lambda s, x: x + s.positions[0]),
        ("x @ w", lambda s, x: x @ s.w),
        ("torch.matmul(x, w) + b", lambda s, x: torch.matmul(x, s.w) + s.b),
        ("x * scale", lambda s, x: x * s.scale),
        ("f(x.transpose(1, 2)).transpose(1, 2)", lambda s, x: s.parts[0](x.transpose(1, 2)).transpose(1, 2)),
        ("conv(x.transpose(1, 2)).transpose(1, 2)", lambda s, x: s.parts[1](x.transpose(1, 2)).transpose(1, 2)),
        ("x @ x.mT @ x", lambda _, x: (x @ x.transpose(1, 2) / x.shape[1]) @ x),
        ("einsum", lambda s, x: torch.einsum("btc,cd->btd", x, s.w)),
        ("tied up and down", lambda s, x: F.linear(torch.tanh(s.parts[2](x)), s.parts[2].weight.t())),
        ("x[..., :k]", lambda _, x: x[..., :first]),
        ("x[:, ::2]", lambda _, x: x[:, ::2]),
        ("x.roll(1, 1)", lambda _, x: x.roll(1, 1)),
        ("x - x.mean(-1, keepdim=True)", lambda _, x: x - x.mean(-1, keepdim=True)),
        ("x.sum(-1, keepdim=True)", lambda _, x: x.sum(-1, keepdim=True)),
    ]
    tensors = {"cls": torch.randn(1, 1, c), "positions": torch.randn(1, n, c), "w": torch.randn(c, first)}
    tensors |= {"b": torch.randn(first), "scale": torch.randn(c)}
    text, act = draw.choice(ways)
    used = {name: tensor for name, tensor in tensors.items() if name in text or (text == "einsum" and name == "w")}
    return Do(text, act, *layers, tied, **used)


def recurrent(draw: Draw, shape: Shape) -> nn.Module:
    kind = draw.choice([nn.LSTM, nn.GRU, nn.RNN])
    layer = kind(shape[-1], draw.randint(1, 5), batch_first=True, bidirectional=draw.random() < 0.3)
    if draw.random() < 0.5:
        return Do("rnn(x)[0]", lambda self, x: self.parts[0](x)[0], layer)

    def last(self: Do, x: Tensor) -> Tensor:
        y, state = self.parts[0](x)
        hidden = state[0] if kind is nn.LSTM else state
        return y + hidden[-1].mean()

    return Do("rnn(x) + its last state", last, layer)


def tokens_to_vector(draw: Draw, shape: Shape) -> nn.Module:
    ways = [
        ("x.mean(1)", lambda _, x: x.mean(dim=1)),
        ("x[:, 0]", lambda _, x: x[:, 0]),
        ("x.select(1, -1)", lambda _, x: x.select(1, x.size(1) - 1)),
        ("x.flatten(1)", lambda _, x: x.flatten(1)),
        ("x.amax(1)", lambda _, x: x.amax(1)),
        ("x.sum(-1)", lambda _, x: x.sum(-1)),
        ("x.unbind(1)[0] + x.unbind(1)[-1]", lambda _, x: x.unbind(1)[0] + x.unbind(1)[-1]),
    ]
    return Do(*draw.choice(ways))


def tokens_to_image(draw: Draw, shape: Shape) -> nn.Module:
    return Do("x.transpose(1, 2)", lambda _, x: x.transpose(1, 2))


# Vectors: [batch, channels]


def vector_norm(draw: Draw, shape: Shape) -> nn.Module:
    kinds = [nn.BatchNorm1d(shape[0]), nn.BatchNorm1d(shape[0], affine=False), nn.LayerNorm(shape[0])]
    return draw.choice([*kinds, nn.RMSNorm(shape[0]), nn.GroupNorm(draw.choice(divisors(shape[0])), shape[0])])


def vector_residual(draw: Draw, shape: Shape) -> nn.Module:
    hidden = draw.randint(1, 9)
    mlp = nn.Sequential(nn.Linear(shape[0], hidden), draw.choice(PLAIN)(), nn.Linear(hidden, shape[0]))
    return joined(draw, shape, mlp)


def vector_to_tokens(draw: Draw, shape: Shape) -> nn.Module:
    n = draw.choice(divisors(shape[0]))
    ways = [
        ("x.view(b, n, -1)", lambda _, x: x.view(x.shape[0], n, -1)),
        ("x.unflatten(1, (-1, n))", lambda _, x: x.unflatten(1, (-1, n))),
        ("x.reshape(-1, c / n, n).mT", lambda _, x: x.reshape(-1, shape[0] // n, n).mT),
        ("x[:, None, :] * x[:, :, None]", lambda _, x: x[:, None, :] * x[:, :, None]),
        ("x.unsqueeze(1).expand(-1, n, -1)", lambda _, x: x.unsqueeze(1).expand(-1, n, -1)),
    ]
    return Do(*draw.choice(ways))


BLOCKS: dict[str, list[tuple[Callable[[Draw, Shape], nn.Module | None], str]]] = {
    "image": [
        *[(conv, "image")] * 5,
        *[(image_norm, "image")] * 3,
        *[(activation, "image")] * 3,
        *[(image_residual, "image")] * 3,
        *[(image_parts, "image")] * 2,
        *[(block, "image") for block in (depthwise, transposed, pooled, upsampled, shuffled)],
        *[(block, "image") for block in (concatenated, squeeze_excite, frozen)],
        (to_tokens, "tokens"),
        (image_to_vector, "vector"),
    ],
    "tokens": [
        *[(linear, "tokens")] * 3,
        *[(token_norm, "tokens")] * 2,
        *[(token_activation, "tokens")] * 2,
        *[(token_residual, "tokens")] * 3,
        *[(token_parts, "tokens")] * 3,
        *[(block, "tokens") for block in (fused_attention, grouped_attention, module_attention, cross_attention)],
        *[(block, "tokens") for block in (encoder_layer, recurrent)],
        (tokens_to_vector, "vector"),
        (tokens_to_image, "image"),
    ],
    "vector": [
        *[(linear, "vector")] * 3,
        *[(vector_norm, "vector")] * 2,
        *[(activation, "vector")] * 2,
        *[(vector_residual, "vector")] * 2,
        *[(vector_to_tokens, "tokens")] * 2,
    ],
}


class Body(nn.Module):
    """Blocks one after the other, and sometimes more outputs than one."""

    def __init__(self, blocks: list[nn.Module], style: str) -> None:
        super().__init__()
        self.blocks, self.style = nn.Sequential(*blocks), style

    def forward(self, x: Tensor) -> Any:
        middle = x
        for number, block in enumerate(self.blocks):
            x = block(x)
            middle = x if number == 0 else middle
        return {"one": x, "pair": (x, middle), "named": {"out": x, "middle": middle}}[self.style]


class Tied(nn.Module):
    """An embedding, blocks, and a head with the embedding's weight; the loss inside where targets are given."""

    def __init__(self, embedding: nn.Embedding, blocks: list[nn.Module], loss: dict[str, Any]) -> None:
        super().__init__()
        self.embedding, self.blocks, self.loss = embedding, nn.Sequential(*blocks), loss

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        logits = F.linear(self.blocks(self.embedding(ids)), self.embedding.weight)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **self.loss)


def sample(seed: int, blocks: int) -> Sample:
    """Returns the network of this number: float64, with parameters of which no two are alike."""
    for attempt in range(100):
        draw = random.Random(f"{seed} {attempt}")
        torch.manual_seed(draw.randrange(2**31))
        model, example = _on_ids(draw, blocks) if draw.random() < 0.3 else _on_floats(draw, blocks)
        model = _unlike(model.double(), draw)
        if _is_steady(model, example):
            return Sample(model, example, _is_steady(model, tuple(x[:-1] for x in example)))
    raise AssertionError(f"no network of {blocks} blocks for {seed} can be trained")


def _on_floats(draw: Draw, blocks: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    kind = draw.choice(["image", "image", "image", "tokens", "tokens", "vector"])
    spatial = draw.choice([(5,), (7,), (4, 5), (6, 3), (5, 5), (2, 3, 4), (3, 3, 2)])
    shapes = {"image": (draw.randint(1, 8), *spatial), "tokens": (draw.randint(2, 5), draw.randint(1, 8))}
    shape = shapes.get(kind, (draw.randint(1, 12),))
    model = Body(_grown(draw, kind, shape, blocks)[0], draw.choice(["one", "one", "pair", "named"]))
    return model, (torch.randn(BATCH, *shape, dtype=torch.float64),)


def _on_ids(draw: Draw, blocks: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    vocabulary, n, c = draw.randint(2, 11), draw.randint(2, 5), draw.randint(2, 8)
    embedding = nn.Embedding(vocabulary, c, padding_idx=draw.choice([None, 0, vocabulary - 1]))
    ids = torch.randint(vocabulary, (BATCH, n))
    grown, shape, kind = _grown(draw, "tokens", (n, c), blocks)
    if draw.random() < 0.4:
        return Body([embedding, *grown], "one"), (ids,)
    if kind != "tokens" or shape[0] != n:
        grown, shape = [], (n, c)
    if shape[-1] != c:
        grown.append(nn.Linear(shape[-1], c))
    loss = {"reduction": draw.choice(["mean", "sum", "none"]), "ignore_index": draw.choice([-100, 1])}
    targets = torch.randint(vocabulary, (BATCH, n))
    return Tied(embedding, grown, loss), (ids, targets)[: draw.choice([1, 2, 2])]


def _grown(draw: Draw, kind: str, shape: Shape, blocks: int) -> tuple[list[nn.Module], Shape, str]:
    """Returns blocks one after another that fit the shape, the shape they give, and its kind."""
    grown: list[nn.Module] = []
    for _ in range(20 * blocks):
        if len(grown) == blocks:
            break
        make, next_kind = draw.choice(BLOCKS[kind])
        try:
            block = make(draw, shape)
            made = None if block is None else _shape_after(block, shape)
        except (RuntimeError, ValueError, AttributeError):  # it does not fit this shape
            continue
        if block is not None and made is not None:
            grown.append(block)
            shape, kind = made, next_kind
    return grown, shape, kind


def _shape_after(block: nn.Module, shape: Shape) -> Shape | None:
    with torch.no_grad():
        out = block(torch.randn(2, *shape))
    made = tuple(out.shape[1:])
    is_fine = out.shape[0] == 2 and made and 0 < torch.Size(made).numel() <= MOST_ELEMENTS
    return made if is_fine else None


def _unlike(model: nn.Module, draw: Draw) -> nn.Module:
    """Gives norms and biases values that differ, and freezes some parameters."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
            if draw.random() < 0.04:
                parameter.requires_grad_(False)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(std=0.2)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
    return model


def _is_steady(model: nn.Module, example: tuple[Tensor, ...]) -> bool:
    """Whether tiny changes of its numbers change outputs and gradients little: only then can two ways be compared."""
    near = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in near.parameters():
            parameter.mul_(1 + NOISE * torch.randn_like(parameter))
    moved = tuple(x * (1 + NOISE * torch.randn_like(x)) if x.is_floating_point() else x.clone() for x in example)
    try:
        ours, theirs = _felt(copy.deepcopy(model), example), _felt(near, moved)
    except (RuntimeError, ValueError):  # it cannot be trained, with or without shards
        return False
    return all(_near(a, b) for a, b in zip(ours, theirs, strict=True))


def _felt(model: nn.Module, example: tuple[Tensor, ...]) -> list[Tensor]:
    """Returns outputs, then one vector of gradients."""
    outputs = [x for x in pytree.tree_leaves(model(*(x.clone() for x in example))) if x.is_floating_point()]
    loss = sum(((x * torch.arange(x.numel()).cos().view(x.shape)).sum() for x in outputs), torch.zeros(()))
    if not loss.requires_grad:
        return outputs
    loss.backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return [*(x.detach() for x in outputs), torch.cat(gradients)]


def _near(a: Tensor, b: Tensor) -> bool:
    return bool(a.isfinite().all()) and float((a - b).abs().max()) <= MOST_AMPLIFIED * NOISE * float(a.abs().max())
