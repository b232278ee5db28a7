"""The form of what a checkpoint's files hold, which is checked before anything of it is used."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from evenly.comm import full_shape

MOST = 2**53  # the size of whole numbers


@dataclass(frozen=True)
class MapOf:
    """A dict from texts to values of one form."""

    form: object


@dataclass(frozen=True)
class ListOf:
    """A list or tuple of values of one form."""

    form: object


@dataclass(frozen=True)
class Maybe:
    """A value of a form, or None; as the value of a key, the key may also be missing."""

    form: object


ANY, COUNT = object(), object()  # anything; a whole number of at least 0
PROGRESS = {
    "step": COUNT,
    "since": ListOf(int),
    "exchanges": COUNT,
    "period": ListOf(int),
    "epochs": Maybe(ListOf(int)),
    "samples": ListOf(float),
    "counts": ListOf(int),
    "seen": ListOf(float),
}
PIECE = {"home": str, "label": str, "slot": str, "rows": Maybe(ListOf(int)), "value": torch.Tensor}
PENDING_EXCHANGE = {
    **dict.fromkeys(("number", "begun", "due", "steps"), int),
    **dict.fromkeys(("fragments", "stateful"), ListOf(int)),
    **dict.fromkeys(("weights", "carried", "times", "measured"), ListOf(float)),
    **dict.fromkeys(("snapshot", "buffers"), MapOf(torch.Tensor)),
}
EXCHANGES = {"settings": MapOf(ANY), "restarts": int, "points": MapOf(MapOf(ANY)), "trips": ListOf(PENDING_EXCHANGE)}
NODE = MapOf(
    {
        "parameters": MapOf(torch.Tensor),
        "optimizer": {"state": dict, "param_groups": ListOf(MapOf(ANY))},
        "pending": ListOf(ListOf(PIECE)),
        "trained": Maybe(ListOf(str)),
    }
)
LOCAL = {
    "buffers": MapOf(torch.Tensor),
    "agreed": Maybe(MapOf(torch.Tensor)),
    "progress": PROGRESS,
    "exchanges": Maybe(EXCHANGES),
    "feed": Maybe({"epoch": COUNT, "offset": COUNT}),
}
RANK = {
    "trainees": MapOf(LOCAL),
    "tracked": MapOf(ANY),
    "random": Maybe({"torch": torch.Tensor, "python": ListOf(ANY), "numpy": ListOf(ANY)}),
}


def misform(value: object, form: object, place: str = "it") -> str:
    """Returns where a value has another form, in words; empty if it has this one. Surplus keys are no matter.

    >>> misform({"step": 2**70}, {"step": int})
    "it['step'] is not a whole number below 2^53"
    """
    match form:
        case Maybe():
            return "" if value is None else misform(value, form.form, place)
        case MapOf():
            if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
                return f"{place} is not a dict of names"
            return _first(misform(entry, form.form, f"{place}[{key[:40]!r}]") for key, entry in value.items())
        case ListOf():
            if not isinstance(value, list | tuple):
                return f"{place} is not a list"
            return _first(misform(entry, form.form, f"{place}[{index}]") for index, entry in enumerate(value))
        case dict():
            if not isinstance(value, dict):
                return f"{place} is not a dict"
            return _first(misform(value.get(key), entry, f"{place}[{key!r}]") for key, entry in form.items())
        case type():
            return _not_of_type(value, form, place)
    is_count = isinstance(value, int) and 0 <= value < MOST
    return f"{place} is not a whole number from 0 to 2^53" if form is COUNT and not is_count else ""


def tensors_misfit(forms: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> str:
    """Returns which of the tensors has not the dtype and shape that the manifest says; empty if all have."""
    return _first(
        f"{name!r} is {form_of_tensor(tensor)}, the manifest says {forms.get(name, 'nothing of it')[:80]}"
        for name, tensor in tensors.items()
        if forms.get(name) != form_of_tensor(tensor)
    )


def form_of_tensor(tensor: torch.Tensor) -> str:
    """Returns the dtype and the full shape of a tensor, as a manifest has them.

    >>> form_of_tensor(torch.zeros(2, 3))
    'float32 [2, 3]'
    """
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(full_shape(tensor))}"


def form_of_module(module: torch.nn.Module) -> dict[str, str]:
    """Returns the dtype and full shape of each parameter and buffer of a network."""
    return {name: form_of_tensor(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def _not_of_type(value: object, kind: type[Any], place: str) -> str:
    if kind is int and (not isinstance(value, int) or abs(value) >= MOST):
        return f"{place} is not a whole number below 2^53"
    if kind is float:
        return "" if isinstance(value, int | float) else f"{place} is not a number"
    return "" if isinstance(value, kind) else f"{place} is not a {kind.__name__}"


def _first(problems: Iterable[str]) -> str:
    return next(filter(None, problems), "")
