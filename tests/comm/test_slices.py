"""Who owns what of a flat vector: every part once in every node, whatever the numbers of ranks."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from evenly.comm import owners_of_slices
from evenly.comm.blocks.index_blocks import ParticipantTensor, index_blocks
from evenly.comm.blocks.replicas import FLAT, whole_replicas
from tests.ranks import ragged
from tests.spec.values import rank_lists

totals = st.integers(1, 1000)


def slices_of(nodes, total):
    """Returns start, end and owners of each block of a vector."""
    sides = [ParticipantTensor((total,), FLAT, replicas) for replicas in whole_replicas(nodes)]
    return [(*block[0], tuple(side.owner(block) for side in sides)) for block in index_blocks((total,), sides)]


@given(rank_lists(), totals)
def test_slices_cover_the_whole_without_overlap(nodes, total):
    slices = slices_of(nodes, total)
    assert slices[0][0] == 0
    assert slices[-1][1] == total
    assert all(before[1] == after[0] for before, after in pairwise(slices))
    assert all(start < stop for start, stop, _ in slices)


@given(rank_lists(), totals)
def test_a_slice_has_one_owner_in_every_node(nodes, total):
    for _, _, owners in slices_of(nodes, total):
        assert len(owners) == len(nodes)
        assert all(owner in ranks for owner, ranks in zip(owners, nodes, strict=True))


@given(rank_lists(), totals)
def test_slices_lie_in_the_order_of_the_circles_that_have_groups(nodes, total):
    circles = iter(owners_of_slices(nodes))
    assert all(owners in circles for _, _, owners in slices_of(nodes, total))  # each is found after the one before
    assert len(slices_of(nodes, 12 * total)) == len(owners_of_slices(nodes))  # nodes have up to 4 ranks


@given(rank_lists(), totals)
def test_what_a_rank_owns_depends_on_its_own_node_alone(nodes, total):
    slices = slices_of(nodes, total)
    for ranks in nodes:
        for place, rank in enumerate(ranks):
            ranges = [range(start, stop) for start, stop, owners in slices if rank in owners]
            first, last = (total * edge // len(ranks) for edge in (place, place + 1))
            assert [n for own in ranges for n in own] == list(range(first, last))


@given(rank_lists(), totals)
def test_the_ranks_of_a_node_own_equal_parts_up_to_one_element(nodes, total):
    for ranks in nodes:
        sizes = [sum(b - a for a, b, owners in slices_of(nodes, total) if rank in owners) for rank in ranks]
        assert sum(sizes) == total
        assert max(sizes) - min(sizes) <= 1


def test_equal_nodes_need_no_more_slices_than_ranks_a_node():
    assert owners_of_slices(ragged(2, 2)) == [(0, 2), (1, 3)]
    assert owners_of_slices(ragged(3, 2)) == [(0, 3), (1, 3), (1, 4), (2, 4)]
    assert owners_of_slices(ragged(3)) == [(0,), (1,), (2,)]
