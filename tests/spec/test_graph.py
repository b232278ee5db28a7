"""Graphs that were edited by hand."""

import json

import pytest

from evenly.errors import SpecError
from evenly.spec import Graph
from tests.reports.plans import graph_of


def test_layers_take_what_layers_before_them_give_out():
    graph = graph_of()
    assert Graph.from_json(graph.to_json()) == graph
    with pytest.raises(SpecError, match=r"takes '.*', which no layer before it gives out"):
        Graph(model="net", layers=graph.layers[::-1])


def test_names_are_given_once():
    first, *others = graph_of().layers
    with pytest.raises(SpecError, match="more than one layer gives out"):
        Graph(model="net", layers=(first, first, *others))


def test_sizes_are_not_negative():
    value = json.loads(graph_of().to_json())
    value["layers"][0]["outputs"][0]["shape"][0] = -1
    with pytest.raises(SpecError, match=r"layers\.0\.outputs\.0\.shape"):
        Graph.from_json(json.dumps(value))
