"""A network by its name, with options that are checked before it is made."""

import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, get_type_hints

from evenly.errors import EvenlyError, SpecError
from evenly.recipes.names import did_you_mean
from evenly.recipes.networks.catalogue import NETWORKS, NetworkInfo
from evenly.recipes.networks.loading import HOW, TIMM, error_words, load_callable, load_timm

if TYPE_CHECKING:
    from torch import nn

OF_IMAGES = ("classes", "channels", "size")


def build_network(
    name: str, *, classes: int | None = None, channels: int | None = None, size: int | None = None, **options: object
) -> "nn.Module":
    """Returns the network `name`, made for `classes` and for images [n, channels, size, size].

    What is left out is as usual for that network: 10 classes of images of 3 x 32 x 32, or 1 x 28 x 28 for those of
    MNIST. A callable of your own gets those of the three that it names.

    Args:
        name: one of `NETWORKS`, `package.module:callable`, `path/file.py:callable`, or `timm:NAME` with timm installed.
        classes: outputs of the last layer.
        channels: of the images.
        size: height and width of the images.
        options: other arguments of the callable, such as `width`.
    """
    from torch import nn

    _require_positive(name, {"classes": classes, "channels": channels, "size": size})
    given = {key: value for key, value in zip(OF_IMAGES, (classes, channels, size), strict=True) if value is not None}
    make, arguments = _maker(name, given, options)
    try:
        network = make(**arguments)
    except EvenlyError:
        raise
    except Exception as error:  # whatever the user's code raises
        advice = "Change the options" if name in NETWORKS or name.startswith(f"{TIMM}:") else HOW
        raise SpecError(
            f"the network {name!r} was asked for, but calling it raised {error_words(error)}. {advice}."
        ) from error
    if not isinstance(network, nn.Module):
        raise SpecError(
            f"the network {name!r} was asked for, but calling it gave a {type(network).__name__}, not a "
            f"torch.nn.Module. {HOW}."
        )
    return network


def require_network(name: str) -> None:
    """Raises `SpecError` unless there is a network of this name, before it is made."""
    _maker(name, {}, {})


def _maker(
    name: str, given: Mapping[str, int], options: Mapping[str, object]
) -> tuple[Callable[..., object], dict[str, object]]:
    """Returns what makes the network and its arguments, checked."""
    if name in NETWORKS:
        info = NETWORKS[name]
        make = getattr(importlib.import_module(info.module), info.function)
        return make, {**_of_images(name, info, make, given), **_checked(name, make, options)}
    if name.startswith(f"{TIMM}:"):
        return load_timm(name), {"classes": 10, "channels": 3, "size": 32, **given, **options}
    module_name, colon, function_name = name.rpartition(":")
    if not colon or not module_name or not function_name:
        raise SpecError(
            f"there is no network {name!r}.{did_you_mean(name, NETWORKS)} Choose one of: {', '.join(NETWORKS)}. "
            f"{HOW.replace('Give', 'Or give', 1)}."
        )
    make = load_callable(name)
    named = _parameters(make)
    if named is not None:
        _require_known(name, options, [key for key in named if key not in OF_IMAGES], anything=_takes_anything(make))
    return make, {**{key: value for key, value in given.items() if named is None or key in named}, **options}


def _of_images(
    name: str, info: NetworkInfo, make: Callable[..., object], given: Mapping[str, int]
) -> dict[str, object]:
    """Returns classes, channels and size as far as the network depends on them."""
    named = _parameters(make) or {}
    if given and not any(key in named for key in OF_IMAGES):
        raise SpecError(
            f"the network {name!r} was asked for with {_listed(given)}, but it is not made for images. Leave that out; "
            f"it has the options {', '.join(info.options)}."
        )
    usual: dict[str, object] = {}
    if info.takes_images:
        _, usual["channels"], usual["size"], _ = map(int, info.inputs[0].split("x"))
    return {key: value for key, value in {**usual, **given}.items() if key in named}


def _checked(name: str, make: Callable[..., object], options: Mapping[str, object]) -> dict[str, object]:
    """Returns the options as the types that the network's signature says."""
    from pydantic import TypeAdapter, ValidationError  # here, so that completion in a shell need not load it

    _require_known(name, options, NETWORKS[name].options, anything=False)
    types = get_type_hints(make.__init__ if inspect.isclass(make) else make)
    checked: dict[str, object] = {}
    for key, value in options.items():
        try:
            checked[key] = TypeAdapter(types[key]).validate_python(value)
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
            raise SpecError(
                f"the network {name!r} was given {key}={value!r}, but that is not what it takes: {problem}. Change it."
            ) from None
    _require_positive(name, checked)
    return checked


def _require_known(name: str, options: Iterable[str], known: Iterable[str], *, anything: bool) -> None:
    known = list(known)
    for key in options:
        if key not in known and not anything:
            raise SpecError(
                f"the network {name!r} has no option {key!r}.{did_you_mean(key, known)} "
                + (f"It has: {', '.join(known)}." if known else "It has none: leave it out.")
            )


def _require_positive(name: str, values: Mapping[str, object]) -> None:
    """Raises `SpecError` for counts below 1 and rates outside 0 to 1."""
    for key, value in values.items():
        numbers = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(number, int) and not isinstance(number, bool) and number < 1 for number in numbers):
            raise SpecError(f"the network {name!r} was given {key}={value!r}. Give whole numbers of at least 1.")
        if key == "dropout" and isinstance(value, float) and not 0 <= value < 1:
            raise SpecError(f"the network {name!r} was given dropout={value:g}. Give a rate from 0 to below 1.")
        if key != "dropout" and isinstance(value, float) and not 0 < value < math.inf:
            raise SpecError(f"the network {name!r} was given {key}={value:g}. Give a factor above 0.")


def _parameters(make: Callable[..., object]) -> Mapping[str, inspect.Parameter] | None:
    """Returns the parameters that can be given by name, or None if the callable does not say them."""
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):
        return None
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {key: parameter for key, parameter in parameters.items() if parameter.kind in kinds}


def _takes_anything(make: Callable[..., object]) -> bool:
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(make).parameters.values())


def _listed(values: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items())
