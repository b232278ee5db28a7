"""MODEL as typed: a recipe's network, `package.module:callable` or `path/file.py:callable`."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import psutil

from evenly.cli._quantities import shape_of
from evenly.errors import EvenlyError, SpecError
from evenly.reports import gigabytes

if TYPE_CHECKING:
    import torch
    from torch import nn

    from evenly.spec import Graph

NETWORKS = {
    "cifar": ("evenly.recipes.published", "PublishedCifarNet", "64x3x32x32"),
    "mnist": ("evenly.recipes.published", "PublishedMnistNet", "64x1x28x28"),
    "fashion": ("evenly.recipes.resnet", "SmallResNet", "64x1x28x28"),
}
DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32")
HOW = "Give package.module:callable or path/file.py:callable, a class or function that makes it without arguments"


def build(model: str, dtype: str) -> "nn.Module":
    """Returns the network that MODEL makes, in `dtype` if that is a floating-point one."""
    import torch
    from torch import nn

    torch_dtype = dtype_of(dtype)
    maker = _maker(model)
    try:
        network = maker()
    except Exception as error:  # whatever the user's code raises
        raise SpecError(
            f"the network {model!r} was asked for, but calling it raised {_words(error)}. {HOW}."
        ) from error
    if not isinstance(network, nn.Module):
        raise SpecError(
            f"the network {model!r} was asked for, but calling it gave a {type(network).__name__}, not a "
            f"torch.nn.Module. {HOW}."
        )
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in network.parameters()):
        return network  # tracing says what to do
    return network.to(torch_dtype) if torch_dtype.is_floating_point and torch_dtype != torch.float32 else network


def examples(model: str, inputs: Sequence[str], dtype: str, *, device: str = "cpu") -> tuple["torch.Tensor", ...]:
    """Returns a batch of each size in `inputs`; a recipe's network has a usual one."""
    import torch

    sizes = list(inputs) or ([NETWORKS[model][2]] if model in NETWORKS else [])
    if not sizes:
        raise SpecError(
            f"the network {model!r} was asked for, but not what goes into it. Add --input 64x3x32x32: the sizes of a "
            "batch, its samples first."
        )
    torch_dtype, shapes = dtype_of(dtype), [shape_of(size) for size in sizes]
    needed_bytes = sum(prod(shape) for shape in shapes) * torch_dtype.itemsize
    free_bytes = psutil.virtual_memory().available
    if device != "meta" and needed_bytes > free_bytes:
        raise SpecError(
            f"--input {' '.join(sizes)} was given, which is {gigabytes(needed_bytes)}, but {gigabytes(free_bytes)} of "
            "memory are free. Give the sizes of a batch that fits into memory."
        )
    try:
        return tuple(torch.zeros(shape, dtype=torch_dtype, device=device) for shape in shapes)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise SpecError(
            f"--input {' '.join(sizes)} was given, but cannot be made: {_words(error)}. Give the sizes of a batch that "
            "fits into memory."
        ) from error


def draw(model: str, network: "nn.Module", example: tuple["torch.Tensor", ...]) -> "Graph":
    """Returns the network's operations; any error becomes one message."""
    from evenly.graph import trace

    try:
        return trace(network, example)
    except Exception as error:  # whatever the user's forward raises
        shapes = " ".join("x".join(map(str, x.shape)) for x in example)
        problem = str(error).splitlines()[0] if isinstance(error, EvenlyError) else f"it raised {_words(error)}."
        raise SpecError(
            f"the network {model!r} was traced with an input of {shapes} ({str(example[0].dtype)[6:]}), but {problem} "
            "Give the --input and --dtype that its forward takes."
        ) from error


def draw_quickly(model: str, inputs: Sequence[str], dtype: str) -> "Graph":
    """Returns the network's operations, without memory for its parameters where the network allows that."""
    import torch

    _maker(model)  # a wrong name is reported first
    example = examples(model, inputs, dtype, device="meta")
    try:
        with torch.device("meta"):
            network = build(model, dtype)
        return draw(model, network, example)
    except EvenlyError as error:  # some networks compute with their parameters when they are made
        try:
            real = examples(model, inputs, dtype)
        except EvenlyError:
            raise error from None
        return draw(model, build(model, dtype), real)


def dtype_of(name: str) -> "torch.dtype":
    """Returns the torch dtype of this name."""
    import torch

    if name not in DTYPES:
        raise SpecError(f"--dtype {name} was given. Choose one of: {', '.join(DTYPES)}.")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _maker(model: str) -> Callable[[], object]:
    if model in NETWORKS:
        module_name, name, _ = NETWORKS[model]
        maker: Callable[[], object] = getattr(importlib.import_module(module_name), name)
        return maker
    module_name, colon, name = model.rpartition(":")
    if not colon or not module_name or not name:
        raise SpecError(
            f"there is no network {model!r}. Choose one of: {', '.join(NETWORKS)}. {HOW.replace('Give', 'Or give', 1)}."
        )
    attribute: object = _module(module_name, model)
    for part in name.split("."):
        if not hasattr(attribute, part):
            raise SpecError(f"the network {model!r} was asked for, but {module_name} has no {name!r}. {HOW}.")
        attribute = getattr(attribute, part)
    if not callable(attribute):
        raise SpecError(
            f"the network {model!r} was asked for, but {name!r} is a {type(attribute).__name__}, which cannot be "
            f"called. {HOW}."
        )
    return attribute


def _module(module_name: str, model: str) -> ModuleType:
    is_file = module_name.endswith(".py")
    if is_file and not Path(module_name).is_file():
        raise SpecError(f"the network {model!r} was asked for, but there is no file {module_name}. {HOW}.")
    folder = str(Path(module_name).resolve().parent if is_file else Path.cwd())
    if folder not in sys.path:  # as python does for a script
        sys.path.insert(0, folder)
    try:
        return _run_file(Path(module_name)) if is_file else importlib.import_module(module_name)
    except Exception as error:  # whatever the user's code raises
        raise SpecError(
            f"the network {model!r} was asked for, but importing {module_name} raised {_words(error)}. {HOW}."
        ) from error


def _run_file(path: Path) -> ModuleType:
    name = f"_evenly_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _words(error: BaseException) -> str:
    """Returns kind and text of an error on one line."""
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
