"""Batches for evaluation: over all ranks every sample once, however many samples, ranks and shares there are."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, WeightedRandomSampler

from evenly.batches import EvaluationFeed, evaluation_part
from evenly.errors import DataError, SpecError
from evenly.spec import Plan, Role
from tests.batches.samples import Numbers, Stream

PLAN = Plan(roles=(Role(rank=0, node=0, samples=6), Role(rank=1, node=0, samples=2), Role(rank=2, node=1, samples=1)))


class SizedStream(Stream):
    def __len__(self):
        return self.size


def parts(dataset, ranks, plan=None, batch_size=None, **loading):
    """Returns the batches of every rank, and checks what the loaders say of them."""
    batches_of_ranks = []
    for rank in range(ranks):
        part = evaluation_part(plan, rank=rank, ranks=ranks, batch_size=batch_size)
        loader = EvaluationFeed(dataset, lambda part=part: part, **loading)
        batches = [(batch.tolist(), loader.samples) for batch in loader]
        assert all(len(batch) == samples > 0 for batch, samples in batches)
        assert [(batch.tolist(), loader.samples) for batch in loader] == batches  # the same every time
        assert len(loader) == len(batches)
        batches_of_ranks.append([batch for batch, _ in batches])
    return batches_of_ranks


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 7), st.booleans())
def test_every_sample_comes_once_over_all_ranks(size, ranks, batch_size, streams):
    found = parts((SizedStream if streams else Numbers)(size), ranks, batch_size=batch_size)
    samples = [x for batches in found for batch in batches for x in batch]
    assert sorted(samples) == list(range(size))
    assert streams or samples == list(range(size))  # consecutive: rank after rank is the order of the dataset
    assert all(len(batch) <= batch_size for batches in found for batch in batches)


def test_ranks_take_as_much_as_the_plan_gives_them():
    found = parts(Numbers(90), 3, PLAN)
    assert [sum(map(len, batches)) for batches in found] == [60, 20, 10]
    assert [max(map(len, batches)) for batches in found] == [6, 2, 1]
    larger = parts(Numbers(90), 3, PLAN, batch_size=60)
    assert [list(map(len, batches)) for batches in larger] == [[60], [20], [10]]


def test_a_loader_and_its_options():
    loader = DataLoader(Numbers(11), batch_size=4, num_workers=1)
    assert parts(loader, 2, batch_size=3) == parts(Numbers(11), 2, batch_size=3)
    drawn = parts(Numbers(11), 2, batch_size=3, sampler=WeightedRandomSampler([1.0] * 11, 7), seed=3)
    assert sum(len(batch) for batches in drawn for batch in batches) == 7
    shuffled = parts(Numbers(11), 2, batch_size=3, shuffle=True)
    assert Counter(x for batches in shuffled for batch in batches for x in batch) == Counter(range(11))


def test_what_an_evaluation_cannot_do():
    def part():
        return evaluation_part(None, rank=0, ranks=1, batch_size=None)

    with pytest.raises(DataError, match="every sample comes once"):
        EvaluationFeed(DataLoader(Numbers(9), drop_last=True), part)
    with pytest.raises(SpecError, match="batch_size=0"):
        evaluation_part(None, rank=0, ranks=1, batch_size=0)
    with pytest.raises(DataError, match="0 samples"):
        EvaluationFeed(Numbers(0), part)
    with pytest.raises(DataError, match="has no samples"):
        list(EvaluationFeed(Stream(0), part))
