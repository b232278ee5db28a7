"""Finds out by trying whether an optimizer is exact on parameters that are cut over ranks."""

import inspect
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from evenly._errors import SpecError
from evenly.comm import first_line
from evenly.shards.optim import Adafactor, Lamb
from evenly.shards.placement import placement_of

EXACT = (Adafactor, Lamb)  # they sum over ranks
TOLERANCE = 1e-12
SIZES = ((6, 4, 3, 3, 2), (136, 130))  # of the dims, further ones 1: some treat large tensors in another way
STEPS = 30  # some act every few steps only
SCALES = (1.0, 1e-4, 1e4)  # of gradients, in turn: some clip


class Kind(NamedTuple):
    """What an optimizer meets: parameters of `num_dims` dims on a device, cut along `dim`."""

    num_dims: int
    dim: int
    device: str


def check_elementwise(optimizer: Optimizer) -> None:
    """Raises `SpecError` if the optimizer holds cut parameters and would not step as on the full ones.

    A small optimizer of the same class and options steps on a whole tensor and others on its parts, with the same
    gradients. Every element must come out the same, and so must what the optimizer remembers: tensors of the
    parameter's shape element by element, all else as it is. `Adafactor` and `Lamb` of this library sum over ranks and
    pass. What is found is kept for the class and its options.
    """
    if type(optimizer) in EXACT:
        return
    for group in optimizer.param_groups:
        for kind in sorted(_kinds(group["params"])):
            reason = _reason(optimizer, group, kind)
            if reason is not None:
                name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
                raise SpecError(
                    f"{name} was asked to step on parameters that are cut over ranks, but {reason}. Use an optimizer "
                    "that treats each element alone, such as torch.optim.AdamW or SGD, or one that sums over ranks: "
                    "evenly.shards.Adafactor or evenly.shards.Lamb."
                )


def watch_optimizers() -> None:
    """Has every optimizer of this process checked at its first step on cut parameters; further calls do nothing."""
    global _is_watching
    with _lock:
        if not _is_watching:
            register_optimizer_step_pre_hook(_before_step)
            _is_watching = True


_lock = threading.Lock()
_is_watching = False
_checked: "weakref.WeakKeyDictionary[Optimizer, int]" = weakref.WeakKeyDictionary()  # number of groups seen
_reasons: dict[tuple[Any, ...], str | None] = {}


def _before_step(optimizer: Optimizer, _: Any, __: Any) -> None:
    if _checked.get(optimizer) != len(optimizer.param_groups):
        check_elementwise(optimizer)
        with _lock:
            _checked[optimizer] = len(optimizer.param_groups)


def _kinds(parameters: Sequence[torch.Tensor]) -> set[Kind]:
    kinds: set[Kind] = set()
    for parameter in parameters:
        placement = placement_of(parameter)
        if placement is not None and placement.dim is not None:
            device = parameter.device.type if parameter.device.type in ("cpu", "cuda") else "cpu"  # with float64
            kinds.add(Kind(len(placement.shape), placement.dim, device))
    return kinds


def _reason(optimizer: Optimizer, group: dict[str, Any], kind: Kind) -> str | None:
    """Returns why the optimizer is not to be used on parameters of this kind, or None."""
    if isinstance(optimizer, torch.optim.LBFGS):
        return "it is not elementwise: its direction comes from dot products of all elements"
    options, arguments = _options(optimizer, group), _arguments(optimizer)
    key = (type(optimizer), kind, repr(sorted(options.items())), repr(sorted(arguments.items())))
    if key not in _reasons:
        cls: Callable[..., Optimizer] = type(optimizer)

        def build(parameter: torch.Tensor) -> Optimizer:
            return cls([{"params": [parameter], **options}], **arguments)

        _reasons[key] = _try(build, kind)
    return _reasons[key]


