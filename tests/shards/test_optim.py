"""Clipping, Adafactor and LAMB on parameters cut over ranks give the numbers of one device."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from evenly.comm import FailureMonitor, RankGroup, ShardGroup, open_group
from evenly.errors import NonFiniteError, SpecError
from evenly.shards.optim.clipping import clip_grad_norm_
from evenly.shards.optim.optimizers import Adafactor, Lamb, state_placement
from evenly.shards.parts.local_shards import LocalShard, local_shard_of, set_local_shard
from tests.ranks import RankError, run_ranks

Build = Callable[..., Optimizer]
Network = dict[str, torch.nn.Parameter]
Options = dict[str, Any]
Tensors = dict[str, torch.Tensor]

STEPS = 5
WHOLE, UNPLACED = "whole", "unplaced"
NETWORK: dict[str, tuple[tuple[int, ...], int | str]] = {  # name: shape, and the dim that is cut
    "rows": ((5, 6), 0),
    "columns": ((4, 7), 1),
    "thin": ((6, 1), 0),
    "conv_out": ((5, 4, 3, 2), 0),
    "conv_in": ((3, 6, 2, 2), 1),
    "stack_rows": ((2, 5, 3), 1),
    "stack_columns": ((3, 2, 5), 2),
    "bias": ((6,), 0),
    "late": ((4, 5), 0),  # without gradients in the first steps
    "never": ((4, 4), 1),  # without gradients
    "norm": ((7,), WHOLE),
    "head": ((3, 4), WHOLE),
    "scale": ((), WHOLE),
    "extra": ((2, 3), UNPLACED),
}


def deal(size: int, ranks: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Returns uneven cuts with several segments and, from three ranks on, an empty part."""
    return {
        1: (((0, size),),),
        2: (((0, 1), (size - 1, size)), ((1, size - 1),)),
        3: (((1, 3),), (), ((0, 1), (3, size))),
        4: (((size - 1, size),), ((0, 2),), (), ((2, size - 1),)),
    }[ranks]


@contextmanager
def wired(rank_group: RankGroup, name: str = "w") -> Iterator[ShardGroup]:
    shard_group = ShardGroup(
        open_group(rank_group, name, range(rank_group.size), backend="gloo", timeout_s=20),
        FailureMonitor(rank_group),
        timeout_s=20,
    )
    try:
        yield shard_group
    except BaseException as error:
        shard_group.monitor.report(error)
        raise
    finally:
        shard_group.close()


def full_network(dtype: torch.dtype = torch.float64) -> Network:
    draw = torch.Generator().manual_seed(1)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype))
        for name, (shape, _) in NETWORK.items()
    }


def gradients(step: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor | None]:
    draw = torch.Generator().manual_seed(100 + step)
    shapes = {name: shape for name, (shape, _) in NETWORK.items()}
    drawn = {n: torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for n, shape in shapes.items()}
    return {**drawn, "never": None, **({"late": None} if step < 2 else {})}


def cut_network(*shard_groups: ShardGroup, dtype: torch.dtype = torch.float64) -> Network:
    """Returns this rank's parts of the full network, dealt to the wires in turn."""
    network: Network = {}
    for number, (name, full) in enumerate(full_network(dtype).items()):
        dim, shard_group = NETWORK[name][1], shard_groups[number % len(shard_groups)]
        placement = LocalShard(name, full.shape, shard_group)
        if isinstance(dim, int):
            placement = LocalShard(name, full.shape, shard_group, dim, deal(full.shape[dim], shard_group.size))
        network[name] = torch.nn.Parameter(placement.part(full))
        if dim != UNPLACED:
            set_local_shard(network[name], placement)
    return network


def give(network: Network, grads: dict[str, torch.Tensor | None]) -> None:
    for name, parameter in network.items():
        grad, placement = grads[name], local_shard_of(parameter)
        if grad is not None:
            grad = grad.clone() if placement is None else placement.part(grad)
        parameter.grad = grad


