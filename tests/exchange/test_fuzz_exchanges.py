"""Runs with any form of exchange end as a single process that plays all ranks ends, or are refused on all ranks."""

import pytest

from evenly.spec import EverySteps, Exchange
from tests.exchange import cut_exchange_fuzz
from tests.exchange.exchange_fuzz import judge
from tests.exchange.exchange_programs import RandomRun, make

QUICK, CUT = (0, 2, 5, 8, 11, 34, 83, 128, 140, 142), (1, 10)
MORE, MORE_CUT = range(1000, 1120), range(1000, 1020)
ENDS = ("equal", "refused")


@pytest.mark.parametrize("seed", QUICK)
def test_a_random_run(seed):
    assert judge(make(seed)) in ENDS


@pytest.mark.parametrize("seed", CUT)
def test_a_random_run_of_a_cut_network(seed):
    assert cut_exchange_fuzz.judge(*cut_exchange_fuzz.make(seed)) in ENDS


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(MORE.start, MORE.stop, 20))
def test_twenty_random_runs(first):
    ends = {seed: judge(make(seed)) for seed in range(first, first + 20)}
    assert {seed: end for seed, end in ends.items() if end not in ENDS} == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(MORE_CUT.start, MORE_CUT.stop, 10))
def test_ten_random_runs_of_cut_networks(first):
    ends = {seed: cut_exchange_fuzz.judge(*cut_exchange_fuzz.make(seed)) for seed in range(first, first + 10)}
    assert {seed: end for seed, end in ends.items() if end not in ENDS} == {}


def run_of(*operations, sizes=(1, 1), optimizer="momentum", steps=3, **exchange):
    """Returns a run whose steps are given by their numbers."""
    batches = tuple(3 + rank for rank in range(sum(sizes)))
    found = [("step", one, batches) if isinstance(one, int) else one for one in operations]
    settings = Exchange(timeout_s=30.0, **exchange)
    return RandomRun(0, sizes, EverySteps(steps), settings, "plain", optimizer, found)


FORMS = {
    "plain": {},
    "nesterov": {"outer": "nesterov"},
    "sgd": {"outer": {"name": "SGD", "settings": {"lr": 1.0}}, "overlap": 1},
    "bf16": {"codec": "bf16", "fragments": 2},
    "int8": {"codec": "int8", "overlap": 2},
    "int4": {"codec": "int4", "outer": "nesterov", "fragments": 2, "overlap": 1},
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_written_by_hand_are_a_change_of_the_node_like_a_step(form):
    by_hand = (0, ("write", 5, None), 1, ("nudge", 3, 1), 2, ("scale", 0.9), 3, 4, ("nudge", 4, 0), 5, 6)
    assert judge(run_of(*by_hand, sizes=(2, 1), **FORMS[form])) == "equal"


@pytest.mark.parametrize("form", ["plain", "nesterov", "int8"])
def test_weights_written_by_hand_after_a_swap_are_not_taken_for_loaded(form):
    assert judge(run_of(0, ("swap", 1), ("nudge", 2, 0), 1, 2, 3, **FORMS[form])) == "equal"


def test_an_evaluation_weighs_a_node_that_has_loaded_as_the_end_does():
    assert judge(run_of(0, 1, ("load", 1, 0), ("evaluate",))) == "equal"


@pytest.mark.parametrize("node", [None, 0])
def test_a_checkpoint_after_a_load_counts_no_samples_before_it(node):
    assert judge(run_of(0, 1, 2, 3, ("load", 1, node), ("restart", None), 4, 5)) == "equal"


def test_a_checkpoint_knows_that_one_node_has_loaded():
    assert judge(run_of(0, 1, 2, ("load", 1, 0), ("restart", None))) == "equal"


def test_a_checkpoint_beside_an_exchange_knows_that_state_was_loaded():
    settings = {"overlap": 2, "optimizer_state": "reset"}
    assert judge(run_of(0, 1, 2, ("load optimizer", 0.5), ("restart", None), 3, 4, 5, **settings)) == "equal"


@pytest.mark.parametrize(("node", "end"), [(None, "equal"), (0, "refused")])
def test_another_codec_goes_on_only_from_weights_that_are_the_same_everywhere(node, end):
    written = ("write", 1, None) if node is None else ("nudge", 1, node)
    assert judge(run_of(0, 1, 2, written, ("restart", "int8"), 3, 4, 5)) == end
