"""Batches of unequal size: every sample once an epoch, equal numbers of steps, and a position to go on from."""

import random
from collections import Counter, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import TensorDataset

from evenly import feed
from evenly.batches import Feed
from evenly.errors import DataError, EvenlyError, LaunchError
from evenly.spec import Plan, Role, deal
from tests.batches.samples import Numbers, cases, epoch_of, feeds, taken

Pair = namedtuple("Pair", ["x", "y"])


@given(cases(), st.booleans(), st.integers(0, 5))
def test_every_sample_once_an_epoch_in_equal_numbers_of_steps(case, shuffle, seed):
    size, shares = case
    loaders = feeds(size, shares, shuffle=shuffle, seed=seed)
    for _ in range(2):
        epochs = [epoch_of(loader) for loader in loaders]
        assert taken(epochs) == Counter(range(size))
        assert {len(batches) for batches in epochs} == {len(loader) for loader in loaders}


@given(cases())
def test_a_step_takes_the_shares_of_the_plan_and_the_last_one_what_is_left(case):
    size, shares = case
    epochs = [epoch_of(loader) for loader in feeds(size, shares)]
    steps = list(zip(*epochs, strict=True))
    for step in steps[:-1]:
        assert [samples for _, samples in step] == shares
    last = [samples for _, samples in steps[-1]]
    rest = (size - 1) % sum(shares) + 1
    assert sum(last) == rest
    assert all(abs(part - rest * share / sum(shares)) < 1 for part, share in zip(last, shares, strict=True))


@given(cases())
def test_a_rank_with_nothing_left_borrows_a_batch_that_does_not_count(case):
    size, shares = case
    for loader in feeds(size, shares):
        for batch in loader:
            assert len(batch) == (loader.samples or min(2, size))


def test_what_all_ranks_take_for_each_sample_of_one():
    big, small = feeds(100, [6, 2])
    assert (big.times, small.times) == (8 / 6, 4.0)
    small.reshare([4, 4])
    assert small.times == 2.0


def test_a_borrowed_batch():
    big, small = feeds(9, [7, 1])
    assert [samples for _, samples in epoch_of(big)] == [7, 1]
    assert [samples for _, samples in epoch_of(small)] == [1, 0]
    assert [len(batch) for batch, _ in epoch_of(small)] == [1, 2]


def test_epochs_differ_and_ranks_agree():
    first, again, other = (feeds(40, [3, 2], seed=seed) for seed in (1, 1, 2))
    orders = [[epoch_of(loader) for loader in first] for _ in range(3)]
    assert len({str(order) for order in orders}) == 3
    assert [epoch_of(loader) for loader in again] == orders[0]
    assert [epoch_of(loader) for loader in other] != orders[0]


def test_without_shuffle_the_order_is_that_of_the_dataset():
    left, right = feeds(7, [2, 1], shuffle=False)
    for _ in range(2):
        assert epoch_of(left) == [([0, 1], 2), ([3, 4], 2), ([6], 1)]
        assert epoch_of(right) == [([2], 1), ([5], 1), ([5, 6], 0)]


@given(cases(), st.data())
def test_a_resumed_epoch_yields_exactly_the_batches_that_were_left(case, data):
    size, shares = case
    steps = len(feeds(size, shares)[0])
    stop = data.draw(st.integers(0, steps))
    for whole, part, resumed in zip(*(feeds(size, shares, seed=3) for _ in range(3)), strict=True):
        epoch_of(whole)
        epoch_of(part)
        expected = epoch_of(whole)
        state = part.state()
        for _, _batch in zip(range(stop), part, strict=False):
            state = part.state()
        resumed.resume(state)
        assert epoch_of(resumed) == expected[stop:]
        assert epoch_of(resumed) == epoch_of(whole)


@given(cases(), st.lists(st.integers(1, 7), min_size=1, max_size=5), st.data())
def test_other_ranks_go_on_with_the_remaining_samples_once_each(case, others, data):
    size, shares = case
    if size < len(others):
        return
    before = feeds(size, shares)
    stop = data.draw(st.integers(1, len(before[0])))
    first = []
    for loader in before:
        batches = iter(loader)
        first.append([(next(batches).tolist(), loader.samples) for _ in range(stop)])
    after = feeds(size, others)
    for loader in after:
        loader.resume(before[0].state())
    assert taken(first) + taken([epoch_of(loader) for loader in after]) == Counter(range(size))
    assert {loader.epoch for loader in after} == {1}


@pytest.mark.parametrize(("size", "steps"), [(12, 3), (14, 3), (15, 3), (16, 4), (3, 1)])
def test_drop_last_drops_the_smaller_batch_but_never_the_only_one(size, steps):
    epochs = [epoch_of(loader) for loader in feeds(size, [3, 1], drop_last=True)]
    assert [len(batches) for batches in epochs] == [steps, steps]
    assert len(feeds(size, [3, 1], drop_last=True)[0]) == steps
    assert sum(taken(epochs).values()) == min(size, 4 * steps)


