"""Compares the program of a network in training with the one in evaluation."""

from typing import NamedTuple

from torch import fx
from torch.fx.node import Argument

from evenly._torch import pytree
from evenly._torch.operators import arguments_of
from evenly.graph.inserted import assign

Switches = dict[str, dict[str, tuple[Argument, Argument]]]  # node -> argument -> values in training, evaluation


class ModeDifference(NamedTuple):
    """What differs between training and evaluation, where all outputs are computed by the same operations."""

    switches: Switches  # arguments with other values
    training_only: frozenset[str]  # operations of training that only change buffers


def mode_difference(training: fx.Graph, evaluation: fx.Graph) -> ModeDifference | None:
    """Returns how two lowered graphs differ; None if outputs are computed by other operations."""
    training_only: frozenset[str] = frozenset()
    training_nodes, evaluation_nodes = list(training.nodes), list(evaluation.nodes)
    if not _are_alike(training_nodes, evaluation_nodes):
        if any(node.target is assign for node in evaluation_nodes):
            return None
        training_only = frozenset(node.name for node in _nodes_for_buffers(training))
        training_nodes = [node for node in training_nodes if node.name not in training_only]
        if not _are_alike(training_nodes, evaluation_nodes):
            return None
    names = {a.name: b.name for a, b in zip(training_nodes, evaluation_nodes, strict=True)}
    switches: Switches = {}
    for a, b in zip(training_nodes, evaluation_nodes, strict=True):
        training_arguments, evaluation_arguments = _named_arguments(a, names), _named_arguments(b, {})
        changed = {
            key: (training_arguments[key], evaluation_arguments[key])
            for key in training_arguments
            if training_arguments[key] != evaluation_arguments.get(key)
        }
        if any(isinstance(leaf, _NodeName) for leaf in pytree.tree_leaves(changed)):
            return None
        if changed:
            switches[a.name] = changed
    return ModeDifference(switches, training_only)


class _NodeName(str):
    """The name of a node, in place of the node as an argument."""


def _are_alike(one: list[fx.Node], other: list[fx.Node]) -> bool:
    return [(n.op, str(n.target)) for n in one] == [(n.op, str(n.target)) for n in other]


def _nodes_for_buffers(graph: fx.Graph) -> set[fx.Node]:
    """Returns the operations whose results are only used to change buffers."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        is_used_so = bool(node.users) and all(user in found for user in node.users)
        if node.target is assign or (is_used_so and node.op != "placeholder"):
            found.add(node)
    return found


def _named_arguments(node: fx.Node, names: dict[str, str]) -> dict[str, Argument]:
    named = {str(i): value for i, value in enumerate(node.args)} | dict(node.kwargs)
    for position, argument in enumerate(arguments_of(node.target)):
        if argument.has_default_value() and not argument.kwarg_only and argument.name not in named:
            named.setdefault(str(position), argument.default_value)  # fx leaves out default values
    return {key: fx.map_arg(value, lambda n: _NodeName(names.get(n.name, n.name))) for key, value in named.items()}
