"""`package.module:callable`, `path/file.py:callable` and `timm:NAME`: the callable that makes a network."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

from evenly.errors import SpecError

HOW = "Give package.module:callable or path/file.py:callable, a class or function that makes it, or timm:NAME"
TIMM = "timm"


def load_callable(name: str) -> Callable[..., object]:
    """Returns what `name`, such as `net.py:Net`, stands for."""
    module_name, _, attribute_name = name.rpartition(":")
    attribute: object = _module(module_name, name)
    for part in attribute_name.split("."):
        if not hasattr(attribute, part):
            raise SpecError(f"the network {name!r} was asked for, but {module_name} has no {attribute_name!r}. {HOW}.")
        attribute = getattr(attribute, part)
    if not callable(attribute):
        raise SpecError(
            f"the network {name!r} was asked for, but {attribute_name!r} is a {type(attribute).__name__}, which cannot "
            f"be called. {HOW}."
        )
    return attribute


def load_timm(name: str) -> Callable[..., object]:
    """Returns a function that makes the network `timm:NAME` for classes, channels and size."""
    timm = _timm(name)
    timm_name = name.partition(":")[2]
    if not timm.is_model(timm_name):
        near = get_close_matches(timm_name, timm.list_models(), 3)
        such_as = f", such as {', '.join(near)}" if near else ""
        raise SpecError(
            f"the network {name!r} was asked for, but timm {timm.__version__} has no {timm_name!r}. Choose one of "
            f"timm.list_models(){such_as}."
        )

    def make(*, classes: int, channels: int, size: int, **options: object) -> object:
        config = timm.get_pretrained_cfg(timm_name)
        if config is not None and config.fixed_input_size:
            options = {"img_size": size, **options}
        return timm.create_model(timm_name, num_classes=classes, in_chans=channels, **options)

    return make


def _timm(name: str) -> ModuleType:
    if importlib.util.find_spec(TIMM) is None:
        raise SpecError(
            f"the network {name!r} was asked for, but timm is not installed. Install evenly[timm], beside a "
            "torchvision that fits torch."
        )
    try:
        return importlib.import_module(TIMM)
    except Exception as error:  # a torchvision of another torch raises RuntimeError, AttributeError or OSError
        raise SpecError(
            f"the network {name!r} was asked for, but importing timm raised {error_words(error)}. timm imports "
            "torchvision: install one that fits torch."
        ) from error


def _module(module_name: str, name: str) -> ModuleType:
    is_file = module_name.endswith(".py")
    if is_file and not Path(module_name).is_file():
        raise SpecError(f"the network {name!r} was asked for, but there is no file {module_name}. {HOW}.")
    folder = str(Path(module_name).resolve().parent if is_file else Path.cwd())
    if folder not in sys.path:  # as python does for a script
        sys.path.insert(0, folder)
    try:
        return _run_file(Path(module_name)) if is_file else importlib.import_module(module_name)
    except Exception as error:  # whatever the user's code raises
        raise SpecError(
            f"the network {name!r} was asked for, but importing {module_name} raised {error_words(error)}. {HOW}."
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


def error_words(error: BaseException) -> str:
    """Returns kind and text of an error on one line."""
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
