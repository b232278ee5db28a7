"""Branches that forward took because of the sizes of the example; other batches must take the same."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import fx

from evenly.errors import SpecError
from evenly.graph.shapes import MetaValue, Shapes


class Expression(Protocol):
    """A sympy expression in the symbols that torch.export gives to sizes."""

    def xreplace(self, rule: Mapping["Expression", int]) -> object:
        """Returns the expression with symbols replaced by numbers."""


class Condition(NamedTuple):
    """A guard of torch.export on the batch size, and the symbol of each input's batch size."""

    guard: Expression | bool
    symbols: dict[str, Expression]


@dataclass(frozen=True)
class Decision:
    """A traced value whose truth, number or length Python used, and what that was for the example."""

    name: str
    evaluate: Callable[[MetaValue], object]  # bool, len, or the number itself
    result: object
    where: str


@dataclass
class Decisions:
    """All decisions of one traced forward; `require` raises if another batch would change one."""

    program: fx.GraphModule | None = None
    entries: list[Decision] = field(default_factory=list)
    conditions: list[Condition] = field(default_factory=list)  # of torch.export

    def require(self, model: str, inputs: Mapping[str, torch.Tensor]) -> None:
        """Raises `SpecError` if forward would take other branches for these inputs (meta tensors) than when traced."""
        sizes = {name: tuple(x.shape[:1]) for name, x in inputs.items()}
        for condition in self.conditions:
            _require_condition(condition, inputs, model)
        if self.program is None or not self.entries:
            return
        order = [str(node.target) for node in self.program.graph.nodes if node.op == "placeholder"]
        values = Shapes(self.program, may_overwrite=True).run(*[inputs.get(name) for name in order])
        for decision, value in zip(self.entries, values, strict=True):
            if decision.evaluate(value) != decision.result:
                raise SpecError(
                    f"forward of {model} was traced with an example for which {decision.name!r} in "
                    f"{decision.where or 'its forward'!r} was {decision.result}; for inputs of {sizes} samples it is "
                    f"{decision.evaluate(value)}, and forward may take other branches. Give batches like the example, "
                    "or move what depends on the batch into a module of its own."
                )


def decisions_of(root: torch.nn.Module, graph: fx.Graph, decided_nodes: list[tuple[fx.Node, Decision]]) -> Decisions:
    """Returns the decisions with the part of the graph that computes them."""
    if not decided_nodes:
        return Decisions()
    needed, pending = set(), [node for node, _ in decided_nodes]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node in needed or node.op == "placeholder":
            copies[node] = part.node_copy(node, lambda n: copies[n])
    part.output(tuple(copies[node] for node, _ in decided_nodes))
    return Decisions(fx.GraphModule(root, part), [decision for _, decision in decided_nodes])


def _require_condition(condition: Condition, inputs: Mapping[str, torch.Tensor], model: str) -> None:
    """Raises unless a guard of torch.export and its implicit conditions hold."""
    guard, symbols = condition
    values: dict[Expression, int] = {}
    for name, symbol in symbols.items():
        size = inputs[name].shape[0]
        if size < 2 or values.setdefault(symbol, size) != size:  # torch.export specializes on sizes 0 and 1
            guard = False
    if not bool(guard if isinstance(guard, bool) else guard.xreplace(values)):
        sizes = {name: inputs[name].shape[0] for name in symbols}
        raise SpecError(
            f"forward of {model} was traced by torch.export, and may take other branches for inputs of {sizes} samples "
            f"({guard}). Give batches like the example, or move what depends on the batch into a module of its "
            "own."
        )
