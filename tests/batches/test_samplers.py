"""A sampler's order is the global order: the same on all ranks, another each epoch, the same again after a resume."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from evenly.batches import Feed
from evenly.errors import SpecError
from tests.batches.samples import Numbers, Stream, cases, epoch_of, feeds, taken


def orders(loaders):
    """Returns the global order of an epoch, put together from all ranks."""
    steps = zip(*(epoch_of(loader) for loader in loaders), strict=True)
    return [x for step in steps for batch, samples in step if samples for x in batch]


def each(shares, size, sampler, **more):
    """Returns loaders whose samplers are objects of their own, as in ranks that are processes."""
    return [Feed(Numbers(size), rank=rank, samples=shares, sampler=sampler(), **more) for rank in range(len(shares))]


class Coin(Sampler):
    """Draws from the generator of the library that is named."""

    def __init__(self, size, library):
        self.size, self.library = size, library

    def __iter__(self):
        order = list(range(self.size))
        if self.library == "random":
            random.shuffle(order)
        elif self.library == "numpy":
            np.random.shuffle(order)
        else:
            order = torch.randperm(self.size).tolist()
        return iter(order)


@given(cases(), st.integers(0, 3))
def test_the_order_is_the_samplers_and_all_ranks_agree(case, seed):
    size, shares = case
    rank_by_rank = each(shares, size, lambda: WeightedRandomSampler([1.0] * size, 2 * size), seed=seed)
    epochs = []
    for _ in range(2):
        torch.rand(seed + 1)  # the program goes on drawing
        epochs.append(orders(rank_by_rank))
    alone = each([sum(shares)], size, lambda: WeightedRandomSampler([1.0] * size, 2 * size), seed=seed)
    assert epochs == [orders(alone), orders(alone)]
    assert [len(order) for order in epochs] == [2 * size, 2 * size]
    assert len(rank_by_rank[0]) == -(-2 * size // sum(shares))


@pytest.mark.parametrize("library", ["torch", "random", "numpy"])
def test_whatever_a_sampler_draws_from_ranks_agree_and_epochs_differ(library):
    loaders = each([3, 2], 40, lambda: Coin(40, library))
    first, second = orders(loaders), orders(loaders)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(40))
    with pytest.raises(TypeError, match=r"has no len"):
        len(loaders[0])


def test_a_sampler_with_a_generator_of_its_own_resumes_in_the_same_order_and_gets_it_back():
    own = [torch.Generator().manual_seed(n) for n in range(3)]
    before = [generator.get_state() for generator in own]
    made = iter(own)
    left, right, resumed = each([3, 2, 1], 30, lambda: SubsetRandomSampler(range(5, 30), generator=next(made)))
    whole = epoch_of(left)
    for _, _ in zip(range(2), right, strict=False):
        pass
    resumed.resume(right.state())
    assert whole != epoch_of(left)  # the next epoch
    assert taken([whole]) == Counter(x for batch, _ in whole for x in batch)
    again = each([3, 2, 1], 30, lambda: SubsetRandomSampler(range(5, 30)))[2]
    assert epoch_of(resumed) == epoch_of(again)[2:]
    assert all(torch.equal(generator.get_state(), state) for generator, state in zip(own, before, strict=True))


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: [5, 1, 1, 7, 3, 0, 2],
        lambda: SequentialSampler(Numbers(9)),
        lambda: RandomSampler(Numbers(9), replacement=True, num_samples=70),
        lambda: torch.tensor([4, 3, 2, 1]),
    ],
)
def test_any_iterable_of_indices(sampler):
    whole = orders(each([2], 9, sampler))
    assert orders(each([3, 1], 9, sampler)) == whole
    if isinstance(sampler(), list):
        assert whole == sampler()


def test_the_sampler_is_told_the_epoch():
    class Told(Sampler):
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([self.epoch] * 4)

        def __len__(self):
            return 4

    loaders = each([1, 1], 9, Told)
    loaders[0].resume({"epoch": 3, "offset": 2})
    assert epoch_of(loaders[0]) == [([3], 1)]
    assert epoch_of(loaders[1]) == [([0], 1)] * 2
    assert epoch_of(loaders[0]) == [([4], 1)] * 2


def test_a_dataset_without_length_can_be_drawn_from():
    class Squares(Dataset):
        def __getitem__(self, index):
            return index**2

    assert epoch_of(Feed(Squares(), rank=0, samples=[2], sampler=[3, 4, 5])) == [([9, 16], 2), ([25], 1)]


def test_drawing_leaves_the_global_generators_alone():
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for library in ("torch", "random", "numpy"):
        orders(each([2, 1], 20, lambda library=library: Coin(20, library)))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sampler": DistributedSampler(Numbers(8), 2, 0)}, "sampler=DistributedSampler .* gives each rank a part"),
        ({"sampler": BatchSampler(range(8), 2, False)}, "sampler=BatchSampler .* whole batches.* single indices"),
        ({"sampler": iter(range(8))}, "sampler=range_iterator .* read anew each epoch.*a list of indices"),
        ({"sampler": 3}, "sampler=int .* Give a torch Sampler"),
        ({"sampler": [1, 2], "shuffle": True}, "shuffle=True and sampler=list .* Leave one out"),
        ({"batch_sampler": [[0, 1]]}, "batch_sampler= was given, but feed takes no such option.* sampler="),
        ({"batch_size": 4}, "batch_size= was given.*The plan says how many samples"),
        ({"generator": torch.Generator()}, "generator= was given.*give seed="),
        ({"nmu_workers": 4}, "nmu_workers= was given.*there are: seed, shuffle.*num_workers"),
        ({"persistent_workers": True}, "persistent_workers=True was given.*needs num_workers > 0"),
        ({"num_workers": -1}, "num_workers=-1 was given.*non-negative"),
    ],
)
def test_options_that_are_refused(options, told):
    with pytest.raises(SpecError, match=told):
        feeds(8, [1, 1], **options)


def test_lists_drawn_by_a_sampler_are_refused():
    with pytest.raises(SpecError, match=r"list draws whole batches: \[1, 2\]"):
        epoch_of(Feed(Numbers(8), rank=0, samples=[1], sampler=[[1, 2], [3]]))


def test_a_stream_has_neither_sampler_nor_shuffle():
    with pytest.raises(SpecError, match=r"sampler=list was given for Stream, .* no indices"):
        feeds(8, [1], kind=Stream, sampler=[1])
    with pytest.raises(SpecError, match=r"shuffle=True was given for Stream, .* its own order"):
        feeds(8, [1], kind=Stream, shuffle=True)
