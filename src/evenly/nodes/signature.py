"""Whether all ranks were given the same model, optimizer and settings."""

import hashlib
from collections import defaultdict

import torch
import torch.distributed as dist

from evenly._errors import MismatchError
from evenly.comm import Waiter, gather_json


def describe(model: torch.nn.Module, optimizer: torch.optim.Optimizer, wishes: str) -> list[str]:
    """Returns one line for everything that must be the same on every rank."""
    lines = [f"settings {wishes}", f"optimizer {type(optimizer).__module__}.{type(optimizer).__qualname__}"]
    for name, parameter in model.named_parameters():
        use = "trained" if parameter.requires_grad else "frozen"
        lines.append(f"parameter {name!r}: {_form(parameter)}, {use}")
    lines += [f"buffer {name!r}: {_form(buffer)}" for name, buffer in model.named_buffers()]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for place, group in enumerate(optimizer.param_groups):
        settings = {key: _plain(value) for key, value in sorted(group.items()) if key != "params"}
        lines.append(f"optimizer group {place}: {settings} for {[names.get(id(p)) for p in group['params']]}")
    return lines


def require_same(lines: list[str], group: dist.ProcessGroup, waiter: Waiter) -> None:
    """Raises `MismatchError` on every rank, naming the first line that differs and the ranks, unless all agree."""
    digests = gather_json(digest(lines), group, waiter)
    if len(set(digests)) == 1:
        return
    every = gather_json(lines, group, waiter)
    for number in range(max(map(len, every))):
        said: dict[str, list[int]] = defaultdict(list)
        for rank, theirs in enumerate(every):
            said[theirs[number] if number < len(theirs) else "nothing more"].append(rank)
        if len(said) > 1:
            parts = "; ".join(f"ranks {ranks} have {line}" for line, ranks in said.items())
            raise MismatchError(
                f"the ranks were not given the same model and settings: {parts}. "
                "Build the same model, optimizer and settings on every rank."
            )


def digest(lines: list[str]) -> str:
    """Returns a hash of the lines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
