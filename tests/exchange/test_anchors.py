"""What codes lose is never forgotten, and what travels is what the settings say."""

import pytest
import torch

from evenly.comm import open_group
from evenly.comm.blocks.slice import Slice
from evenly.errors import SpecError
from evenly.exchange import add_codec
from evenly.exchange.anchors import Anchors
from evenly.exchange.membership import Quorum
from evenly.exchange.payload import PayloadEntry, _add_state
from evenly.exchange.tensors.averaged_tensors import AveragedTensor, Rows
from evenly.exchange.tensors.fragments import entries_in, split
from evenly.spec import Exchange
from tests.ranks import run_ranks


class _Patient:
    def wait(self, works, waits_for_ranks=False):
        for work in works:
            work.wait()


def _agree(points, values, group, weights, node, *, exact=False):
    part = Slice(values.clone(), group, "0/x/0")
    quorum = Quorum(weights, node, (1.0,))
    points.agree([part], quorum, _Patient(), exact=exact)
    return part.values


def test_a_node_without_samples_keeps_what_its_code_lost():
    def act(rank_group):
        group = open_group(rank_group, "pair", [0, 1], backend="gloo", timeout_s=20.0)
        points, start = Anchors(Exchange(codec="int4")), torch.zeros(100, dtype=torch.float64)
        points.reset([Slice(start, group, "0/x/0")])
        values = torch.randn(100, generator=torch.Generator().manual_seed(rank_group.rank), dtype=torch.float64)
        first = _agree(points, values, group, (0.5, 0.5), rank_group.rank)
        before = points.state()["0/x/0"]["lost"].clone()
        second = _agree(points, first, group, (1.0, 0.0), rank_group.rank)
        after = points.state()["0/x/0"]["lost"]
        third = _agree(points, second, group, (0.5, 0.5), rank_group.rank, exact=True)
        group.shutdown()
        return values, before, after, third

    (_, _, _, ended), (_, before, after, other) = run_ranks(2, act)
    assert torch.equal(before, after)
    assert before.abs().max() > 0
    assert torch.equal(ended, other)


def test_an_exact_exchange_brings_all_that_was_lost():
    """Both stand still after the first exchange: the exact one must end at the true average."""

    def act(rank_group):
        group = open_group(rank_group, "pair", [0, 1], backend="gloo", timeout_s=20.0)
        points = Anchors(Exchange(codec="int4"))
        points.reset([Slice(torch.zeros(101, dtype=torch.float64), group, "0/x/0")])
        values = torch.randn(101, generator=torch.Generator().manual_seed(rank_group.rank), dtype=torch.float64)
        coded = _agree(points, values, group, (0.25, 0.75), rank_group.rank)
        exact = _agree(points, coded, group, (0.25, 0.75), rank_group.rank, exact=True)
        group.shutdown()
        return values, coded, exact

    (first, coded, exact), (second, _, _) = run_ranks(2, act)
    truth = 0.25 * first + 0.75 * second
    assert (coded - truth).abs().max() > 0.01
    torch.testing.assert_close(exact, truth, rtol=0, atol=1e-6)  # scales of codes are float32


@pytest.mark.parametrize("slot", ["momentum_buffer", "exp_avg_sq", "mine"])
def test_squares_do_not_fall_below_zero_and_momenta_may(slot):
    tensor, change = torch.tensor([0.0, 2.0]), torch.tensor([-1.0, -1.0])
    _add_state(slot, [PayloadEntry(AveragedTensor("w", f"0.{slot}", tensor, slot), tensor, change)])
    assert tensor.tolist() == ([-1.0, 1.0] if slot == "momentum_buffer" else [0.0, 1.0])


def entries_of(**shapes):
    return [AveragedTensor(name, name, torch.empty(shape)) for name, shape in shapes.items()]


@pytest.mark.parametrize(
    ("count", "rows", "expected"),
    [
        (1, True, [{"a": None, "b": None, "c": None}]),
        (2, True, [{"a": None, "b": None}, {"c": None}]),
        (3, True, [{"a": Rows(0, 3)}, {"a": Rows(3, 4), "b": None, "c": Rows(0, 2)}, {"c": Rows(2, 5)}]),
        (
            5,
            True,
            [{"a": Rows(0, 2)}, {"a": Rows(2, 4)}, {"b": None, "c": Rows(0, 1)}, {"c": Rows(1, 3)}, {"c": Rows(3, 5)}],
        ),
        (3, False, [{"a": None}, {"b": None}, {"c": None}]),
    ],
)
def test_fragments_take_the_rows_whose_middle_lies_in_them(count, rows, expected):
    """Elements 0-39, 40-49 and 50-99: rows of a and c are ten wide, so that their middles are 5, 15, ... 95."""
    entries = entries_of(a=(4, 10), b=(10,), c=(5, 10))
    assert split(entries, [40, 10, 50], count, rows=rows) == expected


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_fragments_are_about_equal_and_have_every_row_once(count):
    entries = entries_of(a=(3,), b=(7, 5), c=(1, 40), d=(), e=(30, 2), f=(0, 4), g=(2, 1), h=(11, 3))
    found = split(entries, [3, 35, 40, 1, 60, 0, 2, 33], count, rows=True)
    largest = 40  # of what is never cut
    for fragment in found:
        assert abs(sum(part.tensor.numel() for part in entries_in(entries, fragment)) - 174 / count) <= largest
    for entry in entries:
        pieces = [fragment[entry.home] for fragment in found if entry.home in fragment]
        if pieces != [None]:
            assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
            assert pieces[-1].stop == len(entry.tensor)
            assert all(piece.start < piece.stop for piece in pieces)


def test_a_codec_that_cannot_work_is_refused_when_it_is_made_known():
    def as_floats(values):
        return values.float().contiguous().view(torch.uint8)

    with pytest.raises(SpecError, match=r"torch\.uint8"):
        add_codec("floats", lambda values: values, lambda code, size: code)
    with pytest.raises(SpecError, match="Decode as many"):
        add_codec("half", as_floats, lambda code, size: code.view(torch.float32)[: size // 2])
    with pytest.raises(SpecError, match="known already"):
        add_codec("fp32", as_floats, lambda code, size: code.view(torch.float32))
