"""Who owns what of a flat vector: every part once in every node, whatever the numbers of ranks."""

from fractions import Fraction
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from evenly.comm import refine, slices
from tests.ranks import ragged
from tests.spec.values import rank_lists

totals = st.integers(0, 1000)


@given(rank_lists())
def test_segments_cover_the_whole_without_overlap(nodes):
    segments = refine(nodes)
    assert segments[0].start == 0
    assert segments[-1].stop == 1
    assert all(before.stop == after.start for before, after in pairwise(segments))
    assert all(segment.start < segment.stop for segment in segments)


@given(rank_lists())
def test_a_segment_has_one_owner_in_every_node(nodes):
    for segment in refine(nodes):
        assert len(segment.owners) == len(nodes)
        assert all(owner in ranks for owner, ranks in zip(segment.owners, nodes, strict=True))


@given(rank_lists())
def test_the_ranks_of_a_node_own_equal_fractions(nodes):
    for ranks in nodes:
        for rank in ranks:
            owned = sum((s.stop - s.start for s in refine(nodes) if rank in s.owners), Fraction())
            assert owned == Fraction(1, len(ranks))


@given(rank_lists(), totals)
def test_the_slice_of_a_rank_is_the_union_of_its_segments(nodes, total):
    segments = refine(nodes)
    for ranks in nodes:
        for rank, (first, last) in zip(ranks, slices(ranks, total), strict=True):
            ranges = [segment.range_of(total) for segment in segments if rank in segment.owners]
            assert [n for start, stop in ranges for n in range(start, stop)] == list(range(first, last))


@given(st.integers(1, 9), totals)
def test_slices_differ_by_one_at_most_and_cover_everything(count, total):
    ranges = slices(range(count), total)
    assert [n for first, last in ranges for n in range(first, last)] == list(range(total))
    sizes = [last - first for first, last in ranges]
    assert max(sizes) - min(sizes) <= 1


def test_equal_nodes_need_no_more_segments_than_ranks_a_node():
    assert [segment.owners for segment in refine(ragged(2, 2))] == [(0, 2), (1, 3)]
    assert [segment.owners for segment in refine(ragged(3, 2))] == [(0, 3), (1, 3), (1, 4), (2, 4)]
    assert [segment.owners for segment in refine(ragged(3))] == [(0,), (1,), (2,)]
