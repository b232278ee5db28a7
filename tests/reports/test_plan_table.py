"""What a person reads of a plan: rows, bars, sentences, filters of cut networks, two forecasts side by side."""

import pytest

from evenly.layouts import lay_out
from evenly.reports import (
    bars,
    block_rows,
    compare,
    left_out_notes,
    plan_cells,
    rank_cells,
    rank_rows,
    side_by_side,
    totals,
)
from evenly.spec import EverySteps, Prediction
from tests.reports.plans import graph_of, planned


def test_a_row_says_who_computes_how_long_and_for_whom_it_waits():
    made, told, cluster = planned(2, 1, speeds=[60, 30, 10], every=10)
    rows = rank_rows(made, told, cluster)
    assert [row.samples for row in rows] == [role.samples for role in made.roles]
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert {row.node for row in rows} == {"host0", "host1"}
    for row in rows:  # every rank's time is the whole time
        assert row.total_s == pytest.approx(told.step_s, rel=1e-6)
    assert plan_cells(rows[0])[:4] == ("0", "host0", "cpu", "60 (60.0%)")


def test_a_rank_that_is_left_out_has_no_times_and_a_reason_below():
    rows = rank_rows(*planned(2, 1, speeds=[100, 90, 0.001]))
    assert plan_cells(rows[2])[3:] == ("left out", "-", "-", "-", "-")
    assert left_out_notes(rows) == [f"rank 2 is left out: {rows[2].left_out}"]
    assert bars(rows, width=20)[2] == "rank 2 left out"


def test_ranks_that_are_left_out_for_one_reason_are_named_in_one_line():
    rows = rank_rows(*planned(1, 2, 12, speeds=[1000, *[1.0] * 14]))
    (line,) = left_out_notes(rows)
    assert line.startswith("ranks 1, 2, 3, 4, 5, 6, 7, 8 and 6 more are left out: ")


@pytest.mark.parametrize(("ascii_only", "signs"), [(False, "█▒░"), (True, "#=.")])
def test_bars_are_as_long_as_the_times(ascii_only, signs):
    rows = rank_rows(*planned(1, 1, speeds=[60, 35], batch_size=15, every=3))
    lines = bars(rows, width=40, ascii_only=ascii_only)
    assert all(set(line[7:47]) <= set(signs) and line[47] == " " for line in lines[:-1])
    longest = max(rows, key=lambda row: row.compute_s)
    assert lines[longest.rank].count(signs[0]) == round(40 * longest.compute_s / longest.total_s)
    assert all(sign in lines[-1] for sign in signs)
    assert all(line.isascii() for line in lines) == ascii_only


def test_no_rows_have_no_bars():
    assert len(bars([], width=10)) == 1


@pytest.mark.parametrize(
    ("every", "words"),
    [
        (20, "every 20 steps"),
        (1, "after every step"),
        ("epoch", "once an epoch"),
        ("global", "of gradients"),
        ("5 epochs", "every 5 epochs (of 1000 steps each)"),
    ],
)
def test_the_whole_is_said_in_sentences(every, words):
    made, told, _ = planned(2, 1, speeds=[60, 30, 10], every=every)
    lines = totals(made, told)
    assert f"{told.samples_per_s:.4g} samples/s" in lines[0]
    assert "the speeds you gave" in lines[1]
    assert words in lines[2]
    assert f"{told.exchange_s / told.seconds:.1%} of the time" in lines[2]
    measured = made.model_copy(update={"predicted": Prediction(step_s=1.0)})
    assert "predicted from what was measured" in totals(measured, told)[1]


def test_one_node_has_no_exchanges():
    made, told, _ = planned(2, speeds=[2, 1])
    assert totals(made, told)[-1] == "no exchanges: only one node takes part"


def test_layers_of_a_cut_network_are_told_with_what_each_rank_has():
    rows = block_rows(lay_out(graph_of(), [3, 1]))
    assert [row.layers for row in rows] == ["first", "second"]
    assert rows[0].counts == (96, 32)
    assert {row.unit for row in rows} <= {"outputs", "inputs"}


def test_neighbours_that_are_cut_alike_are_one_row():
    layout = lay_out(graph_of(), [3, 1])
    again = [choice.model_copy(update={"where": f"again{index}"}) for index, choice in enumerate(layout.choices[-2:])]
    rows = block_rows(layout.model_copy(update={"choices": (*layout.choices, again[1], again[1])}))
    assert [row.layers for row in rows] == ["first", "second .. again1 (3)"]


def test_a_layer_that_is_not_cut_is_whole():
    choices = [c.model_copy(update={"needs": (), "gives": ()}) for c in lay_out(graph_of(), [1, 1]).choices]
    (row,) = block_rows(lay_out(graph_of(), [1, 1]).model_copy(update={"choices": tuple(choices)}))
    assert (row.layers, row.unit, row.counts) == ("first .. second (2)", "whole", ())


def test_two_forecasts_stand_side_by_side():
    made, before, cluster = planned(2, 1, speeds=[60, 30, 10], every=10)
    later, after, _ = planned(2, 1, speeds=[60, 30, 10], every=50)
    rows = {row[0]: row[1:] for row in compare(before, after)}
    assert rows["exchanges in 100 steps"] == ("10", "2", "-80.0%")
    assert rows["exchanges, part of the time"][2].endswith("points")
    assert all(len(row) == 2 for row in compare(before, None))
    assert later.period == EverySteps(50)
    pairs = list(side_by_side(rank_rows(made, before, cluster), rank_rows(later, after, cluster)))
    cells = rank_cells(*pairs[0])
    assert cells[2] == "60"
    assert "→" in cells[4]
    assert "->" in rank_cells(*pairs[0], arrow="->")[4]


def test_a_new_rank_is_called_new():
    few, many = planned(2, speeds=[1, 1]), planned(3, speeds=[1, 1, 1])
    pairs = list(side_by_side(rank_rows(*few), rank_rows(*many)))
    assert pairs[2][0] is None
    assert rank_cells(*pairs[2])[2].startswith("new → 3")
    assert rank_cells(None, None) == ()
