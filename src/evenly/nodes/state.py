"""What an exchange carries besides parameters: buffers, and optimizer state where it is to be averaged."""

from collections.abc import Iterator

import torch


def trained(model: torch.nn.Module) -> list[torch.Tensor]:
    """Returns the parameters that training changes, each once, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def kept_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the buffers that belong to the state of the model, such as BatchNorm's; masks and caches often do not."""
    return dict(_kept_buffers(model))


def averages(tensor: torch.Tensor) -> bool:
    """Returns whether a buffer is averaged; counters and flags are agreed on by their maximum."""
    return tensor.is_floating_point() or tensor.is_complex()


def difference(buffer: torch.Tensor, agreed: torch.Tensor) -> torch.Tensor:
    """Returns what was added to a buffer since the ranks agreed on it; what stayed infinite has not changed."""
    return torch.where(buffer == agreed, torch.zeros_like(buffer), buffer - agreed)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Returns the optimizer's tensors that have the shape of their parameter (momenta), named alike on all ranks."""
    found = {}
    for place, parameter in enumerate(_parameters(optimizer)):
        for slot, value in sorted(optimizer.state.get(parameter, {}).items(), key=lambda item: str(item[0])):
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.is_floating_point():
                found[f"{place}.{slot}"] = value
    return found


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _kept_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{prefix}.{name}" if prefix else name, buffer
