"""What a plan predicted beside what was measured."""

from evenly import Run, report
from evenly.reports import PREDICTION_HEADERS, prediction_rows
from evenly.session.counters import phases_of
from evenly.spec import ExchangeDone, RunFinished, RunStarted
from evenly.spec.plan import Prediction
from tests.reports.runs import finished, started

ROW = dict.fromkeys(("compute_s", "gradients_s", "exchange_s", "waiting_s", "gradient_bytes", "sent_bytes"), 1.0)


def times(median_s: float, computing_s: float) -> dict[str, float]:
    step = {"step/lower_s": 0.9 * median_s, "step/median_s": median_s, "step/upper_s": 1.2 * median_s}
    names = ("computing/lower_s", "computing/median_s", "computing/upper_s")
    return {**ROW, **step, **dict.fromkeys(names, computing_s)}


def planned(*, predicted: bool = True, every: int | str = 50) -> RunStarted:
    start = started(every=every)
    assert start.plan is not None
    roles = [role.model_copy(update={"compute_s": 0.008}) for role in start.plan.roles]
    prediction = Prediction(step_s=0.01, exchange_s=0.1) if predicted else None
    plan = start.plan.model_copy(update={"roles": tuple(roles), "predicted": prediction})
    return start.model_copy(update={"plan": plan})


def ended(*rows: dict[str, float]) -> RunFinished:
    return finished().model_copy(update={"phases": phases_of(list(rows), [[0, 1, 2], [3]], 10.0)})


def exchange(number: int, seconds: float) -> ExchangeDone:
    return ExchangeDone(at_s=1.0, number=number, step=8, seconds=seconds, sent_bytes=5, weights=(0.5, 0.5))


RANKS = [times(0.011, 0.006), times(0.011, 0.004), times(0.011, 0.016), times(0.02, 0.008)]


def test_the_slowest_rank_the_exchanges_and_the_computing_of_each_rank() -> None:
    run = Run(events=(planned(), *(exchange(n, s) for n, s in enumerate((0.1, 0.3, 0.2))), ended(*RANKS)))
    assert prediction_rows(run) == [
        ("a step", "10.0", "20.0", "18.0 to 24.0", "2.00"),
        ("an exchange", "100.0", "200.0", "150.0 to 250.0", "2.00"),
        ("rank 0 computing", "8", "6", "6 to 6", "0.75"),
        ("rank 1 computing", "8", "4", "4 to 4", "0.50"),
        ("rank 2 computing", "8", "16.0", "16.0 to 16.0", "2.00"),
        ("rank 3 computing", "8", "8", "8 to 8", "1.00"),
    ]
    assert all(header in report(run) for header in PREDICTION_HEADERS)
    assert "predicted" not in report(run, run)


def test_a_run_without_a_prediction_or_of_an_earlier_version_shows_nothing_new() -> None:
    assert prediction_rows(Run(events=(planned(predicted=False), ended(*RANKS)))) == []
    assert prediction_rows(Run(events=(planned(), ended(ROW, ROW, ROW, ROW)))) == []
    assert prediction_rows(Run(events=(planned(), finished()))) == []
    assert prediction_rows(Run(events=(planned(),))) == []


def test_gradients_of_all_ranks_have_no_exchange_of_their_own() -> None:
    run = Run(events=(planned(every="global"), exchange(1, 0.1), ended(*RANKS)))
    assert [name for name, *_ in prediction_rows(run)][:2] == ["a step", "rank 0 computing"]


def test_of_a_resumed_run_the_last_start_that_ended_counts() -> None:
    resumed = planned().model_copy(update={"resumed_step": 20})
    later = [times(0.03, 0.006)] * 4
    run = Run(events=(planned(), ended(*RANKS), resumed, ended(*later), resumed))
    assert prediction_rows(run)[0][:3] == ("a step", "10.0", "30.0")
