"""AngularGrad makes the steps of its published equations."""

import math
import pickle

import pytest
import torch
from torch import nn

from evenly.errors import SpecError
from evenly.recipes.optim.angulargrad import AngularGrad

SETTINGS = [
    {"lr": 0.1},
    {"lr": 0.05, "betas": (0.5, 0.9), "eps": 1e-3},
    {"lr": 0.1, "weight_decay": 0.3},
    {"lr": 0.1, "lambdas": (0.8, 0.1)},
]


def by_hand(theta, gradients, *, angle, lr, betas=(0.9, 0.999), eps=1e-8, lambdas=(0.5, 0.5), weight_decay=0.0):
    """Yields one number after every step, computed in the order of the equations, without torch."""
    m = v = previous = 0.0
    previous_angle = math.inf
    for t, gradient in enumerate(gradients, start=1):
        g = gradient + weight_decay * theta
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        slope = 1 + g * previous
        now = math.atan(abs((g - previous) / slope)) if slope else math.pi / 2
        narrowest = min(previous_angle, now)
        function = math.cos(narrowest) if angle == "cos" else math.tan(narrowest)
        phi = lambdas[0] * math.tanh(abs(function)) + lambdas[1]
        corrected, root = m / (1 - betas[0] ** t), math.sqrt(v / (1 - betas[1] ** t))
        theta -= lr * phi * corrected / (root + eps)
        previous, previous_angle = g, now
        yield theta


def steps(optimizer, parameter, gradients):
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
        yield parameter.detach().clone()


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("angle", ["cos", "tan"])
def test_every_element_follows_the_equations(angle, settings):
    start, gradients = draw(3, 4), draw(9, 3, 4, seed=1) * draw(9, 3, 4, seed=2).exp()
    gradients[4] = gradients[3]  # an angle of 0, but for weight decay
    gradients[6, 0] = 0.0
    gradients[8, 1] = -1 / gradients[7, 1]  # a right angle, where slopes are divided by 0
    parameter = nn.Parameter(start.clone())
    found = torch.stack(list(steps(AngularGrad([parameter], angle=angle, **settings), parameter, gradients)))
    for row in range(3):
        for column in range(4):
            numbers = [float(g) for g in gradients[:, row, column]]
            expected = list(by_hand(float(start[row, column]), numbers, angle=angle, **settings))
            torch.testing.assert_close(found[:, row, column].tolist(), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("angle", "coefficient"), [("cos", math.tanh(1) / 2 + 0.5), ("tan", 0.5)])
def test_with_equal_gradients_it_is_adam_at_a_smaller_rate(angle, coefficient):
    """The angle between equal gradients is 0."""
    ours, adams = nn.Parameter(draw(5)), nn.Parameter(draw(5))
    gradients = draw(5, seed=3).expand(6, 5) * 1e-5  # so small that the first angle, from 0, is almost 0, too
    optimizers = AngularGrad([ours], 0.1, angle=angle), torch.optim.Adam([adams], 0.1 * coefficient)
    for a, b in zip(steps(optimizers[0], ours, gradients), steps(optimizers[1], adams, gradients), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("angle", ["cos", "tan"])
def test_narrow_numbers_follow_wide_ones(angle, dtype):
    tolerance = {torch.float64: 0.0, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    gradients = draw(5, 20, seed=4)
    wide, narrow = nn.Parameter(draw(20)), nn.Parameter(draw(20, dtype=dtype))
    *_, expected = steps(AngularGrad([wide], 0.1, angle=angle), wide, gradients)
    optimizer = AngularGrad([narrow], 0.1, angle=angle)
    *_, found = steps(optimizer, narrow, gradients.to(dtype))
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    state = optimizer.state[narrow]
    assert {name for name, value in state.items() if value.dtype == dtype and value.shape == narrow.shape} == {
        "exp_avg", "exp_avg_sq", "previous_grad", "previous_complement"
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_saved_state_goes_on_bit_for_bit(dtype):
    gradients = draw(8, 3, 2, seed=5, dtype=dtype)
    whole, cut = (nn.Parameter(draw(3, 2, dtype=dtype)) for _ in range(2))
    *_, expected = steps(AngularGrad([whole], 0.1, angle="tan"), whole, gradients)
    first = AngularGrad([cut], 0.1, angle="tan")
    list(steps(first, cut, gradients[:4]))
    second = AngularGrad([cut], 0.7)
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    *_, found = steps(second, cut, gradients[4:])
    assert torch.equal(found, expected)


def test_huge_and_tiny_gradients_give_finite_steps():
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = AngularGrad([parameter], 0.1, angle="tan")
    for scale in (1e-30, 1e18, -1e18, 0.0, 1e-30):
        parameter.grad = torch.tensor([1.0, -1.0, 1e-8, 0.0]) * scale
        optimizer.step()
        assert parameter.isfinite().all()


def test_a_parameter_without_a_gradient_stays_and_a_closure_is_called():
    used, idle = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = AngularGrad([used, idle], 0.1)

    def closure():
        optimizer.zero_grad()
        loss = used.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert idle.tolist() == [1.0, 1.0]
    assert set(optimizer.state) == {used}
    assert used[0] < 1


def test_sparse_gradients_and_complex_parameters_are_refused():
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(SpecError, match=r"parameter of \[5, 2\] that is complex or has a sparse gradient"):
        AngularGrad(table.parameters()).step()
    wave = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    wave.grad = torch.zeros_like(wave)
    with pytest.raises(SpecError, match="complex"):
        AngularGrad([wave]).step()


@pytest.mark.parametrize(
    "settings",
    [{"angle": "sin"}, {"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1.0}, {"lambdas": (-1.0, 0.5)},
     {"weight_decay": -1.0}],
)  # fmt: skip
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(SpecError, match="AngularGrad was asked for with"):
        AngularGrad([nn.Parameter(torch.ones(1))], **settings)