def whole(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    placement = local_shard_of(parameter)
    return value.detach().clone() if placement is None else placement.full(value)


def train(network: Network, optimizer: Optimizer) -> None:
    for step in range(STEPS):
        give(network, gradients(step, network["rows"].dtype))
        optimizer.step()


def gathered(network: Network, optimizer: Optimizer) -> Tensors:
    """Returns the full parameters and the full optimizer state, by name."""
    found = {name: whole(parameter, parameter) for name, parameter in network.items()}
    for name, parameter in network.items():
        for key, value in optimizer.state[parameter].items():
            placement = state_placement(optimizer, parameter, key, value)
            found[f"{name}.{key}"] = value.clone() if placement is None else placement.full(value)
            assert placement is None or found[f"{name}.{key}"].shape == placement.shape
    return found


def agree(found: Tensors, truth: Tensors, tolerance: float = 1e-10) -> None:
    assert found.keys() == truth.keys()
    for name, value in truth.items():
        assert found[name].shape == value.shape, name
        assert (found[name] - value).abs().max() <= tolerance * value.abs().max(), name


def alone(build: Build, options: Options, dtype: torch.dtype = torch.float64) -> Tensors:
    network = full_network(dtype)
    optimizer = build(network.values(), **options)
    train(network, optimizer)
    return gathered(network, optimizer)


def together(rank_group: RankGroup, build: Build, options: Options, num_wires: int = 1) -> Tensors:
    with wired(rank_group) as one, wired(rank_group, "v") as other:
        network = cut_network(*(one, other)[:num_wires])
        optimizer = build(network.values(), **options)
        train(network, optimizer)
        return gathered(network, optimizer)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {}),
        (3, {"lr": 0.3, "eps": (None, 1e-3), "d": 1.0}),
        (4, {"lr": 0.05, "eps": (1e-2, 0.5), "d": 1.7, "weight_decay": 0.1}),
        (
            3,
            {"lr": torch.tensor(0.5, dtype=torch.float64), "beta2_decay": -0.3, "weight_decay": 0.02, "maximize": True},
        ),
        (2, {"lr": 1.0, "eps": (1.5, 0.0), "d": 4.0, "foreach": True}),
        (1, {"lr": 0.1}),
    ],
)
def test_adafactor_on_parts_is_torchs_on_the_whole(ranks: int, options: Options) -> None:
    truth = alone(torch.optim.Adafactor, options)
    for found in run_ranks(ranks, together, Adafactor, options):
        agree(found, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adafactor_on_plain_parameters_is_torchs_to_the_last_bit(dtype: torch.dtype) -> None:
    options = {"lr": 0.2, "weight_decay": 0.1}
    agree(alone(Adafactor, options, dtype), alone(torch.optim.Adafactor, options, dtype), 0.0)


def test_adafactor_on_parts_in_bfloat16_is_near_the_whole() -> None:
    def act(rank_group: RankGroup) -> Tensors:
        with wired(rank_group) as shard_group:
            parts = cut_network(shard_group, dtype=torch.bfloat16)
            optimizer = Adafactor(parts.values(), lr=0.1)
            train(parts, optimizer)
            return gathered(parts, optimizer)

    truth = alone(Adafactor, {"lr": 0.1}, torch.bfloat16)
    for found in run_ranks(3, act):
        agree(found, truth, 0.02)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {}),
        (3, {"lr": 0.1, "weight_decay": 0.1}),
        (4, {"lr": 0.05, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.5}),
    ],
)
def test_lamb_on_parts_is_lamb_on_the_whole(ranks: int, options: Options) -> None:
    truth = alone(Lamb, options)
    for found in run_ranks(ranks, together, Lamb, options):
        agree(found, truth)


def test_lamb_follows_its_formula() -> None:
    x = torch.tensor([3.0, 4.0], dtype=torch.float64)
    weight = torch.nn.Parameter(x.clone())
    optimizer = Lamb([weight], lr=0.1, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.01)
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    for t in range(1, 4):
        g = torch.tensor([1.0, -2.0], dtype=torch.float64) * t
        weight.grad = g.clone()
        optimizer.step()
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        u = (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-6) + 0.01 * x
        x = x - 0.1 * x.norm() / u.norm() * u
    torch.testing.assert_close(weight.detach(), x, rtol=1e-12, atol=0)


