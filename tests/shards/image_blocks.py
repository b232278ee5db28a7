"""Blocks of random networks on [batch, channels, *spatial], with one, two or three spatial dims."""

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from tests.shards.parts import PLAIN, Do, Draw, Shape, divisors, joined


def of_dims(draw: Draw, shape: Shape, name: str) -> type[nn.Module]:
    """Returns the class for this number of spatial dims: Conv2d for (channels, height, width)."""
    return getattr(nn, f"{name}{len(shape) - 1}d")


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


def depthwise(draw: Draw, shape: Shape, times: int | None = None) -> nn.Module:
    outputs = shape[0] * (times or draw.choice([1, 1, 2]))
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


def norm(draw: Draw, shape: Shape) -> nn.Module:
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


def shuffled(draw: Draw, shape: Shape) -> nn.Module | None:
    """Returns a channel shuffle, or a pixel shuffle."""
    if len(shape) == 3 and shape[0] % 4 == 0 and draw.random() < 0.5:
        return nn.PixelShuffle(2)
    groups = draw.choice(divisors(shape[0]))

    def act(_: nn.Module, x: Tensor) -> Tensor:
        b, c, *rest = x.size()
        return x.view(b, groups, c // groups, *rest).transpose(1, 2).contiguous().view(b, c, *rest)

    return Do(f"channel shuffle of {groups}", act)


def branch(draw: Draw, shape: Shape) -> nn.Module:
    """Returns layers that keep the shape."""
    hidden = draw.randint(1, 9)
    middle = (hidden, *shape[1:])
    first, second = same_conv(draw, shape[0], hidden, shape), same_conv(draw, hidden, shape[0], shape)
    if draw.random() < 0.2:
        first = weight_norm(first, dim=draw.choice([0, 1]))
    parts = [first, norm(draw, middle), draw.choice(PLAIN)(), second]
    if draw.random() < 0.3:
        parts.insert(3, depthwise(draw, middle, 1))
    if draw.random() < 0.5:
        parts.append(norm(draw, shape))
    return nn.Sequential(*parts)


def residual(draw: Draw, shape: Shape) -> nn.Module:
    return joined(draw, shape, branch(draw, shape))


def concatenated(draw: Draw, shape: Shape) -> nn.Module:
    one, two = (same_conv(draw, shape[0], draw.randint(1, 5), shape) for _ in range(2))
    if draw.random() < 0.5:
        return Do("cat([f(x), x, g(x)], 1)", lambda s, x: torch.cat([s.parts[0](x), x, s.parts[1](x)], 1), one, two)
    grow = draw.randint(1, 4)
    first, second = same_conv(draw, shape[0], grow, shape), same_conv(draw, shape[0] + grow, grow, shape)
    last = norm(draw, (shape[0] + 2 * grow, *shape[1:]))

    def dense(self: Do, x: Tensor) -> Tensor:
        features = [x]
        for layer in (self.parts[0], self.parts[1]):
            features.append(F.relu(layer(torch.cat(features, 1))))
        return self.parts[2](torch.cat(features, 1))

    return Do("dense block", dense, first, second, last)


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


def parts_of_channels(draw: Draw, shape: Shape) -> nn.Module | None:
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


def to_vector(draw: Draw, shape: Shape) -> nn.Module:
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


def functional(draw: Draw, shape: Shape) -> nn.Module:
    """Returns forward code of functions, with weights that are computed, and what has no rule."""
    dims = len(shape) - 1
    convolve, pool = getattr(F, f"conv{dims}d"), getattr(F, f"max_pool{dims}d")
    adapt = getattr(F, f"adaptive_avg_pool{dims}d")
    w = torch.randn(draw.randint(1, 5), shape[0], *[1] * dims)

    def most(_: Do, x: Tensor) -> Tensor:
        values, _places = x.max(1, keepdim=True)
        return x - values

    ways: list[tuple[str, Callable[..., Any]]] = [
        ("conv(x, w - w.mean())", lambda s, x: convolve(x, s.w - s.w.mean())),
        ("conv(x, w * gain)", lambda s, x: convolve(x, s.w * s.gain, padding=1)),
        ("pool(F.pad(x))", lambda _, x: pool(F.pad(x, (1, 0), value=0.3), 2)),
        ("x - adapt(x, 1)", lambda _, x: x - adapt(x, 1)),
        ("interpolate(x)", lambda _, x: F.interpolate(x, scale_factor=2, mode="nearest")),
        ("F.normalize(x)", lambda _, x: F.normalize(x, dim=1, eps=1e-3)),
        ("x / (1 + x.norm(dim=1, keepdim=True))", lambda _, x: x / (1 + x.norm(dim=1, keepdim=True))),
        ("x - x.max(1)", most),
        ("x * gain", lambda s, x: x * s.gain),
        ("(x - mean) / (1 + var)", lambda _, x: (x - x.mean(1, True)) / (1 + x.var(1, correction=0, keepdim=True))),
        ("x + w.sum()", lambda s, x: x + s.w.sum()),
        ("logsumexp", lambda _, x: x - x.logsumexp(1, keepdim=True)),
        ("local response", lambda _, x: F.local_response_norm(x, 2)),
        ("x.repeat_interleave(2, dim=1)", lambda _, x: x.repeat_interleave(2, dim=1)),
        ("torch.stack([x, x * gain]).sum(0)", lambda s, x: torch.stack([x, x * s.gain]).sum(0)),
        ("F.dropout(x, 0)", lambda s, x: F.dropout(x, 0.0, s.training)),
        ("x.softmax(1) * x", lambda _, x: x.softmax(1) * x),
        ("x.type_as(x).to(x.dtype)", lambda _, x: x.type_as(x).to(x.dtype) * 2),
    ]
    text, act = draw.choice(ways)
    tensors = {"w": w, "gain": torch.tensor(draw.uniform(0.5, 2))}
    return Do(text, act, **{name: tensor for name, tensor in tensors.items() if re.search(rf"\b{name}\b", text)})


def channels_last(draw: Draw, shape: Shape) -> nn.Module:
    """Returns an MLP on the channels, as ConvNeXt has it."""
    last = len(shape)
    hidden = draw.randint(1, 9)
    there, back = (0, *range(2, last + 1), 1), (0, last, *range(1, last))
    mlp = nn.Sequential(nn.LayerNorm(shape[0]), nn.Linear(shape[0], hidden), nn.GELU(), nn.Linear(hidden, shape[0]))
    gamma = torch.randn(shape[0])

    def act(self: Do, x: Tensor) -> Tensor:
        return x + (self.gamma * self.parts[0](x.permute(*there))).permute(*back)

    return Do("x + (gamma * mlp(x.permute())).permute()", act, mlp, gamma=gamma)


def windows(draw: Draw, shape: Shape) -> nn.Module | None:
    """Returns an MLP over windows of 2 x 2, which become samples."""
    if len(shape) != 3 or shape[1] % 2 or shape[2] % 2:
        return None
    c, h, w = shape
    mix, rows, columns = nn.Linear(4, 4), h // 2, w // 2

    def act(self: Do, x: Tensor) -> Tensor:
        b = x.shape[0]
        y = x.view(b, c, rows, 2, columns, 2).permute(0, 2, 4, 1, 3, 5).reshape(b * rows * columns, c, 4)
        y = self.parts[0](y).view(b, rows, columns, c, 2, 2).permute(0, 3, 1, 4, 2, 5)
        return x + y.reshape(b, c, h, w)

    return Do("windows", act, mix)
