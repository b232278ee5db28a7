"""Outside of forward and the optimizer, parameters of a cut network give what one device gives, or refuse by name."""

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.utils import prune

from evenly.comm import RankGroup
from evenly.errors import EvenlyError, SpecError
from evenly.shards import full_state_dict, local_shard_of, shard_model
from tests.ranks import run_ranks
from tests.shards.compare import compare as compare_shards

Act = Callable[[nn.Module, torch.Tensor], Any]
DATA = torch.randn(5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3


class Network(nn.Module):
    """Layers with names, a norm with buffers, and more than one layer that is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.fc = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.features(x))


def network() -> nn.Module:
    draw = torch.Generator().manual_seed(0)
    model = Network().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return model


def train(model: nn.Module, act: Act) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Returns the full state after some steps, and what `act` returned; a tensor that requires a gradient is a loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    told = []
    for _ in range(2):
        result = act(model, DATA)
        loss = model(DATA).square().mean()
        if isinstance(result, torch.Tensor) and result.requires_grad:
            loss = loss + result
        told.append(result.detach() if isinstance(result, torch.Tensor) else result)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = full_state_dict(model)["model"] if hasattr(model, "layout") else model.state_dict()
    return dict(state), told


def cut_over(rank_group: RankGroup, shares: list[int]) -> nn.Module:
    model = shard_model(network(), DATA, rank_group=rank_group, shares=shares, timeout_s=20.0)
    assert rank_group.rank or local_shard_of(model.fc.weight).is_cut
    return model


def compare(act: Act, ours: Act | None = None) -> None:
    """Trains on one device, and with `ours` on two; asserts the same numbers."""
    truth, told = train(network(), act)

    def on_rank(rank_group: RankGroup) -> tuple[dict[str, torch.Tensor], list[Any]]:
        model = cut_over(rank_group, [3, 1])
        try:
            return train(model, ours or act)
        finally:
            model.close()

    for found, said in run_ranks(2, on_rank):
        torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(said, told, rtol=1e-10, atol=1e-12)


def _each(act: Callable[[torch.Tensor], Any]) -> Act:
    return lambda model, _: [act(p) for p in model.parameters()] and None


def _without_grad(act: Callable[[torch.Tensor], Any]) -> Act:
    @torch.no_grad()
    def run(model: nn.Module, _: Any) -> None:
        for parameter in model.parameters():
            act(parameter)

    return run


def draw(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.reset_parameters()


CHANGING = ("a hook on gradients", "a hook behind backward", "pruned", "weight norm", "spectral norm")
REFUSED: dict[str, Act] = {
    "norm in a loss": lambda m, _: 0.1 * m.fc.weight.norm(),
    "largest in a loss": lambda m, _: m.fc.weight.abs().max(),
    "spread in a loss": lambda m, _: m.fc.weight.std(),
    "decay by hand": lambda m, _: sum((p**2).sum() for p in m.parameters()),
    "lasso": lambda m, _: sum(p.abs().sum() for p in m.parameters()),
    "towards a start": lambda m, _: sum(F.mse_loss(p, torch.zeros_like(p)) for p in m.parameters()),
    "orthogonal": lambda m, _: (m.fc.weight @ m.fc.weight.T - torch.eye(6)).square().sum(),
    "a layer": lambda m, _: m.fc(torch.ones(2, 8, dtype=torch.float64)).sum(),
    "a block": lambda m, x: m.features(x).sum(),
    "a layer of a block": lambda m, x: m.features[0](x).sum(),
    "a norm layer": lambda m, _: m.features[1](torch.ones(2, 8, dtype=torch.float64)).sum(),
    "a function": lambda m, x: F.linear(x, m.features[0].weight).sum(),
    "of the network's class": lambda m, x: Network.forward(m, x).sum(),
    "one element": lambda m, _: m.fc.weight[0, 0],
    "norm logged": _without_grad(lambda p: p.norm()),
    "norm of data logged": _each(lambda p: p.data.norm()),
    "norm of a copy": _each(lambda p: copy.deepcopy(p).norm()),
    "norm of a detached copy": _each(lambda p: p.detach().clone().norm()),
    "norm of a state": lambda m, _: [x.norm() for x in m.state_dict().values()],
    "mean logged": _without_grad(lambda p: p.mean().item()),
    "a buffer": lambda m, _: m.features[1].running_var.mean(),
    "together": lambda m, _: torch._foreach_norm(list(m.parameters())),
    "vector": lambda m, _: nn.utils.parameters_to_vector(m.parameters()).norm(),
    "finite": lambda m, _: all(bool(p.isfinite().all()) for p in m.parameters()),
    "drawn by fan": lambda m, _: nn.init.xavier_uniform_(m.fc.weight) and None,
    "drawn": lambda m, _: nn.init.normal_(m.fc.weight) and None,
    "drawn anew": lambda m, _: m.fc.reset_parameters(),
    "drawn everywhere": lambda m, _: m.apply(draw) and None,
    "noise": _without_grad(lambda p: p.add_(torch.randn_like(p))),
    "weights projected": _without_grad(lambda p: p.div_(p.norm())),
    "rows limited": _without_grad(lambda p: p.renorm_(2, 0, 1.0)),
    "pruned": lambda m, _: prune.l1_unstructured(m.fc, "weight", amount=0.3) and None,
    "weight norm": lambda m, _: nn.utils.parametrizations.weight_norm(m.fc) and None,
    "spectral norm": lambda m, _: nn.utils.parametrizations.spectral_norm(m.fc) and None,
    "a hook on gradients": lambda m, x: m.fc.weight.register_hook(lambda g: g / g.norm()) and m(x).sum(),
    "a hook behind backward": lambda m, x: (
        m.fc.weight.register_post_accumulate_grad_hook(lambda p: p.grad.div_(p.grad.norm())) and m(x).sum()
    ),
    "gradients by hand": lambda m, x: [g.norm() for g in torch.autograd.grad(m(x).sum(), list(m.parameters()))],
    "sorted": lambda m, _: m.fc.weight.flatten().sort().values[0],
    "averaged model": lambda m, _: torch.optim.swa_utils.AveragedModel(m) and None,
    "deep copy of a layer": lambda m, _: copy.deepcopy(m.fc)(torch.ones(2, 8, dtype=torch.float64)).sum(),
}  # fmt: skip


def outcome(acts: Sequence[Act], shares: list[int]) -> list[list[str]]:
    """Returns for each rank how each was refused, up to the first that was not."""

    def on_rank(rank_group: RankGroup) -> list[str]:
        model = cut_over(rank_group, shares)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        told: list[str] = []
        try:
            for act in acts:
                told.append(refused(act, model, optimizer))
                if told[-1] != "refused":
                    break
        finally:
            model.close()
        return told

    return run_ranks(len(shares), on_rank)


def refused(act: Act, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    try:
        result = act(model, DATA)
        if isinstance(result, torch.Tensor) and result.requires_grad:
            result.backward()
            optimizer.step()
    except EvenlyError as error:
        return "refused" if "cut over ranks" in str(error) else f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"got {result}"


@pytest.mark.parametrize("shares", [[3, 1], [3, 0, 1]], ids=str)
def test_what_a_part_cannot_give_is_refused_on_all_ranks(shares: list[int]) -> None:
    names = [name for name in REFUSED if name not in CHANGING]
    for told in outcome([REFUSED[name] for name in names], shares):
        assert dict(zip(names, told, strict=False)) == dict.fromkeys(names, "refused")


@pytest.mark.parametrize("name", CHANGING)
def test_what_would_change_a_layer_by_its_part_is_refused(name: str) -> None:
    assert outcome([REFUSED[name]], [3, 1]) == [["refused"], ["refused"]]


@torch.no_grad()
def average(model: nn.Module, _: Any) -> None:
    """An exponential average by hand, put into the network half of the way."""
    shadow = vars(model).setdefault("shadow", {name: p.detach().clone() for name, p in model.named_parameters()})
    for name, parameter in model.named_parameters():
        shadow[name].mul_(0.9).add_(parameter, alpha=0.1)
        parameter.lerp_(shadow[name], 0.5)


def average_together(model: nn.Module, _: Any) -> None:
    mean = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    parameters = [p.detach() for p in model.parameters()]
    shadow = vars(model).setdefault("shadow", [p.clone() * 0.5 for p in parameters])
    mean(shadow, parameters, 1)
    torch._foreach_copy_(parameters, shadow)


def save_and_load(model: nn.Module, _: Any) -> None:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict({name: tensor * 0.9 for name, tensor in torch.load(file).items()})


def set_back(model: nn.Module, _: Any) -> None:
    with torch.no_grad():
        model.fc.weight.fill_(0.5)
    nn.init.zeros_(model.features[1].bias)
    nn.init.constant_(model.features[0].bias, 0.1)
    model.features[1].running_mean.zero_()
    model.fc.weight.data = model.fc.weight.data * 2.0


def freeze(model: nn.Module, _: Any) -> None:
    model.fc.requires_grad_(False)
    model.features[0].weight.requires_grad = False


def descend(model: nn.Module, x: torch.Tensor) -> None:
    """A step of plain gradient descent by hand."""
    grads = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    with torch.no_grad():
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter -= 0.1 * grad


def hook(model: nn.Module, _: Any) -> None:
    if not model.fc.weight._backward_hooks:
        model.fc.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        model.features[0].weight.register_post_accumulate_grad_hook(halve)


def halve(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(0.5)


def look(model: nn.Module, _: Any) -> None:
    """What people print and count is there."""
    assert "Parameter containing" in repr(model.fc.weight)
    parameters = [*model.parameters()]
    assert all(p.numel() == p.shape.numel() and p.is_leaf and p.dtype == p.data.dtype for p in parameters)
    assert sum(len(p.tolist()) == len(p) for p in parameters) == len(parameters)
    assert all(isinstance(copy.deepcopy(p), nn.Parameter) for p in parameters)
    assert model.fc.weight.as_subclass(torch.Tensor).norm() > 0


EXACT: dict[str, Act] = {
    "averaged": average,
    "averaged together": average_together,
    "saved and loaded": save_and_load,
    "set back": set_back,
    "frozen": freeze,
    "descended by hand": descend,
    "hooks": hook,
    "looked at": look,
    "norm of all": lambda m, _: nn.utils.get_total_norm(m.parameters()),
    "largest of all": lambda m, _: nn.utils.get_total_norm(m.parameters(), float("inf")),
    "limited": _without_grad(lambda p: p.clamp_(-1.0, 1.0)),
    "decayed": _without_grad(lambda p: p.mul_(0.99)),
    "a whole layer by itself": lambda m, _: (m.fc.bias**2).sum(),
    "assigned": _each(lambda p: setattr(p, "data", p.data * 0.9)),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_treats_each_element_alone_gives_the_numbers_of_one_device(name: str) -> None:
    compare(EXACT[name])


class Penalized(Network):
    """Returns a penalty with the output."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        decay = sum((p**2).sum() for p in (self.fc.weight, self.features[0].weight, self.features[0].bias))
        return super().forward(x), 0.1 * self.fc.weight.norm() + 0.01 * decay + self.features[0].weight.abs().max()


def test_a_penalty_inside_forward_is_that_of_the_whole_network() -> None:
    truth = compare_shards(lambda: Penalized().double(), DATA, [3, 1])
    assert truth.shares == (3, 1)


@pytest.mark.parametrize("add", [lambda x, w: x * w, torch.add, lambda x, w: x.copy_(w)], ids=["*", "add", "copy_"])
def test_a_part_is_not_repeated_to_fit_a_whole_tensor(add: Any) -> None:
    def on_rank(rank_group: RankGroup) -> None:
        model = shard_model(
            nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 3)).double(), DATA, rank_group=rank_group, shares=[1, 1]
        )
        bias = model.get_parameter("0.bias")
        assert bias.shape == (1,)
        with pytest.raises(SpecError, match=r"\[5, 2\] and \[1\].*'0.bias'"), torch.no_grad():
            add(torch.ones(5, 2, dtype=torch.float64), bias)
        model.close()

    run_ranks(2, on_rank)


def test_an_error_in_a_step_leaves_parameters_guarded_at_the_next_call() -> None:
    def on_rank(rank_group: RankGroup) -> None:
        model = cut_over(rank_group, [3, 1])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure() -> float:
            with pytest.raises(SpecError, match="norm"):
                model.fc.weight.norm()
            raise KeyError("a fault of the user's")

        with pytest.raises(KeyError):
            optimizer.step(closure)
        model(DATA)
        with pytest.raises(SpecError, match="norm"):
            model.fc.weight.norm()
        model.double().to("cpu")
        with pytest.raises(SpecError, match="norm"):
            model.features[1].running_var.norm()
        model.close()

    run_ranks(2, on_rank)