def test_lamb_takes_plain_steps_where_a_norm_is_zero() -> None:
    fresh, still = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.ones(2))
    fresh.grad, still.grad = torch.ones(2), torch.zeros(2)
    Lamb([fresh, still], lr=0.1).step()
    torch.testing.assert_close(fresh.detach(), torch.full((2,), -0.1))
    assert torch.equal(still.detach(), torch.ones(2))


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1.0}, {"weight_decay": -1.0}])
def test_lamb_refuses_numbers_out_of_range(wrong: Options) -> None:
    with pytest.raises(SpecError, match="out of range"):
        Lamb([torch.nn.Parameter(torch.ones(2))], **wrong)


@pytest.mark.parametrize("build", [Adafactor, Lamb])
def test_sparse_gradients_are_refused(build: Build) -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(SpecError, match="sparse"):
        build([weight]).step()


@pytest.mark.parametrize("build", [Adafactor, Lamb])
def test_a_closure_is_called_with_autograd_and_its_loss_returned(build: Build) -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))

    def closure() -> float:
        weight.grad = None
        loss = (weight**2).sum()
        loss.backward()
        return loss.item()

    assert build([weight]).step(closure) == 4.0
    assert (weight < 1).all()


@pytest.mark.parametrize("build", [Adafactor, Lamb])
def test_a_step_goes_on_from_a_saved_state(build: Build) -> None:
    def act(rank_group: RankGroup) -> tuple[Tensors, Tensors]:
        with wired(rank_group) as shard_group:
            straight, broken = cut_network(shard_group), cut_network(shard_group)
            first, second = build(straight.values(), lr=0.1), build(broken.values(), lr=0.1)
            train(straight, first), train(broken, second)
            resumed = build(broken.values(), lr=0.5)
            resumed.load_state_dict(second.state_dict())
            train(straight, first), train(broken, resumed)
            return gathered(straight, first), gathered(broken, resumed)

    for straight, broken in run_ranks(3, act):
        agree(broken, straight, 0.0)


def test_a_step_or_a_clipping_sends_few_messages() -> None:
    def act(rank_group: RankGroup) -> list[int]:
        counts = []
        with wired(rank_group) as shard_group:
            network = cut_network(shard_group)
            factored, lamb = Adafactor(network.values()), Lamb(network.values())
            give(network, gradients(3))
            for deed in (factored.step, lamb.step, lambda: clip_grad_norm_(network.values(), 1.0)):
                shard_group.traffic.clear()
                deed()
                counts.append(shard_group.traffic.messages)
            give(network, dict.fromkeys(NETWORK))
            shard_group.traffic.clear()
            factored.step(), lamb.step(), clip_grad_norm_(network.values(), 1.0)
            return [*counts, shard_group.traffic.messages]

    assert run_ranks(2, act) == [[2, 1, 1, 0]] * 2


def clipped(rank_group: RankGroup, max_norm: float, p: float, num_wires: int) -> tuple[torch.Tensor, Tensors]:
    with wired(rank_group) as one, wired(rank_group, "v") as other:
        network = cut_network(*(one, other)[:num_wires])
        give(network, gradients(0))
        norm = clip_grad_norm_(iter(network.values()), max_norm, p)
        return norm, {name: whole(w, w.grad) for name, w in network.items() if w.grad is not None}


