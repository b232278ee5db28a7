"""Exchanges of a run: those of all its models count, and those that a resumed run repeats count once."""

import pytest

from evenly import Run
from evenly.reports import prediction_rows, remarks
from evenly.reports.page.lines import exchange_lines
from evenly.reports.time_axis import time_axis
from evenly.spec import ExchangeDone
from tests.reports.runs import finished, started
from tests.reports.test_predictions import RANKS, ended, planned


def done(number, at_s, seconds, **more):
    fields = {"step": 10 * number, "merged": 10 * number, "sent_bytes": 100, "weights": (0.5, 0.5), **more}
    return ExchangeDone(at_s=at_s, number=number, seconds=seconds, waited_s=seconds, **fields)


def drawn(*events):
    run = Run(events=events)
    return exchange_lines(run, time_axis(run))["seconds"].value.tolist()


TWO_MODELS = (done(1, 101.0, 1.0), done(1, 102.0, 3.0), done(2, 103.0, 1.0), done(2, 104.0, 3.0))


def test_two_models_that_count_their_exchanges_alike_keep_all_of_them():
    events = (planned(), *TWO_MODELS, ended(*RANKS))
    assert drawn(*events) == [1.0, 3.0, 1.0, 3.0]
    assert remarks(Run(events=events))[0].startswith("4 exchanges took 8 s, training waited for 8 s")
    predicted = {name: measured for name, _, measured, *_ in prediction_rows(Run(events=events))}
    assert float(predicted["an exchange"]) == pytest.approx(2000.0)


def test_what_a_resumed_run_repeats_counts_as_it_was_the_second_time():
    again = started(resumed=10).model_copy(update={"at_s": 200.0})
    repeated = (done(2, 201.0, 5.0), done(2, 202.0, 7.0))
    events = (planned(), *TWO_MODELS, again, *repeated, finished().model_copy(update={"at_s": 210.0}))
    assert drawn(*events) == [1.0, 3.0, 5.0, 7.0]
    assert remarks(Run(events=events))[0].startswith("4 exchanges took 16 s")


def test_an_exchange_that_was_under_way_at_the_checkpoint_is_merged_by_the_resumed_run():
    lost = done(1, 101.0, 1.0, merged=14)  # begun after step 10, before the checkpoint
    again = started(resumed=12).model_copy(update={"at_s": 200.0})
    assert drawn(started(), lost, again, done(1, 201.0, 2.0, merged=14)) == [2.0]
