"""Batches of an elastic run: every sample of an epoch is trained once, whatever becomes of the nodes."""

from collections import Counter

import pytest
import torch

from evenly.batches.dealt import DealtFeed
from evenly.batches.ranges import size_of
from evenly.errors import DataError, MismatchError, SpecError
from tests.batches.meetings import DealtNode, Meeting, run
from tests.batches.samples import Numbers, Stream

SIZE, EPOCHS = 203, 3
SHARES = {"a": [4, 2], "b": [3]}


class Generated(torch.utils.data.IterableDataset):
    """Numbers in an order drawn from the global generator, as a stream that shuffles."""

    def __iter__(self):
        yield from torch.randperm(SIZE).tolist()


KINDS = {
    "map": (lambda: Numbers(SIZE), {}),
    "in order": (lambda: Numbers(SIZE), {"shuffle": False}),
    "sampler": (lambda: Numbers(SIZE), {"sampler": torch.utils.data.RandomSampler(range(SIZE))}),
    "list": (lambda: list(range(SIZE)), {}),
    "stream": (lambda: Stream(SIZE), {}),
    "shuffled stream": (Generated, {}),
}


class Watched(Stream):
    """A stream that counts how often it is read."""

    reads = 0

    def __iter__(self):
        self.reads += 1
        yield from range(self.size)


def nodes_of(meeting, kind, shares=SHARES, stories=None, **options):
    dataset, more = KINDS[kind]
    stories = stories or {}
    return [
        DealtNode(
            name, meeting, dataset, samples, epochs=EPOCHS, story=stories.get(name), period_samples=6 * sum(samples),
            **{**more, **options},
        )
        for name, samples in shares.items()
    ]  # fmt: skip


def require_every_sample_once(meeting, *, repeated=0):
    """All samples of all epochs were merged once, but for those that the ledger says are repeated."""
    last = meeting.ledgers[-1]
    assert last.epoch == EPOCHS
    for epoch in range(EPOCHS):
        assert {sample for e, sample in meeting.merged if e == epoch} == set(range(SIZE))
    assert meeting.merged.total() == EPOCHS * SIZE + sum(last.repeated.values())
    assert (sum(last.repeated.values()) > 0) == bool(repeated)


@pytest.mark.parametrize("kind", KINDS)
def test_nodes_train_every_sample_once(kind):
    meeting = Meeting()
    nodes = nodes_of(meeting, kind)
    run(nodes)
    require_every_sample_once(meeting)
    assert {len(ledger.done) for ledger in meeting.ledgers} == {0, 1}  # in order: nothing of a stream is read twice
    assert all(
        {*steps[:12]} == {share} for node in nodes for steps, share in zip(node.steps, SHARES[node.name], strict=True)
    )


def test_without_faults_a_stream_is_read_once_an_epoch():
    meeting, streams = Meeting(postponed=[2, 3, 7]), []

    def stream():
        streams.append(Watched(SIZE))
        return streams[-1]

    options = {"epochs": EPOCHS, "period_samples": 24}
    run([DealtNode(name, meeting, stream, samples, **options) for name, samples in SHARES.items()])
    require_every_sample_once(meeting)
    assert [one.reads for one in streams] == [EPOCHS] * 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [1, 4, 6, 11])
