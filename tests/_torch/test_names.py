"""The private names that this library counts on are in this torch, and mean what they should."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

import evenly._torch
from evenly._torch import autograd, clipping, modules, operators, optimizers, process_groups, pytree, tracing


def test_the_room_itself_imports_nothing() -> None:
    text = Path(evenly._torch.__file__).read_text()
    assert "import " not in text.split('"""')[2]


def test_tables_and_hooks_of_modules() -> None:
    held = vars(nn.Module())
    assert set(modules.TABLES) | set(modules.HOOKS) | set(modules.LOAD_HOOKS) <= set(held)
    assert all(hasattr(nn.modules.module, name) for name in modules.GLOBAL_HOOKS)
    assert all(hasattr(nn.Module, name) for name in (*modules.CALL_METHODS, *modules.STATE_METHODS))
    home, _, name = modules.SPECTRAL_NORM.rpartition(".")
    assert home == nn.utils.parametrizations.__name__
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)).parametrizations.weight[0]
    assert type(normed).__name__ == name
    assert set(modules.UNIT_VECTORS) == {name for name, _ in normed.named_buffers()}


def test_classes_of_modules() -> None:
    assert issubclass(nn.BatchNorm2d, modules.BatchNorm)
    assert issubclass(nn.InstanceNorm1d, modules.RunningNorm)
    assert issubclass(nn.Conv3d, modules.Convolution)
    assert issubclass(nn.Dropout1d, modules.Dropout)
    assert modules.uses_one_projection(nn.MultiheadAttention(4, 2))
    assert not modules.uses_one_projection(nn.MultiheadAttention(4, 2, kdim=3))


def test_states_keep_the_versions_of_their_modules() -> None:
    class Noting(nn.Linear):
        def get_extra_state(self) -> int:
            return 1

        def set_extra_state(self, state: int) -> None:
            pass

    state = nn.Sequential(nn.BatchNorm1d(2), Noting(2, 2)).state_dict()
    assert [name for name in state if modules.is_extra_state(name)] == ["1._extra_state"]
    made = type(state)()
    modules.copy_versions(made, {})
    assert not hasattr(made, "_metadata")
    modules.copy_versions(made, state)
    assert made._metadata["0"]["version"] == 2


def test_kept_buffers_are_those_of_the_state() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("passing", torch.ones(1), persistent=False)
    module.register_buffer("empty", None)
    assert {name for name, _ in modules.own_persistent_buffers(module)} == set(module.state_dict()) - {"weight", "bias"}


def test_optimizers() -> None:
    optimizer = torch.optim.Adam(nn.Linear(2, 1).parameters())
    assert optimizers.has_step_hooks(optimizer)
    assert all(name in vars(optimizer) for name in optimizers.STEP_HOOKS)
    before = [len(hooks) for hooks in optimizers.global_step_hooks()]
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    assert [len(hooks) for hooks in optimizers.global_step_hooks()] == [before[0] + 1, before[1]]
    handle.remove()
    StepLR(optimizer, 1)
    assert optimizers.is_scheduler_wrapper(vars(optimizer)["step"], optimizer)
    assert not optimizers.is_scheduler_wrapper(lambda: None, optimizer)
    optimizer.step()
    assert set(vars(optimizer)) >= optimizers.SCHEDULER_NOTES


def test_clipping_has_the_names_that_are_replaced() -> None:
    assert all(hasattr(nn.utils.clip_grad, f"_{name}") for name in (clipping.TOTAL_NORM, clipping.CLIP))


def test_clipping_by_a_function_that_was_imported_before_is_widened_and_two_users_end_in_any_order() -> None:
    from torch.nn.utils import clip_grad_norm_

    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)

    def times(factor: float) -> Callable[[clipping.GetTotalNorm], clipping.GetTotalNorm]:
        return lambda plain: lambda *args, **kwargs: plain(*args, **kwargs) * factor

    first = clipping.widen_clipping(total_norm=times(2.0), clip=lambda plain: plain)
    second = clipping.widen_clipping(total_norm=times(3.0), clip=lambda plain: plain)
    assert clip_grad_norm_([parameter], 100.0) == 12.0
    first()
    second()
    assert clip_grad_norm_([parameter], 100.0) == 2.0
    assert nn.utils.get_total_norm([parameter.grad]) == 2.0


def test_a_backward_has_a_number_and_an_end() -> None:
    x, told = torch.ones(2, requires_grad=True), []
    other = torch.ones(2, requires_grad=True)

    def look(_: torch.Tensor) -> None:
        told.append((autograd.in_backward(), autograd.backward_number() != autograd.NO_BACKWARD))
        told.append((autograd.will_reach(x), autograd.will_reach(other)))
        autograd.at_end_of_backward(lambda: told.append("end"))

    y = x * 2
    y.register_hook(look)
    assert not autograd.in_backward()
    y.sum().backward()
    assert told == [(True, True), (True, False), "end"]
    assert autograd.backward_number() == autograd.NO_BACKWARD


def test_operations_are_numbered_and_writes_counted() -> None:
    x = torch.ones(2, requires_grad=True)
    number = autograd.next_sequence_number()
    y = x * 2
    assert autograd.sequence_number_of(y) >= number > autograd.sequence_number_of(x)
    before = autograd.version_of(y)
    y.add_(1)
    assert autograd.version_of(y) == before + 1


def test_transforms_are_seen() -> None:
    told = []

    def act(x: torch.Tensor) -> torch.Tensor:
        told.append(autograd.in_transform())
        return x.sum()

    torch.func.grad(act)(torch.ones(2))
    with torch.autograd.forward_ad.dual_level():
        act(torch.ones(2))
    act(torch.ones(2))
    assert told == [True, True, False]


def test_operators() -> None:
    op = torch.ops.aten.add_.Tensor
    assert isinstance(op, operators.OpOverload)
    assert operators.operator_name(op) == "aten::add_"
    assert operators.packet_name(torch.ops.aten.add_) == "aten::add_"
    assert operators.argument_names(op) == ["self", "other", "alpha"]
    assert operators.arguments_of(len) == []
    assert operators.out_of_place(op) is torch.ops.aten.add.Tensor
    assert operators.out_of_place(torch.ops.aten.add.Tensor) is None
    left, right = [torch.ones(2)], [torch.ones(2)]
    operators.add_all_(left, right)
    operators.copy_all_(right, left)
    assert right[0].tolist() == [2.0, 2.0]
    assert operators.safe_softmax(torch.full((1, 2), float("-inf"))).tolist() == [[0.0, 0.0]]
    with pytest.raises(RuntimeError):
        operators.assert_async(torch.zeros(1))


def test_exported_graphs() -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"a": x + 1, "b": x * torch.tensor([2.0])}

    program = torch.export.export(Pair(), (torch.ones(2),), strict=False).module()
    spec = tracing.output_spec(program.graph)
    assert pytree.tree_unflatten([1, 2], spec) == {"a": 1, "b": 2}
    traced = torch.fx.symbolic_trace(Pair())
    constants = [name for name in vars(traced) if tracing.is_constant(name)]
    assert constants in ([], [tracing.constant_name(0)]) or "_tensor_constant0" in dict(traced.named_buffers())


def test_the_flight_recorder_can_be_made() -> None:
    process_groups.make_recorder()
    assert hasattr(process_groups.ProcessGroupGloo, "_Options")