def _options(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Returns the group's options without what the optimizer or a scheduler counts there."""
    return _tamed(
        {
            name: value
            for name, value in group.items()
            if name in optimizer.defaults or (isinstance(value, bool | str) and name != "params")
        }
    )


def _arguments(optimizer: Optimizer) -> dict[str, Any]:
    """Returns the arguments that the optimizer was made with, as far as its defaults and attributes tell."""
    _, *names = inspect.signature(type(optimizer)).parameters
    plain = {k: v for k, v in vars(optimizer).items() if isinstance(v, bool | int | float | str | tuple | None)}
    known = {**plain, **optimizer.defaults}
    return _tamed({name: known[name] for name in names if name in known})


def _tamed(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options with a step size that is felt (a warmup begins with 0), and without autograd in the step."""
    tamed = dict(options)
    if isinstance(tamed.get("lr"), Real | torch.Tensor):
        tamed["lr"] = 0.1
    if "differentiable" in tamed:
        tamed["differentiable"] = False
    return tamed


def _try(build: Callable[[torch.Tensor], Optimizer], kind: Kind) -> str | None:
    for sizes in SIZES:
        shape = (*sizes, *[1] * kind.num_dims)[: kind.num_dims]
        generator = torch.Generator().manual_seed(0)
        draws = torch.randn(2 + STEPS, *shape, generator=generator, dtype=torch.float64).to(kind.device)
        start, drift, *noise = draws
        grads = [(drift + grad) * SCALES[step % len(SCALES)] for step, grad in enumerate(noise)]
        try:
            whole = _train(build, start, grads)
            if torch.equal(whole["parameter"], start) or not whole["parameter"].isfinite().all():
                return f"it could not be tried out: it does not move a tensor of {list(shape)} to finite numbers"
            for chosen in _halves(shape[kind.dim], kind.device):
                start_part, *grad_parts = (tensor.index_select(kind.dim, chosen) for tensor in (start, *grads))
                clash = _clash(whole, _train(build, start_part, grad_parts), kind.dim, chosen)
                if clash is not None:
                    return (
                        f"it is not elementwise: on parts of a tensor of {list(shape)}, cut along dim {kind.dim}, its "
                        f"{clash} came out other than on the whole one"
                    )
        except Exception as error:
            return (
                f"it could not be tried out on a tensor of {list(shape)}: {type(error).__name__}: {first_line(error)}"
            )
    return None


def _halves(size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first and last index, and those between."""
    indices = torch.arange(size, device=device)
    outer = (indices == 0) | (indices == size - 1)
    return indices[outer], indices[~outer]


def _train(
    build: Callable[[torch.Tensor], Optimizer], start: torch.Tensor, grads: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """Returns the parameter after the steps, and all that the optimizer remembers, by name."""
    parameter = torch.nn.Parameter(start.clone())
    optimizer = build(parameter)
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    left: dict[str, Any] = {"parameter": parameter.detach()}
    for owner, entries in optimizer.state.items():
        left |= _leaves("state" if owner is parameter else f"state {owner}", entries)
    for name, value in optimizer.param_groups[0].items():
        if isinstance(value, Real | torch.Tensor):
            left[f"option {name}"] = value
    return left


def _leaves(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in _leaves(f"{name} {key}", item).items()}
    if isinstance(value, list | tuple | deque):
        return {k: v for index, item in enumerate(value) for k, v in _leaves(f"{name} {index}", item).items()}
    if isinstance(value, Real | torch.Tensor | str | torch.dtype | None):
        return {name: value}
    raise TypeError(f"its {name} is a {type(value).__name__}, and whether that depends on the cut cannot be seen")


def _clash(whole: dict[str, Any], part: dict[str, Any], dim: int, chosen: torch.Tensor) -> str | None:
    """Returns the name of something that differs between the whole and a part, or None."""
    shape = whole["parameter"].shape
    for name in (*whole, *part):
        mine, other = whole.get(name), part.get(name)
        if isinstance(mine, torch.Tensor) and mine.shape == shape:
            mine = mine.index_select(dim, chosen)
        if not _is_same(mine, other):
            return name
    return None


def _is_same(one: Any, other: Any) -> bool:
    if not (isinstance(one, Real | torch.Tensor) and isinstance(other, Real | torch.Tensor)):
        return bool(one == other)
    a, b = torch.as_tensor(one).double(), torch.as_tensor(other).double()
    finite = a[a.isfinite()].abs()
    slack = TOLERANCE * finite.max().item() if finite.numel() else 0.0
    return a.shape == b.shape and torch.allclose(a, b, rtol=0.0, atol=slack, equal_nan=True)