def test_what_a_lost_node_has_not_committed_is_trained_by_the_others(kind, step):
    meeting = Meeting()
    run(nodes_of(meeting, kind, {**SHARES, "c": [5, 1]}, {"c": {step: "die"}}))
    require_every_sample_once(meeting)
    assert meeting.died > 0


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("joins_after", [1, 2, 5])
def test_a_node_that_joins_is_dealt_samples_with_its_first_commit(kind, joins_after):
    meeting = Meeting()
    dataset, more = KINDS[kind]
    late = DealtNode(
        "late", meeting, dataset, [2, 2], epochs=EPOCHS, joins_after=joins_after, period_samples=24, **more
    )
    run([*nodes_of(meeting, kind), late])
    require_every_sample_once(meeting)
    assert sum(late.steps[0]) > SIZE / 10
    assert late.epochs_begun == len(late.epochs_trained)  # it began with the epoch that the others were in


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("rounds", [1, 3])
def test_a_node_that_is_late_keeps_what_it_holds_and_its_samples_count(kind, rounds):
    meeting = Meeting()
    run(nodes_of(meeting, kind, {**SHARES, "c": [5, 1]}, {"c": {3: ("late", rounds), 9: ("late", rounds)}}))
    require_every_sample_once(meeting)
    assert meeting.died == 0


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_a_node_that_was_cut_off_repeats_at_most_what_was_dealt_to_others_meanwhile(kind):
    meeting = Meeting()
    run(nodes_of(meeting, kind, {**SHARES, "c": [5, 1]}, {"c": {3: ("cut", 3)}}))
    require_every_sample_once(meeting, repeated=True)
    assert meeting.ledgers[-1].repeated.keys() == {"c"}
    assert meeting.ledgers[-1].repeated["c"] <= 2 * 6 * 6


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_without_the_coordinator_nodes_train_their_reserve_and_then_wait(kind):
    meeting = Meeting(postponed=[1, 2, 3, 4, 9])
    nodes = nodes_of(meeting, kind)
    run(nodes)
    require_every_sample_once(meeting)
    assert meeting.attempt == meeting.rounds + 5


def test_what_a_node_with_nan_has_trained_is_lost_and_trained_again():
    meeting = Meeting()
    run(nodes_of(meeting, "map", SHARES, {"b": {9: "nan"}}))
    require_every_sample_once(meeting)
    assert meeting.ledgers[-1].lost == {"b": meeting.died}
    assert meeting.died > 0


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_many_faults_in_one_run(kind):
    meeting = Meeting(postponed=[3, 8])
    dataset, more = KINDS[kind]
    stories = {"b": {5: ("late", 1), 12: "nan", 20: ("late", 2)}, "c": {4: ("cut", 2), 17: "die"}, "d": {13: "die"}}
    late = DealtNode("e", meeting, dataset, [2], epochs=EPOCHS, joins_after=4, period_samples=20, **more)
    run([*nodes_of(meeting, kind, {**SHARES, "c": [5, 1], "d": [2, 3, 1]}, stories), late])
    require_every_sample_once(meeting, repeated=True)


def alone(dataset, **options):
    """Returns the feed of a node that is alone and meets itself."""
    settings = {"node": "a", "rank": 0, "samples": [3], "period_samples": 12, "pause_s": 0.0}
    feed = DealtFeed(dataset, **{**settings, **options})
    feed.meet = lambda: feed.commit({options.get("node", "a"): feed.report()})
    return feed


def test_a_node_alone_has_the_batches_in_the_order_of_the_epoch():
    feed = alone(Numbers(20), shuffle=False)
    assert [batch.tolist() for batch in feed][-2:] == [[15, 16, 17], [18, 19]]
    assert (feed.epoch, feed.samples) == (1, 2)
    assert torch.cat(list(feed)).tolist() == list(range(20))


@pytest.mark.parametrize("kind", [Numbers, Stream])
@pytest.mark.parametrize("lasting", [False, True])
def test_workers_load_what_is_dealt(kind, lasting):
    options = {"samples": [4, 2], "period_samples": 24, "num_workers": 2, "persistent_workers": lasting}
    ranks = [alone(kind(50), rank=rank, **options) for rank in range(2)]
    for _ in range(2):
        seen = []
        for batches in zip(*ranks, strict=True):
            seen += [(batch.tolist(), rank.samples) for batch, rank in zip(batches, ranks, strict=True)]
        assert Counter(sample for batch, samples in seen for sample in batch if samples) == Counter(range(50))
        assert [samples for _, samples in seen] == [4, 2] * 8 + [1, 1]
    for rank in ranks:
        rank.meet = None  # refers to the feed; workers of a loader that is freed in a cycle end only after 5 s


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_what_is_trained_during_a_round_is_reported_with_the_next_one(kind):
    feed, pending, seen = alone(kind(100)), [], []

    def meet():
        if pending or not feed.ledger.number:  # a round is committed at the latest when the next one begins
            feed.commit({"a": pending.pop() if pending else feed.report()})
        pending.append(feed.report(overlaps=True))

    feed.meet = meet
    for batch in feed:
        seen += batch.tolist()
        if pending and len(seen) % 5 == 0:
            feed.commit({"a": pending.pop()})
    assert Counter(seen) == Counter(range(100))
    assert (feed.ledger.repeated, feed.ledger.lost) == ({}, {})


