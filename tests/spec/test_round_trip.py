"""A value survives being a file, exactly; what it may not say is refused with the place where it stands."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from evenly.errors import SpecError
from evenly.spec import Cluster, EverySteps, Measured, Period, Plan, Run
from tests.spec.values import clusters, forecasts, periods, plans, profiles, runs

DOCUMENTS = st.one_of(clusters(), plans(), runs, profiles(), forecasts)


def places(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yields every object of known fields in a JSON value, with its path; dicts of free names are left out."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from places(item, (*path, str(number)))
    elif isinstance(value, dict) and path[-1:] not in (("settings",), ("values",), ("layers",)):
        yield path, value
        for name, item in value.items():
            yield from places(item, (*path, name))


@given(DOCUMENTS)
def test_json_gives_an_equal_value_back(value):
    assert type(value).from_json(value.to_json()) == value
    assert type(value).from_json(value.to_json().encode()) == value


@given(periods)
def test_periods_are_told_apart_in_json(period):
    adapter = TypeAdapter(Period)
    assert adapter.validate_json(adapter.dump_json(period)) == period


@given(plan=plans())
def test_a_file_gives_an_equal_value_back(tmp_path_factory, plan):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan


@given(DOCUMENTS, st.data())
def test_an_unknown_field_is_refused_with_its_path_wherever_it_stands(value, data):
    tree = json.loads(value.to_json())
    path, node = data.draw(st.sampled_from(list(places(tree))))
    node["wrod"] = 5
    with pytest.raises(SpecError) as caught:
        type(value).from_json(json.dumps(tree))
    assert f" {'.'.join((*path, 'wrod'))}: unknown field, given 5" in str(caught.value)


@given(DOCUMENTS, st.sampled_from([0, 2, "2", None]))
def test_another_version_is_refused(value, version):
    tree = {**json.loads(value.to_json()), "version": version}
    with pytest.raises(SpecError, match=rf"{type(value).__name__} is not valid: version: .*{version!r}"):
        type(value).from_json(json.dumps(tree))


@given(DOCUMENTS, st.data())
def test_values_are_frozen(value, data):
    name = data.draw(st.sampled_from(sorted(type(value).model_fields)))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(value, name, getattr(value, name))


def test_frozen_all_the_way_down(plan_2_1):
    for inner in (plan_2_1.roles[0], plan_2_1.period, plan_2_1.exchange):
        with pytest.raises(ValidationError, match="frozen"):
            inner.kind = "other"
    assert hash(plan_2_1.period) == hash(EverySteps(8))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{'version': 1}", b"\xff\xfe"])
@pytest.mark.parametrize("kind", [Cluster, Plan, Run])
def test_what_is_not_such_a_json_object_is_refused(kind, text):
    with pytest.raises(SpecError, match=rf"^{kind.__name__} is not valid: "):
        kind.from_json(text)


def test_files_that_cannot_be_read_or_written_are_named(tmp_path, plan_2_1):
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(SpecError, match=rf"cannot read Plan from {path}"):
            Plan.load(path)
    with pytest.raises(SpecError, match=rf"cannot write Plan to {tmp_path}/no/plan.json"):
        plan_2_1.save(tmp_path / "no" / "plan.json")


def test_a_loss_that_is_not_finite_is_told_as_none():
    values = {"loss": float("nan"), "scale": float("inf"), "accuracy": 0.5, "step": 3}
    told = Measured(at_s=0.0, step=1, values=values)
    assert told.values == {"loss": None, "scale": None, "accuracy": 0.5, "step": 3}
    assert Measured.model_validate_json(told.model_dump_json()) == told
