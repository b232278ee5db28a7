"""Random networks from all layers that people use: one number gives one network, always the same."""

import copy
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.shards import image_blocks as image
from tests.shards import token_blocks as tokens
from tests.shards.parts import Draw, Shape, activation

MOST_ELEMENTS = 400  # of one sample
BATCH = 4
NOISE, MOST_AMPLIFIED = 1e-10, 300


class Sample(NamedTuple):
    model: nn.Module
    example: tuple[Tensor, ...]
    can_be_smaller: bool  # whether it takes a batch smaller than the example's


Make = Callable[[Draw, Shape], nn.Module | None]  # None where it does not fit the shape


def blocks_of(*makes: tuple[int, str, Make]) -> list[tuple[Make, str]]:
    """Returns the blocks, each as often as it shall be drawn, with the kind of tensor that it gives."""
    return [(make, kind) for times, kind, make in makes for _ in range(times)]


BLOCKS: dict[str, list[tuple[Make, str]]] = {
    "image": blocks_of(
        (5, "image", image.conv),
        (3, "image", image.norm),
        (3, "image", activation),
        (3, "image", image.residual),
        (3, "image", image.parts_of_channels),
        (3, "image", image.functional),
        *[(1, "image", make) for make in (image.depthwise, image.transposed, image.pooled, image.upsampled)],
        *[(1, "image", make) for make in (image.shuffled, image.concatenated, image.squeeze_excite, image.frozen)],
        (1, "image", image.channels_last),
        (1, "image", image.windows),
        (1, "tokens", image.to_tokens),
        (1, "vector", image.to_vector),
    ),
    "tokens": blocks_of(
        (3, "tokens", tokens.linear),
        (2, "tokens", tokens.norm),
        (2, "tokens", tokens.activation),
        (3, "tokens", tokens.residual),
        (4, "tokens", tokens.parts_of_tokens),
        *[(1, "tokens", make) for make in (tokens.fused_attention, tokens.grouped_attention, tokens.masked_attention)],
        *[(1, "tokens", make) for make in (tokens.module_attention, tokens.cross_attention, tokens.encoder_layer)],
        (1, "tokens", tokens.recurrent),
        (1, "vector", tokens.to_vector),
        (1, "image", tokens.to_image),
    ),
    "vector": blocks_of(
        (3, "vector", tokens.linear),
        (2, "vector", tokens.vector_norm),
        (2, "vector", activation),
        (2, "vector", tokens.vector_residual),
        (2, "tokens", tokens.vector_to_tokens),
    ),
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
