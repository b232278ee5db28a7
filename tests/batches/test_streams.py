"""Streams: every rank reads all and takes its part, exactly as of a map-style dataset in its own order."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from evenly import feed
from evenly.batches import Feed
from evenly.errors import DataError
from evenly.spec import Plan, Role
from tests.batches.samples import Stream, cases, epoch_of, feeds, taken


class DropoutStream(IterableDataset):
    """Samples drawn as they come, and the epoch."""

    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for n in range(11):
            yield torch.tensor([n, self.epoch, torch.rand(()), random.random(), np.random.rand()])


class Divided(IterableDataset):
    """A dataset that gives each worker a part, as torch's documentation shows."""

    def __iter__(self):
        info = get_worker_info()
        first, every = (0, 1) if info is None else (info.id, info.num_workers)
        yield from range(first, 23, every)


class Sized(Stream):
    def __len__(self):
        return self.size


@given(cases(), st.booleans(), st.data())
def test_a_stream_gives_what_a_dataset_in_its_own_order_gives(case, drop_last, data):
    size, shares = case
    pairs = [feeds(size, shares, drop_last=drop_last, **more) for more in ({"shuffle": False}, {"kind": Stream})]
    offset = data.draw(st.integers(0, size - 1))
    for picked, streamed in zip(*pairs, strict=True):
        assert epoch_of(streamed) == epoch_of(picked)
        for loader in (picked, streamed):
            loader.resume({"epoch": 5, "offset": offset})
        assert epoch_of(streamed) == epoch_of(picked)
        assert streamed.state() == picked.state() == {"epoch": 6, "offset": 0}


@given(st.lists(st.integers(1, 7), min_size=1, max_size=5), st.integers(1, 4))
def test_a_stream_with_fewer_samples_than_ranks(shares, size):
    epochs = [epoch_of(loader) for loader in feeds(size, shares, kind=Stream)]
    assert taken(epochs) == Counter(range(size))
    assert len({len(batches) for batches in epochs}) == 1
    assert all(samples or len(batch) == min(2, size) for batches in epochs for batch, samples in batches)


def test_feed_follows_the_plan():
    plan = Plan(roles=(Role(rank=0, node=0, samples=3), Role(rank=1, node=0, samples=1)))
    loaders = [feed(Stream(6), plan, rank=rank) for rank in (0, 1)]
    assert [epoch_of(loader) for loader in loaders] == [[([0, 1, 2], 3), ([4, 5], 2)], [([3], 1), ([4, 5], 0)]]


def test_the_length_is_that_of_the_dataset_if_it_has_one():
    assert [len(loader) for loader in feeds(10, [3, 1], kind=Sized)] == [3, 3]
    assert len(feeds(10, [4], kind=Sized, drop_last=True)[0]) == 2
    with pytest.raises(TypeError, match=r"'Stream' has no len"):
        len(feeds(10, [3], kind=Stream)[0])


def test_random_numbers_of_a_stream_are_the_same_on_all_ranks_and_after_a_resume():
    left, right, resumed = (Feed(DropoutStream(), rank=rank, samples=[2, 2], seed=4) for rank in (0, 1, 1))
    torch.rand(3), random.random(), np.random.rand()  # the program draws otherwise on each rank
    first, second = list(left), list(right)
    alone = list(Feed(DropoutStream(), rank=0, samples=[4], seed=4))
    assert all(torch.equal(torch.cat(step), whole) for *step, whole in zip(first, second, alone, strict=True))
    resumed.resume({"epoch": 0, "offset": 8})
    assert torch.equal(next(iter(resumed)), second[2])
    assert not torch.equal(next(iter(left)), first[0])
    assert {float(row[1]) for batch in first for row in batch} == {0.0}


def test_reading_leaves_the_global_generators_alone():
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for rank in (0, 1):
        list(Feed(DropoutStream(), rank=rank, samples=[2, 1]))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


def test_a_batch_is_collated_only_after_what_happens_between_steps():
    """A checkpoint saved there holds random numbers that the resumed run draws again."""
    (loader,) = feeds(6, [2], kind=Stream, collate_fn=lambda batch: (batch, torch.rand(())))
    states = []
    loader.between.append(lambda: states.append((loader.state(), torch.get_rng_state())))
    batches = list(loader)
    position, numbers = states[0]
    (resumed,) = feeds(6, [2], kind=Stream, collate_fn=lambda batch: (batch, torch.rand(())))
    resumed.resume(position)
    torch.set_rng_state(numbers)
    assert list(resumed) == batches[1:]


def test_a_generator_is_read_once():
    loader = Feed((n for n in range(7)), rank=0, samples=[2, 1])
    first = next(iter(loader)).tolist()
    rest = epoch_of(loader)  # goes on where the first loop was left
    assert [first, *rest] == [[0, 1], ([3, 4], 2), ([6], 1)]
    with pytest.raises(DataError, match=r"generator was to be read from sample 0 on, but 7 .* read once only"):
        epoch_of(loader)


def test_an_empty_stream_is_an_error_not_an_epoch():
    (loader,) = feeds(0, [2], kind=Stream)
    with pytest.raises(DataError, match=r"epoch 0 of Stream was requested, but it has no samples"):
        epoch_of(loader)


def test_an_error_of_the_stream_reaches_the_loop():
    def broken():
        yield 1
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        epoch_of(Feed(broken(), rank=0, samples=[2]))


def test_what_is_told_between_steps_and_at_the_end():
    (loader,) = feeds(5, [2], kind=Stream)
    told = []
    loader.between.append(lambda: told.append(("between", loader.offset)))
    loader.on_end.append(lambda: told.append(("end", loader.epoch)))
    epoch_of(loader)
    assert told == [("between", 2), ("between", 4), ("end", 1)]