def test_what_is_trained_during_a_round_that_gives_the_node_other_parameters_is_lost():
    feed, other = alone(Numbers(100)), alone(Numbers(100), node="b")

    def together(discarded=()):
        reports = {"a": feed.report(overlaps=True), "b": other.report()}
        yield
        for one in (feed, other):
            one.commit(reports, discarded=discarded)
        yield

    list(together())
    batches = iter(feed)
    next(batches)
    round_of_both = together(["a"])
    next(round_of_both)
    next(batches)
    next(round_of_both)
    assert feed.ledger == other.ledger
    assert feed.ledger.lost == {"a": 3}
    list(together())
    assert feed.ledger.lost == {"a": 6}


def test_faster_nodes_are_dealt_more():
    meeting = Meeting()
    nodes = [
        DealtNode(name, meeting, lambda: Numbers(SIZE), [2], epochs=EPOCHS, rate=rate, period_samples=20)
        for name, rate in {"slow": 10.0, "fast": 40.0}.items()
    ]
    run(nodes)
    require_every_sample_once(meeting)
    slow, fast = (sum(node.steps[0]) for node in nodes)
    assert 3 < fast / slow < 5


def test_the_rate_is_measured_without_the_time_of_meetings():
    seconds = [0.0]

    feed = alone(Numbers(60), clock=lambda: seconds[0])
    meet = feed.meet

    def meet_slowly():
        seconds[0] += 100.0
        meet()

    feed.meet = meet_slowly
    for _ in feed:
        seconds[0] += 1.5
    assert feed.report()["rate"] == pytest.approx(2.0)


def test_the_same_samples_with_new_shares_from_the_next_batch_on():
    for kind in (Numbers, Stream):
        feed, seen = alone(kind(50)), []
        feed.between.append(lambda feed=feed, seen=seen: feed.reshare([2 + len(seen) % 3]))
        for batch in feed:
            seen.append(batch.tolist())
        assert Counter(sample for batch in seen for sample in batch) == Counter(range(50))
        assert {len(batch) for batch in seen[:6]} >= {2, 3, 4}


def test_a_run_goes_on_from_a_checkpoint():
    for kind in (Numbers, Stream):
        before, after = alone(kind(50)), alone(kind(50))
        batches = iter(before)
        first = [next(batches).tolist() for _ in range(7)]
        after.resume(before.state())
        assert before.state() == after.state()
        rest = [batch.tolist() for batch in after]
        assert Counter(sample for batch in first + rest for sample in batch) == Counter(range(50))


def test_an_accumulating_loop_sees_when_a_meeting_follows():
    feed = alone(Numbers(30))
    assert [feed.is_at_end for _ in feed] == [(n + 1) in (4, 8, 10) for n in range(10)]
    assert feed.is_at_end is False


def test_samples_count_for_training_and_evaluation():
    model, feed = torch.nn.Linear(1, 1), alone(Numbers(7))
    with pytest.raises(SpecError, match="not from the loader"):
        feed.samples_of(model, torch.zeros(3, 1))
    assert feed.samples_of(model.eval(), torch.zeros(3, 1)) == 3
    assert [feed.samples_of(model.train()) for _ in feed] == [3, 3, 1]


def test_callbacks_between_steps_and_at_the_end_of_an_epoch():
    feed, told = alone(Numbers(20)), []
    feed.between.append(lambda: told.append("between"))
    feed.on_end.append(lambda: told.append(feed.epoch))
    steps = len(list(feed))
    assert told == ["between"] * (steps - 1) + [1]
    for number, _ in enumerate(feed):
        feed.ends_early = number == 1
    assert size_of(feed.ledger.done) + 6 == 6


class Sized(Stream):
    """A stream that says how long it is."""

    def __init__(self, size, length):
        super().__init__(size)
        self.length = length

    def __len__(self):
        return self.length


@pytest.mark.parametrize("length", [20, 26])
def test_a_stream_with_a_length(length):
    feed = alone(Sized(20, length))
    for epoch in range(2):
        assert Counter(sample for batch in feed for sample in batch.tolist()) == Counter(range(20))
        assert feed.epoch == epoch + 1
    alone(Sized(20, length)).adopt(feed.state())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_is_longer_than_it_says_is_refused(workers):
    feed = alone(Sized(20, 15), num_workers=workers)
    with pytest.raises(DataError, match=r"Sized was to be dealt .* length of 15 samples, but has more. Correct"):
        list(feed)
    feed.meet = None