@pytest.mark.parametrize("p", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize(("ranks", "num_wires", "max_norm"), [(2, 1, 1.0), (4, 1, 0.5), (3, 2, 1.0), (3, 1, 1e6)])
def test_clipping_parts_is_clipping_the_whole(p: float, ranks: int, num_wires: int, max_norm: float) -> None:
    network = full_network()
    give(network, gradients(0))
    norm = torch.nn.utils.clip_grad_norm_(network.values(), max_norm, p)
    truth = {name: w.grad for name, w in network.items() if w.grad is not None}
    results = run_ranks(ranks, clipped, max_norm, p, num_wires)
    for found, grads in results:
        assert found.item() == results[0][0].item()
        torch.testing.assert_close(found, norm, rtol=1e-12, atol=0)
        agree(grads, truth, 1e-12)


@pytest.mark.parametrize("build", [Adafactor, Lamb])
def test_parameters_may_lie_on_two_wires(build: Build) -> None:
    truth = alone(build, {"lr": 0.1})
    for found in run_ranks(3, together, build, {"lr": 0.1}, 2):
        agree(found, truth)


@pytest.mark.parametrize("p", [2.0, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_seen_by_all(p: float, bad: float) -> None:
    def act(rank_group: RankGroup, strict: bool) -> float:
        with wired(rank_group) as shard_group:
            network = cut_network(shard_group)
            grads = gradients(0)
            assert grads["rows"] is not None
            grads["rows"][0, 0] = bad
            give(network, grads)
            return clip_grad_norm_(network.values(), 1.0, p, error_if_nonfinite=strict).item()

    assert run_ranks(3, act, False) == pytest.approx([bad] * 3, nan_ok=True)
    with pytest.raises(RankError) as caught:
        run_ranks(3, act, True)
    assert all(isinstance(error, NonFiniteError) for error in caught.value.errors)


def test_clipping_without_cut_parameters_is_torchs() -> None:
    ours, theirs = full_network(), full_network()
    give(ours, gradients(0)), give(theirs, gradients(0))
    found = clip_grad_norm_(ours.values(), 0.3, 0.0)
    assert torch.equal(found, torch.nn.utils.clip_grad_norm_(theirs.values(), 0.3, 0.0))
    assert all(torch.equal(ours[n].grad, theirs[n].grad) for n in NETWORK if ours[n].grad is not None)
    assert clip_grad_norm_([], 1.0).item() == 0.0
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.tensor([math.inf])
    with pytest.raises(NonFiniteError, match="inf"):
        clip_grad_norm_(weight, 1.0, error_if_nonfinite=True)
    assert weight.grad.item() == math.inf


def test_a_norm_that_parts_cannot_give_is_refused() -> None:
    def act(rank_group: RankGroup) -> None:
        with wired(rank_group) as shard_group:
            network = cut_network(shard_group)
            give(network, gradients(0))
            with pytest.raises(SpecError, match="norm_type=0"):
                clip_grad_norm_(network.values(), 1.0, 0.0)

    run_ranks(2, act)


def test_clipping_keeps_the_gradients_precision() -> None:
    drawn = gradients(0, torch.float16)
    grads = {name: None if grad is None else grad * 100 for name, grad in drawn.items()}

    def act(rank_group: RankGroup) -> tuple[torch.dtype, float]:
        with wired(rank_group) as shard_group:
            network = cut_network(shard_group, dtype=torch.float16)
            give(network, grads)
            norm = clip_grad_norm_(network.values(), 1.0)
        return norm.dtype, norm.item()

    truth = torch.cat([grad.double().flatten() for grad in grads.values() if grad is not None]).norm().item()
    for found in run_ranks(2, act):
        assert found == (torch.float16, pytest.approx(truth, rel=1e-3))  # whose square float16 cannot hold


def test_a_state_entry_lies_as_its_parameter_or_without_the_dim_it_lost() -> None:
    def act(rank_group: RankGroup) -> None:
        with wired(rank_group) as shard_group:
            network = cut_network(shard_group)
            optimizer = Adafactor(network.values())
            train(network, optimizer)

            def dims(name: str) -> list[tuple[int | None, tuple[int, ...]] | None]:
                state = optimizer.state[network[name]]
                found = [state_placement(optimizer, network[name], key, state[key]) for key in ("row_var", "col_var")]
                return [one and (one.dim, tuple(one.shape)) for one in found]

            assert dims("rows") == [(0, (5, 1)), (None, (1, 6))]
            assert dims("columns") == [(None, (4, 1)), (1, (1, 7))]
            assert dims("conv_out") == [(0, (5, 4, 3, 1)), (0, (5, 4, 1, 2))]
            assert dims("stack_rows") == [(1, (2, 5, 1)), (None, (2, 1, 3))]
            assert dims("head") == [(None, (3, 1)), (None, (1, 4))]
            assert dims("extra") == [None, None]
            adam = torch.optim.Adam(network.values(), amsgrad=True)
            train(network, adam)
            for name, parameter in network.items():
                for key, value in adam.state[parameter].items():
                    truth = None if key == "step" else local_shard_of(parameter)
                    assert state_placement(adam, parameter, key, value) is truth, (name, key)
            assert state_placement(adam, network["rows"], "note", 3) is None

    run_ranks(3, act)
