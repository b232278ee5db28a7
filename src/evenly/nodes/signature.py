"""Describes model, optimizer and settings, to compare them between ranks."""

import torch

from evenly.comm import full_shape


def describe(model: torch.nn.Module, optimizer: torch.optim.Optimizer, settings_text: str) -> list[str]:
    """Returns one line for everything that must be the same on every rank."""
    lines = [f"settings {settings_text}", f"optimizer {type(optimizer).__module__}.{type(optimizer).__qualname__}"]
    for name, parameter in model.named_parameters():
        use = "trained" if parameter.requires_grad else "frozen"
        lines.append(f"parameter {name!r}: {_dtype_and_shape(parameter)}, {use}")
    lines += [f"buffer {name!r}: {_dtype_and_shape(buffer)}" for name, buffer in model.named_buffers()]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        settings = {key: _plain(value) for key, value in sorted(group.items()) if key != "params"}
        lines.append(f"optimizer group {number}: {settings} for {[names.get(id(p)) for p in group['params']]}")
    return lines


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _dtype_and_shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(full_shape(tensor))}"
