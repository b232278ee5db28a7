"""Calls of a module go elsewhere, and are as they were afterwards."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from evenly._torch.calls import redirect_calls


class Doubling(nn.Module):
    """Calls what it is given, and doubles the result."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.module(x)


def redirected(module: nn.Module) -> Callable[[], None]:
    return redirect_calls(module, Doubling(module))


def test_calls_go_to_the_target_which_calls_the_module_with_its_hooks_once() -> None:
    outer = nn.Sequential(nn.Linear(2, 2))
    seen: list[torch.Tensor] = []
    outer[0].register_forward_hook(lambda module, args, output: seen.append(output))
    x = torch.ones(1, 2)
    plain = outer(x)
    undo = redirected(outer[0])
    assert torch.equal(outer(x), 2 * plain)
    assert torch.equal(outer[0](x), 2 * plain)
    assert len(seen) == 3
    undo()
    assert torch.equal(outer(x), plain)


def test_copies_and_pickles_are_plain_and_a_failed_call_changes_nothing() -> None:
    module = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    plain = module(x)
    undo = redirected(module)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), plain)
    with pytest.raises(RuntimeError):
        module(torch.ones(1, 3))
    assert torch.equal(module(x), 2 * plain)
    undo()


def test_a_redirect_that_was_replaced_is_not_undone() -> None:
    module = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    plain = module(x)
    first, second = redirected(module), redirected(module)
    first()
    assert torch.equal(module(x), 4 * plain)
    second()
    first()
    assert torch.equal(module(x), plain)