def test_drop_last_drops_the_same_after_a_resume():
    (loader,) = feeds(10, [4], drop_last=True)
    loader.resume({"epoch": 0, "offset": 8})
    assert epoch_of(loader) == []
    assert loader.state() == {"epoch": 1, "offset": 0}


@given(st.integers(0, 10_000), st.lists(st.integers(1, 100), min_size=1, max_size=8))
def test_split_is_whole_in_proportion_and_loses_nothing(amount, shares):
    parts = deal(amount, shares)
    assert sum(parts) == amount
    assert all(abs(part - amount * share / sum(shares)) < 1 for part, share in zip(parts, shares, strict=True))


@pytest.mark.parametrize(("dataset", "told"), [(Numbers(0), "0 samples for 2"), (Numbers(1), "1 samples for 2")])
def test_too_little_data_is_refused(dataset, told):
    with pytest.raises(DataError, match=rf"the dataset has {told} ranks.*Use fewer ranks or more data"):
        feed(dataset, plan_of(1, 1), rank=0)


def test_data_without_length_and_order_are_refused():
    with pytest.raises(DataError, match=r"feed was given object, which has neither.*Give a map-style dataset"):
        feed(object(), plan_of(1), rank=0)


def plan_of(*samples):
    return Plan(roles=tuple(Role(rank=rank, node=0, samples=count) for rank, count in enumerate(samples)))


def test_feed_follows_the_plan():
    loaders = [feed(Numbers(8), plan_of(3, 1), rank=rank, shuffle=False) for rank in (0, 1)]
    assert [epoch_of(loader)[0] for loader in loaders] == [([0, 1, 2], 3), ([3], 1)]
    assert loaders[0].global_batch == 4


def test_feed_needs_samples_a_rank_of_the_plan_and_a_group_to_find_it():
    with pytest.raises(DataError, match="without samples per rank"):
        feed(Numbers(8), plan_of(0, 0), rank=0)
    for rank in (2, -1):
        with pytest.raises(DataError, match=rf"batches of rank {rank} .* plan is for 2 ranks"):
            feed(Numbers(8), plan_of(1, 1), rank=rank)
    for seed in (1.5, "a", None):
        with pytest.raises(DataError, match="Give a whole number"):
            feed(Numbers(8), plan_of(1, 1), rank=0, seed=seed)
    with pytest.raises(LaunchError, match="no group is open"):
        feed(Numbers(8), plan_of(1, 1))


def test_batches_come_in_the_form_of_the_samples_on_the_device():
    meta = torch.device("meta")
    samples = [{"pair": Pair(torch.ones(2), n), "more": [n, (torch.ones(1),)], "name": "a"} for n in range(4)]
    loader = Feed(samples, rank=0, samples=[2], device=meta, shuffle=False)
    batch = next(iter(loader))
    assert isinstance(batch["pair"], Pair)
    tensors = [batch["pair"].x, batch["pair"].y, batch["more"][0], batch["more"][1][0]]
    assert [tuple(tensor.shape) for tensor in tensors] == [(2, 2), (2,), (2,), (2, 1)]
    assert all(tensor.device == meta for tensor in tensors)
    assert batch["name"] == ["a", "a"]


def test_a_collate_fn_makes_the_batch_and_one_that_knows_how_goes_to_the_device_itself():
    sequences = [torch.ones(n + 1) for n in range(4)]

    def pack(batch):
        return pack_sequence(batch, enforce_sorted=False)

    batch = next(iter(Feed(sequences, rank=0, samples=[4], collate_fn=pack, device=torch.device("meta"))))
    assert isinstance(batch, PackedSequence)
    assert batch.data.device.type == "meta"
    assert batch.batch_sizes.tolist() == [4, 3, 2, 1]  # stays where torch wants it


def test_a_worker_process_loads_the_same_batches():
    data = TensorDataset(torch.arange(10.0), torch.arange(10))
    plain, helped = (Feed(data, rank=1, samples=[2, 3], num_workers=workers) for workers in (0, 1))
    for expected, got in zip(plain, helped, strict=True):
        assert torch.equal(expected[0], got[0])
        assert torch.equal(expected[1], got[1])
    assert plain.samples == helped.samples == 3


def test_iterating_leaves_the_global_generators_alone():
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for loader in feeds(20, [2, 1]):
        epoch_of(loader)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


def test_what_is_told_between_steps_and_at_the_end():
    (loader,) = feeds(6, [2])
    told = []
    loader.between.append(lambda: told.append(("between", loader.offset)))
    loader.on_end.append(lambda: told.append(("end", loader.epoch)))
    epoch_of(loader)
    assert told == [("between", 2), ("between", 4), ("end", 1)]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"epoch": 0, "offset": 11}, "but an epoch has 10"),
        ({"epoch": 0, "offset": -3}, "whole numbers"),
        ({"epoch": 0.5, "offset": 1}, "whole numbers"),
        ({}, "whole numbers"),
        (None, "whole numbers"),
    ],
)
def test_a_position_that_cannot_be_is_refused(state, words):
    (own,) = feeds(10, [3], seed=0)
    with pytest.raises(EvenlyError, match=words):
        own.resume(state)
    own.resume({"epoch": 0, "offset": 10})
