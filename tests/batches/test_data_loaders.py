"""A DataLoader is taken apart: the same samples and order, in the plan's batches; or an error in words."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from evenly import feed
from evenly.batches import steps_per_epoch
from evenly.errors import DataError, SpecError
from evenly.spec import Plan, Role
from tests.batches.samples import Numbers, Stream, epoch_of, taken

PLAN = Plan(roles=(Role(rank=0, node=0, samples=3), Role(rank=1, node=0, samples=2)))


def negative(samples):
    return -torch.tensor(samples)


class Batches(BatchSampler):
    """Draws batches in a way of its own."""


class Own(DataLoader):
    """Makes batches in a way of its own."""

    def __iter__(self):
        yield from range(3)


class Part(Stream):
    """Yields a part of the samples to each rank."""

    rank, world_size = 0, 2


def both(loader, **options):
    return [feed(loader, PLAN, rank=rank, **options) for rank in (0, 1)]


def values(loaders):
    return [epoch_of(loader) for loader in loaders]


@pytest.mark.parametrize(
    ("loader", "same"),
    [
        (DataLoader(Numbers(13), batch_size=4), {"shuffle": False}),
        (DataLoader(Numbers(13), shuffle=True, collate_fn=negative), {"shuffle": True, "collate_fn": negative}),
        (DataLoader(Numbers(13), shuffle=True, drop_last=True), {"shuffle": True, "drop_last": True}),
        (DataLoader(Numbers(13), batch_sampler=BatchSampler(SequentialSampler(range(13)), 4, True)),
         {"shuffle": False, "drop_last": True}),
        (DataLoader(Numbers(13), sampler=SubsetRandomSampler([1, 3, 5, 7, 9])), None),
        (DataLoader(Numbers(13), sampler=RandomSampler(range(13), replacement=True, num_samples=20)), None),
        (DataLoader(Numbers(13), num_workers=1, prefetch_factor=3, shuffle=True), {"shuffle": True}),
    ],
)  # fmt: skip
def test_a_loader_gives_what_its_dataset_and_options_give(loader, same):
    expected = {"sampler": loader.sampler} if same is None else same
    loaders = both(loader, seed=5)
    assert values(loaders) == values(both(Numbers(13), seed=5, **expected))
    steps = len(loaders[0])
    assert steps == steps_per_epoch(loader, PLAN) == len(epoch_of(loaders[0]))
    assert steps_per_epoch(loader, PLAN, accumulate=2) == -(-steps // 2)


def test_a_loader_of_a_stream():
    assert values(both(DataLoader(Stream(13), batch_size=4))) == values(both(Stream(13)))
    with pytest.raises(DataError, match="Stream has no length"):
        steps_per_epoch(Stream(13), PLAN)


def test_options_beside_a_loader_replace_its_own():
    loader = DataLoader(Numbers(13), shuffle=True, num_workers=2, persistent_workers=True, timeout=9)
    assert values(both(loader, shuffle=False, num_workers=0)) == values(both(Numbers(13), shuffle=False))
    assert taken(values(both(loader, sampler=[1, 2, 3], num_workers=0))) == {1: 1, 2: 1, 3: 1}


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (DataLoader(Numbers(9), batch_sampler=Batches(SequentialSampler(range(9)), 2, False)), "batch_sampler=Batches"),
        (DataLoader(Numbers(9), batch_size=None), "yields whole batches"),
        (DataLoader(Stream(9), batch_size=None), "yields whole batches"),
        (DataLoader(Numbers(9), shuffle=True, generator=torch.Generator()), r"seed=\.\.\."),
        (DataLoader(Stream(9), num_workers=2, worker_init_fn=print), "every worker reads all of it"),
        (DataLoader(Part(9)), "not split over ranks"),
        (DataLoader(Numbers(9), sampler=DistributedSampler(range(9), 2, 0)), "sampler of a single process"),
        (Own(Numbers(9)), "__iter__ of its own"),
        (feed(Numbers(9), PLAN, rank=0), "Give the dataset itself"),
    ],
)
def test_a_loader_that_cannot_be_had_exactly_is_refused(loader, words):
    with pytest.raises((DataError, SpecError), match=words):
        feed(loader, PLAN, rank=0)


def test_an_unknown_length_is_told_by_the_loader_itself():
    class Endless(IterableDataset):
        def __iter__(self):
            yield from iter(int, 1)

    with pytest.raises(TypeError):
        len(feed(DataLoader(Endless()), PLAN, rank=0))
