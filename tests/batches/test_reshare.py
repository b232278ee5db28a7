"""Shares that change in the middle of an epoch: every sample still comes once, and weighted gradients stay exact."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from evenly.batches import Feed
from evenly.errors import SpecError
from tests.batches.samples import Numbers, Stream, cases, epoch_of, feeds, taken

SHARES = st.integers(1, 7)


def in_step(loaders, changes=(), *, stop=None):
    """Returns the batches of each rank; all step together, and after step n they take the shares changes[n]."""
    seen = [[] for _ in loaders]
    for number, batches in enumerate(zip(*loaders, strict=True)):
        for taken_by, batch, loader in zip(seen, batches, loaders, strict=True):
            taken_by.append((batch.tolist(), loader.samples))
        if number + 1 == stop:
            break
        for loader in loaders:
            if number < len(changes) and changes[number]:
                loader.reshare(changes[number])
    return seen


@given(cases(), st.sampled_from([Numbers, Stream]), st.data())
def test_every_sample_once_with_new_shares_and_a_resume_with_another_split(case, kind, data):
    size, shares = case
    vectors = st.lists(SHARES, min_size=len(shares), max_size=len(shares))
    changes = data.draw(st.lists(st.none() | vectors, max_size=6))
    stop = data.draw(st.integers(1, 6))
    others = data.draw(st.lists(SHARES, min_size=1, max_size=min(5, size)))
    before = feeds(size, shares, kind=kind, seed=size)
    first = in_step(before, changes, stop=stop)
    assert len({str(loader.state()) for loader in before}) == 1
    if before[0].epoch == 1:  # the epoch was over before the stop
        assert taken(first) == Counter(range(size))
        return
    after = feeds(size, others, kind=kind, seed=size)
    for loader in after:
        loader.resume(before[0].state())
    rest = in_step(after, data.draw(st.lists(st.lists(SHARES, min_size=len(others), max_size=len(others)), max_size=3)))
    assert taken(first) + taken(rest) == Counter(range(size))
    assert {str(loader.state()) for loader in after} == {str({"epoch": 1, "offset": 0})}


@given(cases(), st.booleans(), st.data())
def test_the_global_order_does_not_depend_on_shares(case, shuffle, data):
    size, shares = case
    changes = data.draw(st.lists(st.lists(SHARES, min_size=len(shares), max_size=len(shares)), max_size=6))
    ranks = in_step(feeds(size, shares, shuffle=shuffle), changes)
    order = [x for step in zip(*ranks, strict=True) for batch, samples in step if samples for x in batch]
    assert order == [x for batch, _ in epoch_of(feeds(size, [1], shuffle=shuffle)[0]) for x in batch]


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_new_shares_hold_from_the_next_batch_on_and_in_the_next_epoch(kind):
    ranks = feeds(20, [3, 1], kind=kind)
    counts = [[samples for _, samples in batches] for batches in in_step(ranks, [None, [1, 5]])]
    assert counts == [[3, 3, 1, 1], [1, 1, 5, 5]]
    assert [loader.global_batch for loader in ranks] == [6, 6]
    assert [len(batches) for batches in in_step(ranks)] == [4, 4]


@pytest.mark.parametrize("kind", [Numbers, Stream])
@pytest.mark.parametrize("workers", [0, 1])
def test_shares_may_change_between_two_steps_when_the_next_is_loaded_already(kind, workers):
    ranks = feeds(12, [3, 1], kind=kind, num_workers=workers)
    for loader in ranks:
        loader.between.append(lambda loader=loader: loader.reshare([1, 1]))
    epochs = in_step(ranks)
    assert [[samples for _, samples in batches] for batches in epochs] == [[3, 1, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert taken(epochs) == Counter(range(12))


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_a_smaller_last_batch_is_dropped_under_the_new_shares_too(kind):
    ranks = feeds(20, [3, 1], kind=kind, drop_last=True)
    assert [[samples for _, samples in batches] for batches in in_step(ranks, [[5, 5]])] == [[3, 5], [1, 5]]
    for loader in ranks:
        assert loader.state() == {"epoch": 1, "offset": 0}


def test_a_generator_goes_on_with_new_shares():
    loader = Feed((n for n in range(9)), rank=1, samples=[2, 2])
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        loader.reshare([1, 3])
    assert seen == [[2, 3], [5, 6, 7], [8]]


@pytest.mark.parametrize("samples", [[1], [1, 2, 3], [1, 0], [1, -1], [1.5, 1], "12", []])
def test_shares_that_are_refused(samples):
    loader = feeds(8, [1, 1])[0]
    with pytest.raises(
        SpecError, match=r"samples=.* each of the 2 ranks that take a batch needs .* at least 1. Give a list"
    ):
        loader.reshare(samples)
    assert loader.global_batch == 2


def gradient_of(model, x, y):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(model.parameters()))])


@given(cases(), st.booleans(), st.data())
def test_gradients_weighted_by_samples_are_those_of_one_device_with_the_whole_batch(case, is_stream, data):
    size, shares = case
    draw = torch.Generator().manual_seed(size)
    x = torch.randn(size, 4, generator=draw, dtype=torch.float64)
    y = torch.randint(3, (size,), generator=draw)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()
    changes = data.draw(st.lists(st.lists(SHARES, min_size=len(shares), max_size=len(shares)), max_size=3))
    ranks = [
        Feed(zip(x, y, strict=True) if is_stream else TensorDataset(x, y), rank=rank, samples=shares)
        for rank in range(len(shares))
    ]
    alone = Feed(zip(x, y, strict=True) if is_stream else TensorDataset(x, y), rank=0, samples=[sum(shares)])
    for number, (whole, *parts) in enumerate(zip(alone, *ranks, strict=True)):
        weights = [loader.samples / sum(other.samples for other in ranks) for loader in ranks]
        averaged = sum(weight * gradient_of(model, *part) for weight, part in zip(weights, parts, strict=True))
        assert sum(loader.samples for loader in ranks) == alone.samples
        torch.testing.assert_close(averaged, gradient_of(model, *whole), rtol=0, atol=1e-10)
        for loader in (alone, *ranks) if number < len(changes) else ():
            loader.reshare([sum(changes[number])] if loader is alone else changes[number])