def test_a_stream_is_read_again_for_samples_that_were_skipped_unless_that_is_impossible():
    for stream in (Watched(40), iter(range(40))):
        feed = DealtFeed(stream, node="b", rank=0, samples=[4], period_samples=8, pause_s=0.0)
        other = {"trained": [], "epoch": 0, "wants": 8, "rate": 1.0, "batch": 4}

        def together(feed=feed, other=other):
            feed.commit({"a": other, "b": feed.report()}, discarded=["a"])

        feed.meet = together
        batches = iter(feed)
        assert next(batches).tolist() == [8, 9, 10, 11]
        feed.meet = lambda feed=feed: feed.commit({"b": feed.report()})  # node a is lost
        next(batches)
        if isinstance(stream, Watched):
            rest = [0, 1, 2, 3, 4, 5, 6, 7, *range(16, 40)]
            assert [sample for batch in batches for sample in batch.tolist()] == rest
            assert stream.reads == 2
        else:
            with pytest.raises(DataError, match=r"read from sample 0 on, but 16 samples of it are taken and it can be"):
                next(batches)


def test_data_without_samples_are_refused():
    with pytest.raises(DataError, match=r"epoch 0 of Stream was requested, but it has no samples"):
        list(alone(Stream(0)))
    with pytest.raises(DataError, match=r"epoch 0 of Numbers was requested, but it has no samples"):
        list(alone(Numbers(9), sampler=Nothing()))


class Nothing:
    """A sampler that draws nothing."""

    def __iter__(self):
        return iter([])


def test_nodes_with_other_data_are_refused():
    one, other = alone(Numbers(30)), alone(Numbers(30), node="b")
    next(iter(one))
    next(iter(other))
    with pytest.raises(MismatchError, match=r"node a was .* with nodes b, but their ledgers of commit 1 differ"):
        one.commit({"a": one.report(), "b": other.report()})
    with pytest.raises(DataError, match=r"a ledger of an epoch of 30 samples, but it has 31. Give all nodes the same"):
        alone(Numbers(31)).adopt(one.state())


def test_a_node_that_is_behind_must_take_over_the_ledger_first():
    one, other = alone(Numbers(30)), alone(Numbers(30), node="b")
    next(iter(one))
    with pytest.raises(MismatchError, match=r"with a ledger of commit 0, but node a has that of commit 1. Call adopt"):
        other.commit({"a": one.report(), "b": other.report()})
    other.adopt(one.state())
    with pytest.raises(SpecError, match=r"node b was to follow a round of the nodes a, of which it is none"):
        other.commit({"a": one.report()})
    other.commit({"a": one.report(), "b": other.report()})
    assert other.ledger.number == 2


def test_the_number_of_steps_is_not_known():
    with pytest.raises(TypeError, match="number of steps of an epoch was asked for, but in an elastic run it depends"):
        len(alone(Numbers(9)))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"rank": 1}, DataError, "the batches of rank 1 were asked for, but its node has 1 ranks"),
        ({"period_samples": 0}, SpecError, "period_samples=0 was given for node a"),
        ({"drop_last": True}, SpecError, "drop_last=True was given for an elastic run"),
        ({"seed": "x"}, DataError, "seed='x' was given"),
        ({"samples": [0]}, SpecError, "each rank needs a whole number"),
        ({"batch_size": 3}, SpecError, "batch_size= was given, but feed takes no such option"),
    ],
)
def test_arguments_that_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        DealtFeed(Numbers(9), **{"node": "a", "rank": 0, "samples": [3], "period_samples": 9, **options})


def test_positions_that_are_refused():
    feed = alone(Numbers(9))
    for state in ({}, {"ledger": 3}, {"ledger": {}}, {**feed.state(), "trained": [0]}):
        with pytest.raises(SpecError, match=r"Give what .* returned"):
            feed.resume(state)
    with pytest.raises(SpecError, match=r"nothing says how nodes meet. Set meet="):
        list(DealtFeed(Numbers(9), node="a", rank=0, samples=[3], period_samples=9))
