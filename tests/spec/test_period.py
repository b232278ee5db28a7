"""The period that a wish means."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenly import EverySteps
from evenly.errors import SpecError
from evenly.spec import EveryEpoch, EveryGradient, period_of
from tests.spec.values import periods


@given(periods)
def test_a_period_is_itself(period):
    assert period_of(period) is period


@given(st.integers(1, 2**70))
def test_a_number_of_steps_as_number_or_text(steps):
    assert period_of(steps) == period_of(str(steps)) == period_of(f" +{steps} ") == EverySteps(steps)


def test_the_words():
    assert period_of("epoch") == EveryEpoch()
    assert period_of("global") == EveryGradient()
    assert period_of("5 epochs") == period_of(" 5epochs") == EveryEpoch(5) == EveryEpoch(epochs=5)
    assert period_of("1 epoch") == EveryEpoch()
    assert EveryEpoch.model_validate({"kind": "epoch", "warmup": 2}) == EveryEpoch(warmup=2)  # of an older file


@pytest.mark.parametrize("epochs", [0, -1, True, 1.5, "2"])
def test_epochs_are_a_whole_number_from_1(epochs):
    with pytest.raises(SpecError, match="EveryEpoch is not valid: epochs: "):
        EveryEpoch(epochs)
    with pytest.raises(SpecError, match="EveryEpoch is not valid: epochs: "):
        period_of("0 epochs")


@pytest.mark.parametrize("wish", [0, -1, "0", "-1", " -7 "])
def test_a_period_of_no_steps_is_refused(wish):
    with pytest.raises(SpecError, match="K' at least 1"):
        period_of(wish)


@pytest.mark.parametrize(
    "wish", [True, False, 1.5, 2.0, "x", "", "1.5", "1 2", "--5", "²", "٣", "Epoch", None, [3], b"3"]
)
def test_what_is_no_period_is_refused(wish):
    with pytest.raises(SpecError, match="is not a period"):
        period_of(wish)


@pytest.mark.parametrize("steps", [0, -1, True, 1.5, 2.0, "x", None])
def test_steps_are_a_whole_number_from_1(steps):
    with pytest.raises(SpecError, match="EverySteps is not valid: steps: "):
        EverySteps(steps)


@pytest.mark.parametrize("kind", [EverySteps, EveryEpoch])
def test_a_warm_up_is_a_whole_number_from_0(kind):
    steps = {"steps": 2} if kind is EverySteps else {}
    assert kind(**steps, warmup=3).warmup == 3
    for warmup in (-1, 0.5, True):
        with pytest.raises(SpecError, match="warmup"):
            kind(**steps, warmup=warmup)


def test_steps_stand_first_and_only_once():
    assert EverySteps(5) == EverySteps(steps=5)
    with pytest.raises(TypeError, match="EverySteps takes 1 positional arguments, 2 were given"):
        EverySteps(5, 6)
    with pytest.raises(TypeError, match="EverySteps was given steps twice"):
        EverySteps(5, steps=6)
    with pytest.raises(SpecError, match="EverySteps is not valid: steps: Field required"):
        EverySteps()
