"""Samples that are numbers, so that each can be counted, and what was taken of them."""

from collections import Counter

from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from evenly.batches import Feed


class Numbers(Dataset):
    """The samples 0, 1, 2, ..."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index


class Stream(IterableDataset):
    """The same samples, but only one after the other."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        yield from range(self.size)


def feeds(size, shares, kind=Numbers, **loading):
    """Returns the loaders of all ranks."""
    return [Feed(kind(size), rank=rank, samples=shares, **loading) for rank in range(len(shares))]


def epoch_of(loader):
    """Returns the batches of an epoch as (numbers, real samples)."""
    return [(batch.tolist(), loader.samples) for batch in loader]


def taken(epochs):
    """Returns the samples that all ranks really took."""
    return Counter(x for batches in epochs for batch, samples in batches if samples for x in batch)


@st.composite
def cases(draw):
    shares = draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    return draw(st.integers(len(shares), 60)), shares
