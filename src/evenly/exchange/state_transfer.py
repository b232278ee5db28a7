"""What a node that joins an elastic run receives from another one: nested state, sent to all ranks of a group."""

import json
from dataclasses import dataclass
from typing import Any

import torch

from evenly.comm import CollectiveWaiter, Group, broadcast
from evenly.comm.nested_state import flatten, restore

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class JoinState:
    """The state of a node between two steps, but for its parameters, which a joining node gets as the average."""

    training: Any  # of the optimizer, the schedule and the buffers, nested
    agreed_buffers: Tensors  # after the last exchange
    anchors: dict[str, Tensors]  # full tensors by parameter, of each vector that anchors keep


def broadcast_state(state: JoinState | None, group: Group, waiter: CollectiveWaiter, *, source: int) -> JoinState:
    """Returns the state of the member `source`, which alone gives one, on all members of the group."""
    nested = None if state is None else (state.training, state.agreed_buffers, state.anchors)
    training, agreed_buffers, anchors = _broadcast_nested(nested, group, waiter, source=source)
    return JoinState(training, agreed_buffers, anchors)


def _broadcast_nested(value: object, group: Group, waiter: CollectiveWaiter, *, source: int) -> Any:
    tensors: Tensors = {}
    header = b""
    if value is not None:
        tree = flatten(value, "state", tensors)
        kinds = {name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()}
        header = json.dumps((tree, kinds)).encode()
    joined = _joined([tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()])
    sizes = torch.tensor([len(header), joined.numel()])
    waiter.wait([broadcast(sizes, group, source=source)])
    text, content = torch.empty(int(sizes[0]), dtype=torch.uint8), torch.empty(int(sizes[1]), dtype=torch.uint8)
    if value is not None:
        text.copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        content = joined
    waiter.wait([broadcast(one, group, source=source) for one in (text, content) if one.numel()])
    tree, kinds = json.loads(text.numpy().tobytes())
    return restore(tree, _divided(content, kinds))


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _divided(content: torch.Tensor, kinds: dict[str, tuple[str, list[int]]]) -> Tensors:
    tensors, start = Tensors(), 0
    for name, (dtype_name, shape) in kinds.items():
        tensor = torch.empty(shape, dtype=getattr(torch, dtype_name))
        flat = tensor.view(-1).view(torch.uint8)
        flat.copy_(content[start : start + flat.numel()])
        tensors[name] = tensor
        start += flat.numel()
    return tensors
