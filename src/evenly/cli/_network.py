"""MODEL as typed: a network's name, `package.module:callable`, `path/file.py:callable` or `timm:NAME`."""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import psutil

from evenly.cli._quantities import shape_of
from evenly.errors import EvenlyError, SpecError
from evenly.recipes.networks import NETWORKS, NetworkInfo, build_network, require_network
from evenly.recipes.networks.loading import error_words
from evenly.reports import gigabytes

if TYPE_CHECKING:
    import torch
    from torch import nn

    from evenly.spec import Graph

OF_RECIPES = {"cifar": "published-cifar", "mnist": "published-mnist", "fashion": "small-resnet"}
DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32")


def build(model: str, inputs: Sequence[str], dtype: str | None) -> "nn.Module":
    """Returns the network that MODEL makes for images of these sizes, in `dtype` if that is a floating-point one."""
    import torch
    from torch import nn

    torch_dtype = dtype_of(dtype or DTYPES[0])
    network = build_network(_name(model), **_image_sizes(model, inputs))
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in network.parameters()):
        return network  # tracing says what to do
    return network.to(torch_dtype) if torch_dtype.is_floating_point and torch_dtype != torch.float32 else network


def examples(
    model: str, inputs: Sequence[str], dtype: str | None, *, device: str = "cpu"
) -> tuple["torch.Tensor", ...]:
    """Returns a batch of each size in `inputs`; a network with a name has usual ones."""
    import torch

    info = NETWORKS.get(_name(model))
    sizes = list(inputs) or ([] if info is None else list(info.inputs))
    if not sizes:
        raise SpecError(
            f"the network {model!r} was asked for, but not what goes into it. Add --input 64x3x32x32: the sizes of a "
            "batch, its samples first."
        )
    dtypes, shapes = _dtypes(info, len(sizes), dtype), [shape_of(size) for size in sizes]
    needed_bytes = sum(prod(shape) * kind.itemsize for shape, kind in zip(shapes, dtypes, strict=True))
    free_bytes = psutil.virtual_memory().available
    if device != "meta" and needed_bytes > free_bytes:
        raise SpecError(
            f"--input {' '.join(sizes)} was given, which is {gigabytes(needed_bytes)}, but {gigabytes(free_bytes)} of "
            "memory are free. Give the sizes of a batch that fits into memory."
        )
    try:
        return tuple(torch.zeros(shape, dtype=kind, device=device) for shape, kind in zip(shapes, dtypes, strict=True))
    except (RuntimeError, TypeError, OverflowError) as error:
        raise SpecError(
            f"--input {' '.join(sizes)} was given, but cannot be made: {error_words(error)}. Give the sizes of a "
            "batch that fits into memory."
        ) from error


def draw(model: str, network: "nn.Module", example: tuple["torch.Tensor", ...]) -> "Graph":
    """Returns the network's operations; any error becomes one message."""
    from evenly.graph import trace

    try:
        return trace(network, example)
    except Exception as error:  # whatever the user's forward raises
        shapes = " ".join("x".join(map(str, x.shape)) for x in example)
        problem = str(error).splitlines()[0] if isinstance(error, EvenlyError) else f"it raised {error_words(error)}."
        raise SpecError(
            f"the network {model!r} was traced with an input of {shapes} ({str(example[0].dtype)[6:]}), but {problem} "
            "Give the --input and --dtype that its forward takes."
        ) from error


def draw_quickly(model: str, inputs: Sequence[str], dtype: str | None) -> "Graph":
    """Returns the network's operations, without memory for its parameters where the network allows that."""
    import torch

    require_network(_name(model))  # a wrong name is reported first
    example = examples(model, inputs, dtype, device="meta")
    try:
        with torch.device("meta"):
            network = build(model, inputs, dtype)
        return draw(model, network, example)
    except EvenlyError as error:  # some networks compute with their parameters when they are made
        try:
            real = examples(model, inputs, dtype)
        except EvenlyError:
            raise error from None
        return draw(model, build(model, inputs, dtype), real)


def dtype_of(name: str) -> "torch.dtype":
    """Returns the torch dtype of this name."""
    import torch

    if name not in DTYPES:
        raise SpecError(f"--dtype {name} was given. Choose one of: {', '.join(DTYPES)}.")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _name(model: str) -> str:
    """Returns the network's name in `NETWORKS`; recipes have the names of their data there."""
    return OF_RECIPES.get(model, model)


def _image_sizes(model: str, inputs: Sequence[str]) -> dict[str, int]:
    """Returns channels and size of the typed images, for networks that are made for them."""
    info = NETWORKS.get(_name(model))
    shape = shape_of(inputs[0]) if inputs else ()
    if info is None or not info.takes_images or len(shape) != 4:
        return {}
    return {"channels": shape[1], "size": shape[2]}


def _dtypes(info: NetworkInfo | None, count: int, dtype: str | None) -> list["torch.dtype"]:
    """Returns the dtype of each input; a given one stands for the usual float32."""
    usual = ("float32",) * count if info is None else (*info.dtypes, *["float32"] * count)[:count]
    return [dtype_of(dtype if dtype is not None and name == "float32" else name) for name in usual]
