"""Rules apply only where the code that runs is torch's own; all other code is followed, or computed whole."""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F  # noqa: N812

from evenly.graph import trace
from tests.shards.playing import Act, play

TOKENS = torch.randn(4, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
ROWS = TOKENS[:, 0]
SHARES = [3, 2]


class DoubledAttention(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mixed, weights = super().forward(*args, **kwargs)
        return mixed * 2, weights


class ShiftedGate(nn.GLU):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


class OtherFeed(nn.TransformerEncoderLayer):
    def _ff_block(self, x: Tensor) -> Tensor:
        return super()._ff_block(x) * 3


class OtherAttention(nn.TransformerEncoderLayer):
    def _sa_block(self, *args: Any, **kwargs: Any) -> Tensor:
        return super()._sa_block(*args, **kwargs) * 3


class LoudEncoder(nn.TransformerEncoder):
    def forward(self, src: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(src) * 2


class LoudDecoder(nn.TransformerDecoder):
    def forward(self, tgt: Tensor, memory: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return super().forward(tgt, memory, **kwargs) * 2


class CalledTwice(nn.Linear):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * 2


class Attending(nn.Module):
    def __init__(self, kind: type[nn.MultiheadAttention] = DoubledAttention) -> None:
        super().__init__()
        self.attend, self.out = kind(8, 4, batch_first=True), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.attend(x, x, x, need_weights=False)[0])
        return out


class Decoding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decode = LoudDecoder(nn.TransformerDecoderLayer(8, 2, 12, 0.0, batch_first=True), 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.decode(x, x)
        return out


def between(part: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), part, nn.Linear(4 if isinstance(part, nn.GLU) else 8, 8))


def patched(part: nn.Module, name: str, make: Callable[[Any], Any]) -> nn.Module:
    setattr(part, name, make(getattr(part, name)))
    return part


def tripled(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: own(*args, **kwargs) * 3


def by_method(part: nn.Module) -> nn.Module:
    plain = type(part).forward
    vars(part)["forward"] = MethodType(lambda self, x: plain(self, x) + x.mean(), part)
    return part


def layer(kind: type[nn.TransformerEncoderLayer] = nn.TransformerEncoderLayer) -> nn.TransformerEncoderLayer:
    return kind(8, 2, 12, 0.0, batch_first=True)


REWRITTEN: dict[str, Callable[[], nn.Module]] = {
    "attention": Attending,
    "patched attention": lambda: patched(
        Attending(nn.MultiheadAttention).attend,
        "forward",
        lambda own: lambda x: own(x, x, x, need_weights=False)[0] * 3,
    ),
    "gate": lambda: between(ShiftedGate()),
    "patched gate": lambda: between(patched(nn.GLU(), "forward", tripled)),
    "feed": lambda: layer(OtherFeed),
    "attention of a layer": lambda: layer(OtherAttention),
    "patched feed": lambda: patched(layer(), "_ff_block", tripled),
    "encoder": lambda: LoudEncoder(layer(), 2, enable_nested_tensor=False),
    "layers of an encoder": lambda: nn.TransformerEncoder(layer(OtherFeed), 2, enable_nested_tensor=False),
    "decoder": Decoding,
    "patched activation": lambda: between(patched(nn.ReLU(), "forward", tripled)),
    "patched normalization": lambda: between(patched(nn.LayerNorm(8), "forward", tripled)),
    "patched softmax": lambda: between(by_method(nn.Softmax(-1))),
    "patched linear": lambda: between(patched(nn.Linear(8, 8), "forward", tripled)),
    "patched sequence": lambda: between(patched(between(nn.ReLU()), "forward", tripled)),
    "patched dropout": lambda: between(patched(nn.Dropout(0.5), "forward", lambda own: lambda x: x * 2)),
}


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


QUICK = {"attention", "gate", "feed", "patched activation", "patched softmax", "patched sequence"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in REWRITTEN]
)
def test_code_that_is_put_in_place_of_torchs_runs(name: str) -> None:
    acts = [Act(TOKENS), Act(TOKENS[:3]), Act(TOKENS, lambda m: m.eval(), trains=False)]
    assert play(partial(build, REWRITTEN[name]), TOKENS, SHARES, acts) == ""


def test_a_patched_batch_norm_is_followed() -> None:
    parts = lambda: (nn.Linear(8, 8), patched(nn.BatchNorm1d(8), "forward", tripled), nn.Linear(8, 3))  # noqa: E731
    said = play(partial(build, lambda: nn.Sequential(*parts())), ROWS, SHARES, [Act(ROWS)])
    assert said == ""


def test_another_way_to_be_called_is_followed_or_refused_by_name() -> None:
    assert play(partial(build, lambda: between(CalledTwice(8, 8))), ROWS, SHARES, [Act(ROWS)]) == ""
    said = play(partial(build, lambda: CalledTwice(8, 8)), ROWS, SHARES, [Act(ROWS)])
    assert "CalledTwice" in said
    assert "__call__" in said


def test_a_subclass_that_changes_nothing_is_cut_as_torchs() -> None:
    class Named(nn.TransformerEncoderLayer):
        """Another name, nothing else."""

        def extra_repr(self) -> str:
            return "named"

    kinds = [[x.op for x in trace(build(partial(layer, kind)), TOKENS).layers] for kind in (Named, type(layer()))]
    assert kinds[0] == kinds[1]
    assert "attention" in kinds[0]


@fx.wrap
def square(x: Tensor) -> Tensor:
    return x / x.abs().sum(-1, keepdim=True)


@torch.library.custom_op("evenly_tests::clip", mutates_args=())
def clip(x: Tensor) -> Tensor:
    return x / x.abs().sum(-1, keepdim=True)


@clip.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def clip_backward(ctx: Any, gradient: Tensor) -> Tensor:
    with torch.enable_grad():
        x = ctx.saved_tensors[0].detach().requires_grad_()
        return torch.autograd.grad(square(x), x, gradient)[0]


clip.register_autograd(clip_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]))


class Custom(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(8, 6), nn.Linear(6, 4), act

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.act(self.first(x)))
        return out


class Wrapping(Custom):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(square(self.first(x)))
        return out


@fx.wrap
def on_values(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


class WrappingValues(Custom):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(on_values(self.first(x)))
        return out


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return square(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


own_square = Own.apply  # as many write it


class ByName(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = own_square(x)
        return out


class Called:
    __name__ = "relu"

    def __call__(self, x: Tensor) -> Tensor:
        return torch.relu(x) + x.mean()


CUSTOM: dict[str, Callable[[], nn.Module]] = {
    "operator": lambda: Custom(torch.ops.evenly_tests.clip),
    "overload": lambda: Custom(torch.ops.evenly_tests.clip.default),
    "autograd function": lambda: nn.Sequential(nn.Linear(8, 6), ByName(), nn.Linear(6, 4)),
}


@pytest.mark.parametrize("name", CUSTOM)
def test_operations_with_a_name_of_torchs_are_computed_whole(name: str) -> None:
    model = build(CUSTOM[name])
    graph = trace(model, ROWS)
    whole = [x for x in graph.layers if x.op == "opaque"]
    assert len(whole) == 1
    assert whole[0].note in graph.explain()
    assert "rule" in whole[0].note or "autograd function" in whole[0].note
    assert play(partial(build, CUSTOM[name]), ROWS, SHARES, [Act(ROWS), Act(ROWS[:3])]) == ""


def test_a_function_that_fx_does_not_trace_is_traced_or_computed_whole() -> None:
    assert not [x for x in trace(build(lambda: Wrapping(torch.relu)), ROWS).layers if x.op == "opaque"]
    for kind in (Wrapping, WrappingValues):
        assert play(partial(build, partial(kind, torch.relu)), ROWS, SHARES, [Act(ROWS), Act(ROWS[:3])]) == ""
    whole = [x.note for x in trace(build(lambda: WrappingValues(torch.relu)), ROWS).layers if x.op == "opaque"]
    assert len(whole) == 1
    assert "on_values has no rule" in whole[0]


def test_a_callable_object_with_a_name_of_torchs_is_followed() -> None:
    assert play(partial(build, lambda: Custom(Called())), ROWS, SHARES, [Act(ROWS)]) == ""


class Odd(Tensor):
    def relu(self) -> Tensor:
        return F.relu(self) + 1


class Methods(Custom):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x.relu()))
        return out


@pytest.mark.parametrize("acts", [[Act(ROWS.as_subclass(Odd))], [Act(ROWS), Act(ROWS.as_subclass(Odd))]])
def test_a_subclass_of_tensor_is_refused_by_name(acts: list[Act]) -> None:
    assert "Odd" in play(partial(build, lambda: Methods(torch.relu)), acts[0].batch, SHARES, acts)


def test_a_parameter_of_a_subclass_of_tensor_is_refused_by_name() -> None:
    def odd() -> nn.Module:
        model = nn.Linear(8, 4)
        model.weight = nn.Parameter(model.weight.data.as_subclass(Odd))
        return model

    assert "weight" in play(partial(build, odd), ROWS, SHARES, [Act(ROWS)])
