"""One number tells whether all elements of a gradient are finite, of any dtype."""

import math

import pytest
import torch

from evenly.gradients import buckets
from evenly.gradients.buckets import finiteness_check
from tests.gradients.test_not_averaged import assert_same, batch, expected_gradients, loss_of, run_steps
from tests.ranks import RankError

TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_finite_gradients_give_a_finite_number(dtype):
    check = finiteness_check(torch.full((3000,), 60000.0, dtype=dtype))  # a sum in 16 bits would overflow
    assert not check.is_complex()
    assert math.isfinite(check.item())
    assert math.isfinite(finiteness_check(torch.empty(0, dtype=dtype)).item())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_element_is_enough(dtype, value):
    gradient = torch.ones(3000, dtype=dtype)
    gradient[1234] = value
    assert not math.isfinite(finiteness_check(gradient).item())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_imaginary_part_counts(value):
    gradient = torch.ones(8, dtype=torch.complex64)
    gradient[3] = complex(1.0, value)
    assert not math.isfinite(finiteness_check(gradient).item())
    assert not math.isfinite(finiteness_check(gradient.conj()).item())


@pytest.mark.parametrize("most_joined", [0, 2**30])
@pytest.mark.parametrize("nonfinite_rank", [None, 1])
def test_the_tally_may_travel_with_the_last_bucket_or_behind_it(monkeypatch, most_joined, nonfinite_rank):
    monkeypatch.setattr(buckets, "MOST_JOINED", most_joined)

    def loop(model, optimizer, rank):
        loss = loss_of(model(batch(rank, 0)))
        (loss * float("nan") if rank == nonfinite_rank else loss).backward()

    if nonfinite_rank is None:
        assert_same(run_steps(loop), expected_gradients([[2, 3]]))
        return
    with pytest.raises(RankError, match=r"the gradients of ranks \[1\] became NaN"):
        run_steps(loop)
