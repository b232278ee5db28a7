"""Workers hand on what the loop itself would have read: in order, once, also when shares change under way."""

from collections import Counter

import pytest
import torch
from torch.utils.data import get_worker_info

from evenly.batches import Feed
from evenly.errors import SpecError
from tests.batches.samples import Numbers, Stream, epoch_of, feeds, taken
from tests.batches.test_streams import Divided, DropoutStream


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")  # more than this machine has
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("lasting", [False, True])
def test_workers_read_a_stream_as_the_loop_does(workers, lasting):
    plain = Feed(DropoutStream(), rank=1, samples=[2, 1], seed=2)
    helped = Feed(DropoutStream(), rank=1, samples=[2, 1], seed=2, num_workers=workers, persistent_workers=lasting)
    for _ in range(2):
        expected = [(batch, plain.samples, plain.offset) for batch in plain]
        got = [(batch, helped.samples, helped.offset) for batch in helped]
        assert [counts for _, *counts in got] == [counts for _, *counts in expected]
        assert all(torch.equal(a, b) for (a, *_), (b, *_) in zip(got, expected, strict=True))
    helped.resume({"epoch": 1, "offset": 6})
    plain.resume({"epoch": 1, "offset": 6})
    assert all(torch.equal(a, b) for a, b in zip(helped, plain, strict=True))


def test_a_dataset_that_divides_itself_over_workers_still_loses_nothing():
    epochs = [epoch_of(Feed(Divided(), rank=rank, samples=[3, 2], num_workers=2)) for rank in (0, 1)]
    assert taken(epochs) == Counter(range(23))


@pytest.mark.parametrize("kind", [Numbers, Stream])
@pytest.mark.parametrize("lasting", [False, True])
def test_new_shares_drop_what_workers_have_loaded_ahead(kind, lasting):
    options = {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": lasting}
    epochs = []
    for loader in feeds(40, [3, 1], kind=kind, **options):
        seen = []
        for batch in loader:
            seen.append((batch.tolist(), loader.samples))
            if len(seen) == 2:
                loader.reshare([2, 4])
            if len(seen) == 4:
                loader.reshare([1, 1])
        epochs.append(seen)
        assert loader.state() == {"epoch": 1, "offset": 0}
    assert taken(epochs) == Counter(range(40))
    assert [samples for _, samples in epochs[0][:6]] == [3, 3, 2, 2, 1, 1]
    assert len(epochs[0]) == len(epochs[1])


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_lasting_workers_are_the_same_processes_in_the_next_epoch(kind):
    def number(batch):
        return get_worker_info().seed  # of the process

    (lasting,) = feeds(6, [2], kind=kind, num_workers=1, persistent_workers=True, collate_fn=number)
    (fresh,) = feeds(6, [2], kind=kind, num_workers=1, collate_fn=number)
    assert len({*lasting, *lasting}) == 1
    assert len({*fresh, *fresh}) == 2


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_a_loop_that_is_left_early_goes_on_where_it_was(kind):
    (loader,) = feeds(12, [4], kind=kind, num_workers=1, persistent_workers=True)
    first = next(iter(loader)).tolist()
    assert sorted([*first, *(x for batch, _ in epoch_of(loader) for x in batch)]) == list(range(12))


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_options_reach_the_workers(kind):
    begun = torch.zeros(2).share_memory_()

    def begin(worker):
        begun[worker] += 1

    options = {"num_workers": 2, "worker_init_fn": begin, "timeout": 60, "multiprocessing_context": "fork"}
    (loader,) = feeds(4, [2], kind=kind, **options)
    assert sorted(x for batch, _ in epoch_of(loader) for x in batch) == list(range(4))
    assert begun.tolist() == [1, 1]


def test_workers_cannot_share_a_generator():
    with pytest.raises(SpecError, match=r"num_workers=1 was given for a generator, which can be read once only"):
        Feed((n for n in range(4)), rank=0, samples=[1], num_workers=1)


def test_an_error_in_a_worker_reaches_the_loop():
    class Broken(Stream):
        def __iter__(self):
            yield 1
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        epoch_of(Feed(Broken(3), rank=0, samples=[1], num_workers=1))
