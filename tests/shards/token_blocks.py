"""Blocks of random networks on [batch, tokens, channels] and on [batch, channels]."""

import re
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from tests.shards.parts import PLAIN, Do, Draw, Shape, divisors, joined


def linear(draw: Draw, shape: Shape, outputs: int | None = None) -> nn.Module:
    layer = nn.Linear(shape[-1], outputs or draw.randint(1, 9), bias=draw.random() < 0.7)
    return weight_norm(layer) if draw.random() < 0.1 else layer


def norm(draw: Draw, shape: Shape) -> nn.Module:
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


def activation(draw: Draw, shape: Shape) -> nn.Module:
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
        q, k, v = (part.view(b, n, heads, size).transpose(1, 2) for part in self.parts[0](x).split(heads * size, dim=2))
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


def masked_attention(draw: Draw, shape: Shape) -> nn.Module:
    """Returns attention as it was written before torch had it: a mask cut to the tokens, positions that rotate."""
    heads, size = draw.randint(1, 4), draw.choice([2, 4])
    qkv, out = nn.Linear(shape[-1], 3 * heads * size, bias=False), nn.Linear(heads * size, shape[-1])
    mask, turns = torch.ones(12, 12, dtype=torch.long).tril(), torch.randn(12, size // 2)

    def turned(self: Do, x: Tensor) -> Tensor:  # [b, heads, n, size]
        angles = self.turns[: x.size(2)]
        a, b = x[..., : size // 2], x[..., size // 2 :]
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)

    def act(self: Do, x: Tensor) -> Tensor:
        b, n, _ = x.size()
        q, k, v = (y.view(b, n, heads, size).transpose(1, 2) for y in self.parts[0](x).chunk(3, dim=-1))
        scores = turned(self, q) @ turned(self, k).transpose(-2, -1) / size**0.5
        scores = scores.masked_fill(self.mask[:n, :n] == 0, float("-inf"))
        y = F.softmax(scores, dim=-1) @ v
        return self.parts[1](y.transpose(1, 2).contiguous().view(b, n, -1))

    return Do(f"masked attention, {heads} heads of {size}", act, qkv, out, mask=mask, turns=turns)


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


def branch(draw: Draw, shape: Shape) -> nn.Module:
    hidden = draw.randint(1, 9)
    mlp = nn.Sequential(nn.Linear(shape[-1], hidden), draw.choice(PLAIN)(), nn.Linear(hidden, shape[-1]))
    return nn.Sequential(norm(draw, shape), draw.choice([mlp, fused_attention(draw, shape)]))


def residual(draw: Draw, shape: Shape) -> nn.Module:
    return joined(draw, shape[-1:], branch(draw, shape))


def parts_of_tokens(draw: Draw, shape: Shape) -> nn.Module:
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
        ("two layers with one weight", lambda s, x: s.parts[3](torch.tanh(s.parts[4](x)))),
        ("temperature * x", lambda s, x: s.temperature * x),
        ("x * x.var(-1)", lambda _, x: x * x.var(-1, correction=0, keepdim=True)),
        ("F.embedding(places, positions[0])", lambda s, x: x + F.embedding(s.places[: x.size(1)], s.positions[0])),
        ("x.gather(1, ..)", lambda s, x: x.gather(1, s.places.view(1, -1, 1).expand(x.size(0), -1, x.size(2)))),
        ("x.tril()", lambda _, x: x.tril()),
        ("x.reshape(-1, c)", lambda s, x: s.parts[3](x.reshape(-1, c)).view(x.size(0), -1, c)),
        ("x[..., :k]", lambda _, x: x[..., :first]),
        ("x[:, ::2]", lambda _, x: x[:, ::2]),
        ("x.roll(1, 1)", lambda _, x: x.roll(1, 1)),
        ("x - x.mean(-1, keepdim=True)", lambda _, x: x - x.mean(-1, keepdim=True)),
        ("x.sum(-1, keepdim=True)", lambda _, x: x.sum(-1, keepdim=True)),
    ]
    tensors = {"cls": torch.randn(1, 1, c), "positions": torch.randn(1, n, c), "w": torch.randn(c, first)}
    tensors |= {"b": torch.randn(first), "scale": torch.randn(c), "temperature": torch.tensor(1.5)}
    tensors |= {"places": torch.arange(n)}
    text, act = draw.choice(ways)
    one, two = nn.Linear(c, c), nn.Linear(c, c)
    two.weight = one.weight
    words = {"w", *re.findall(r"\w+", text)} if text == "einsum" else set(re.findall(r"\w+", text))
    words |= {"places"} if "gather" in text else set()
    used = {name: tensor for name, tensor in tensors.items() if name in words}
    return Do(text, act, *layers, tied, one, two, **used)


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


def to_vector(draw: Draw, shape: Shape) -> nn.Module:
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


def to_image(draw: Draw, shape: Shape) -> nn.Module:
    return Do("x.transpose(1, 2)", lambda _, x: x.transpose(1, 2))


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
