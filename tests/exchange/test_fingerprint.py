"""What a fingerprint sees: small divergences in every precision; and what it does not mind: rounding."""

from dataclasses import replace

import pytest
import torch

from evenly.exchange.tensors.fingerprint import UNLIKE, FingerprintValues, apart, are_apart, fingerprint

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def tensors(*dtypes, size=30_000):
    """Returns two tensors of each type: one as layers begin, one of ones as normalizations do."""
    generator = torch.Generator().manual_seed(7)
    return {
        f"{dtype} {number}": values.to(dtype)
        for dtype in dtypes
        for number, values in enumerate((torch.randn(size, generator=generator) / 50, torch.ones(300)))
    }


def held(values, *, alike=True):
    """Returns what a rank would send; on devices of a kind of their own unless they are alike."""
    row = fingerprint(values).read()
    return row if alike else replace(row, platform=UNLIKE)


def differ(one, other, *, alike=True, steps=100):
    rows = [held(one, alike=alike), held(other, alike=alike)]
    return are_apart(rows, fingerprint(one).elements, steps=steps)


def stepped(values, fraction, *, seed=3, only=""):
    """Returns the tensors after an update of this size relative to them."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (value.double() * (1 + fraction * torch.randn(value.shape, generator=generator, dtype=torch.float64))).to(
            value.dtype
        )
        if only in name
        else value
        for name, value in values.items()
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_small_step_is_seen_in_every_precision(dtype):
    values = tensors(dtype)
    assert not differ(values, {name: value.clone() for name, value in values.items()}, steps=10**6)
    assert differ(values, stepped(values, 16 * torch.finfo(dtype).eps), steps=10**6)


def test_a_tensor_of_low_precision_does_not_hide_others():
    values = tensors(torch.bfloat16, torch.float32)
    assert differ(values, stepped(values, 1e-5, only="float32 0"))
    assert differ(values, stepped(values, 1e-2, only="float32 0"), alike=False)


def test_ones_have_the_rounding_unit_of_their_size():
    unit = fingerprint({"ones": torch.ones(4096)}).read().units[1]
    assert 0.3 < unit / (torch.finfo(torch.float32).eps * 64) < 3  # eps times the norm


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_of_unlike_devices_is_no_divergence(dtype):
    one = other = tensors(dtype)
    eps = torch.finfo(dtype).eps
    for step in range(64):
        one, other = stepped(one, eps, seed=2 * step), stepped(other, eps, seed=2 * step + 1)
    assert not differ(one, other, alike=False, steps=64)


def test_unlike_devices_that_go_apart_are_seen():
    values = tensors(torch.float32)
    assert differ(values, stepped(values, 1e-3), alike=False)


def test_a_rank_whose_parameters_are_not_numbers_is_seen():
    values = tensors(torch.float32)
    broken = stepped(values, 0.0) | {"torch.float32 1": torch.full((300,), float("nan"))}
    assert differ(values, broken)
    assert not differ(broken, broken)


def test_swapped_elements_are_seen():
    values = {"weight": torch.linspace(-1, 1, 600)}
    assert differ(values, {"weight": values["weight"].flip(0)})
    assert differ({"a": torch.ones(600), "b": torch.zeros(600)}, {"a": torch.zeros(600), "b": torch.ones(600)})


def test_complex_and_empty_tensors_and_scalars_count():
    values = {"c": torch.randn(5, 3, dtype=torch.complex64), "none": torch.zeros(0, 4), "one": torch.tensor(2.0)}
    assert not differ(values, values)
    assert differ(values, values | {"one": torch.tensor(2.001)})
    assert differ(values, values | {"c": values["c"].conj().resolve_conj()})


def test_the_first_tensor_that_differs_is_found():
    values = tensors(torch.bfloat16, torch.float32)
    rows = [fingerprint(v).by_tensor() for v in (values, stepped(values, 1e-4, only="float32 0"))]
    names = [
        ours[0]
        for ours, theirs in zip(*rows, strict=True)
        if apart([ours[1], theirs[1]], [ours[2], theirs[2]], steps=100, alike=ours[3])
    ]
    assert names == ["torch.float32 0"]


def test_what_is_held_travels_as_a_row():
    row = held(tensors(torch.float32))
    assert FingerprintValues.from_row(row.row) == row
