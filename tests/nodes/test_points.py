"""What codes lose is never forgotten, and what travels is what the settings say."""

import pytest
import torch

from evenly._errors import SpecError
from evenly.comm import open_group
from evenly.nodes import add_codec
from evenly.nodes.cargo import Agreed, _add_state
from evenly.nodes.fragments import split
from evenly.nodes.membership import Quorum
from evenly.nodes.points import Part, Points
from evenly.nodes.state import Entry, Rows
from evenly.spec import Exchange
from tests.ranks import run_ranks


class _Patient:
    def wait(self, works, meeting=False):
        for work in works:
            work.wait()


def _agree(points, values, group, weights, node, *, exact=False):
    part = Part(values.clone(), group, "0/x/0")
    quorum = Quorum(weights, node, (1.0,))
    points.agree([part], quorum, _Patient(), exact=exact)
    return part.values


def test_a_node_without_samples_keeps_what_its_code_lost():
    def act(party):
        group = open_group(party, "pair", [0, 1], backend="gloo", timeout_s=20.0)
        points, start = Points(Exchange(codec="int4")), torch.zeros(100, dtype=torch.float64)
        points.begin([Part(start, group, "0/x/0")])
        values = torch.randn(100, generator=torch.Generator().manual_seed(party.rank), dtype=torch.float64)
        first = _agree(points, values, group, (0.5, 0.5), party.rank)
        before = points.state()["0/x/0"]["lost"].clone()
        second = _agree(points, first, group, (1.0, 0.0), party.rank)
        after = points.state()["0/x/0"]["lost"]
        third = _agree(points, second, group, (0.5, 0.5), party.rank, exact=True)
        group.shutdown()
        return values, before, after, third

    (_, _, _, ended), (_, before, after, other) = run_ranks(2, act)
    assert torch.equal(before, after)
    assert before.abs().max() > 0
    assert torch.equal(ended, other)


def test_an_exact_exchange_brings_all_that_was_lost():
    """Both stand still after the first exchange: the exact one must end at the true average."""

    def act(party):
        group = open_group(party, "pair", [0, 1], backend="gloo", timeout_s=20.0)
        points = Points(Exchange(codec="int4"))
        points.begin([Part(torch.zeros(101, dtype=torch.float64), group, "0/x/0")])
        values = torch.randn(101, generator=torch.Generator().manual_seed(party.rank), dtype=torch.float64)
        coded = _agree(points, values, group, (0.25, 0.75), party.rank)
        exact = _agree(points, coded, group, (0.25, 0.75), party.rank, exact=True)
        group.shutdown()
        return values, coded, exact

    (first, coded, exact), (second, _, _) = run_ranks(2, act)
    truth = 0.25 * first + 0.75 * second
    assert (coded - truth).abs().max() > 0.01
    torch.testing.assert_close(exact, truth, rtol=0, atol=1e-6)  # scales of codes are float32


@pytest.mark.parametrize("slot", ["momentum_buffer", "exp_avg_sq", "mine"])
def test_squares_do_not_fall_below_zero_and_momenta_may(slot):
    tensor, change = torch.tensor([0.0, 2.0]), torch.tensor([-1.0, -1.0])
    _add_state(slot, [Agreed(Entry("w", f"0.{slot}", tensor, slot), tensor, change)])
    assert tensor.tolist() == ([-1.0, 1.0] if slot == "momentum_buffer" else [0.0, 1.0])


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_fragments_take_the_rows_whose_middle_lies_in_them(count):
    shapes = [(3,), (7, 5), (1, 40), (), (30, 2), (0, 4), (2, 1), (11, 3)]
    entries = [Entry(f"p{place}", f"p{place}", torch.empty(shape)) for place, shape in enumerate(shapes)]
    sizes = [entry.tensor.numel() for entry in entries]
    total, begun = sum(sizes), 0
    found = split(entries, sizes, count, rows=True)
    for entry, size in zip(entries, sizes, strict=True):
        places = [place for place in range(count) if entry.home in found[place]]
        rows = [found[place][entry.home] for place in places]
        if rows != [None]:
            height, width = entry.tensor.shape[0], size // entry.tensor.shape[0]
            owners = [min((begun + row * width + width // 2) * count // total, count - 1) for row in range(height)]
            wanted = [Rows(owners.index(p), owners.index(p) + owners.count(p)) for p in sorted(set(owners))]
            assert (places, rows) == (sorted(set(owners)), wanted)
        begun += size


def test_a_codec_that_cannot_work_is_refused_when_it_is_made_known():
    def as_floats(values):
        return values.float().contiguous().view(torch.uint8)

    with pytest.raises(SpecError, match=r"torch\.uint8"):
        add_codec("floats", lambda values: values, lambda code, size: code)
    with pytest.raises(SpecError, match="Decode as many"):
        add_codec("half", as_floats, lambda code, size: code.view(torch.float32)[: size // 2])
    with pytest.raises(SpecError, match="known already"):
        add_codec("fp32", as_floats, lambda code, size: code.view(torch.float32))
