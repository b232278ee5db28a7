"""Recurrent layers of which every rank computes some units: hidden states are gathered over the ranks at every step.

A rank holds all gates of its units: the rows of both weights and biases. The product with the inputs is one product for
all steps. At every step, forward gathers the hidden state, and backward sums and scatters its gradient; cells stay
where they are.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional as F  # noqa: N812

from evenly.comm import Redistribute, put, take
from evenly.errors import SpecError
from evenly.shards.run.ops import AutogradContext


class RecurrentOptions(NamedTuple):
    """What `graph.rewrites.recurrent` takes after the weights, in its order."""

    mode: str  # LSTM, GRU, RNN_TANH or RNN_RELU
    num_layers: int
    has_biases: bool  # whether biases are among the weights
    training: bool  # dropout between layers is an operation of its own, so nothing depends on it
    bidirectional: bool  # whether each layer also runs backwards
    batch_first: bool  # whether the batch is dim 0 of the inputs


def recurrent_by_units(
    x: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    gather: Redistribute,
    options: RecurrentOptions,
) -> tuple[torch.Tensor, ...]:
    """Returns this rank's units of the outputs, of the last hidden states, and of an LSTM of the last cells.

    Args:
        x: the full inputs, [batch, steps, features] or, without `batch_first`, [steps, batch, features].
        states: the full first hidden states [layers * directions, batch, units], of an LSTM also this rank's units of
            the first cells; none of them for zeros.
        weights: this rank's rows of the weights of all layers and directions, in torch's order.
        gather: of hidden states [directions, batch, units] along their units.
        options: the kind of layers and how they run.
    """
    mode, num_layers, has_biases, _, bidirectional, batch_first = options
    if not x.shape[1 if batch_first else 0]:
        raise SpecError(
            f"a recurrent layer was given {tuple(x.shape)}: a sequence without steps. Give one step or more."
        )
    directions = 2 if bidirectional else 1
    count = len(weights) // (num_layers * directions)
    x = x.transpose(0, 1) if batch_first else x  # [steps, batch, features]
    last_states: list[list[torch.Tensor]] = []
    for layer in range(num_layers):
        rows = slice(layer * directions, (layer + 1) * directions)
        weights_of_layer = [weights[row * count : (row + 1) * count] for row in range(rows.start, rows.stop)]
        gates = torch.stack([_input_product(x, weights_of_layer, row, has_biases) for row in range(directions)], 1)
        recurrence = torch.stack([row[1] for row in weights_of_layer]).to(gates.dtype)  # [directions, gates, units]
        bias = torch.stack([row[3] for row in weights_of_layer]).unsqueeze(1).to(gates.dtype) if has_biases else None
        first = [state[rows].to(gates.dtype) for state in states]
        hidden = first[0] if first else gates.new_zeros(directions, x.shape[1], recurrence.shape[2])
        cells = None
        if mode == "LSTM":
            local_units = recurrence.shape[1] // 4
            cells = first[1] if first else gates.new_zeros(directions, x.shape[1], local_units)
        is_last = layer == num_layers - 1
        outputs, gathered, cells = _Recurrence.apply(mode, gather, is_last, gates, recurrence, bias, hidden, cells)  # type: ignore[no-untyped-call]  # torch has no annotation here
        last_states.append([outputs[-1], *([] if cells is None else [cells])])
        x = _joined(outputs if is_last else gathered)
    return x.transpose(0, 1) if batch_first else x, *map(torch.cat, zip(*last_states, strict=True))


def _input_product(
    x: torch.Tensor, weights_of_layer: Sequence[Sequence[torch.Tensor]], row: int, has_biases: bool
) -> torch.Tensor:
    """Returns the gates' part that depends on the inputs, [steps, batch, gates]; the second direction begins last."""
    weights = weights_of_layer[row]
    product = F.linear(x, weights[0], weights[2] if has_biases else None)
    return product.flip(0) if row else product


def _joined(y: torch.Tensor) -> torch.Tensor:
    """Returns the outputs of all directions, [steps, directions, batch, units], side by side in the order of steps."""
    return torch.cat([y[:, 0], y[:, 1].flip(0)], -1) if y.shape[1] == 2 else y[:, 0]


class _Steps(NamedTuple):
    """What all steps of one layer gave, in order."""

    hidden: list[torch.Tensor]  # of this rank, [directions, batch, own units]
    gathered: list[torch.Tensor]  # [directions, batch, units]
    cells: list[torch.Tensor | None]
    products: list[torch.Tensor]  # of the hidden states before with the weights, [directions, batch, own gates]


def _run_steps(
    mode: str,
    gather: Redistribute,
    is_last: bool,
    gates: torch.Tensor,
    recurrence: torch.Tensor,
    bias: torch.Tensor | None,
    first_hidden: torch.Tensor,
    first_cells: torch.Tensor | None,
) -> _Steps:
    """Runs all steps of one layer; differentiable as often as needed. Of the last layer, the last state stays local."""
    steps = _Steps([], [], [], [])
    weight = recurrence.mT
    full, cells = first_hidden, first_cells
    hidden = take(full, 2, gather.segments[gather.shard_group.rank])
    for step, inputs in enumerate(gates):
        product = full @ weight if bias is None else torch.baddbmm(bias, full, weight)
        hidden, cells = _next_states(mode, inputs, product, hidden, cells)
        steps.products.append(product)
        steps.hidden.append(hidden)
        steps.cells.append(cells)
        if step < len(gates) - 1 or not is_last:
            full = gather(hidden)
            steps.gathered.append(full)
    return steps


def _next_states(
    mode: str, inputs: torch.Tensor, product: torch.Tensor, hidden: torch.Tensor, cells: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the hidden state and cells after one step, from the gates' parts of inputs and of hidden states."""
    if cells is not None:
        enter, keep, value, leave = (inputs + product).chunk(4, -1)
        cells = keep.sigmoid() * cells + enter.sigmoid() * value.tanh()
        return leave.sigmoid() * cells.tanh(), cells
    if mode == "GRU":
        (reset, keep, value), (reset_product, keep_product, value_product) = inputs.chunk(3, -1), product.chunk(3, -1)
        new = (value + (reset + reset_product).sigmoid() * value_product).tanh()
        return new + (keep + keep_product).sigmoid() * (hidden - new), None
    return (inputs + product).relu() if mode == "RNN_RELU" else (inputs + product).tanh(), None


class _RecurrenceContext(AutogradContext, Protocol):
    mode: str
    gather: Redistribute
    is_last: bool


Gradients = tuple[torch.Tensor | None, ...]


class _Recurrence(torch.autograd.Function):
    """All steps of one layer: this rank's hidden states, the gathered ones for the next layer, and the last cells.

    Autograd through the steps would add up one gradient of the weights for each step; here it is one product.
    """

    @staticmethod
    def forward(
        ctx: _RecurrenceContext,
        mode: str,
        gather: Redistribute,
        is_last: bool,
        gates: torch.Tensor,
        recurrence: torch.Tensor,
        bias: torch.Tensor | None,
        first_hidden: torch.Tensor,
        first_cells: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        steps = _run_steps(mode, gather, is_last, gates, recurrence, bias, first_hidden, first_cells)
        ctx.mode = mode
        ctx.gather = gather
        ctx.is_last = is_last
        ctx.set_materialize_grads(False)
        before = [first_hidden, *steps.gathered[: len(gates) - 1]]
        cells_before = [cells for cells in [first_cells, *steps.cells[:-1]] if cells is not None]
        products = torch.stack(steps.products)
        optional = [bias, first_cells, torch.stack(cells_before) if cells_before else None]
        ctx.save_for_backward(gates, recurrence, first_hidden, torch.stack(before), products, *optional)  # type: ignore[arg-type]  # None is allowed
        last_cells = None if steps.cells[-1] is None else steps.cells[-1].clone()
        return torch.stack(steps.hidden), None if is_last else torch.stack(steps.gathered), last_cells

    @staticmethod
    def backward(
        ctx: _RecurrenceContext,
        hidden_gradients: torch.Tensor | None,
        gathered_gradients: torch.Tensor | None,
        cells_gradient: torch.Tensor | None,
    ) -> Gradients:
        gradients = (hidden_gradients, gathered_gradients, cells_gradient)
        with ctx.gather.shard_group.reporting():
            if torch.is_grad_enabled():  # create_graph=True
                return None, None, None, *_differentiable_gradients(ctx, gradients)
            return None, None, None, *_gradients(ctx, gradients)


def _differentiable_gradients(ctx: _RecurrenceContext, gradients: Gradients) -> Gradients:
    """Returns the gradients of all inputs as part of autograd's graph: the steps run again, under autograd."""
    gates, recurrence, first_hidden, _, _, bias, first_cells, _ = ctx.saved_tensors
    inputs = (gates, recurrence, bias, first_hidden, first_cells)
    steps = _run_steps(ctx.mode, ctx.gather, ctx.is_last, *inputs)
    results = (torch.stack(steps.hidden), None if ctx.is_last else torch.stack(steps.gathered), steps.cells[-1])
    pairs = [(y, gradient) for y, gradient in zip(results, gradients, strict=True) if y is not None]
    used = [(y, gradient) for y, gradient in pairs if gradient is not None]
    outputs, output_gradients = [y for y, _ in used], [gradient for _, gradient in used]
    needed = [x for x, needs in zip(inputs, ctx.needs_input_grad[3:], strict=True) if needs]
    found = iter(torch.autograd.grad(outputs, needed, output_gradients, create_graph=True, allow_unused=True))
    return tuple(next(found) if needs else None for needs in ctx.needs_input_grad[3:])


def _gradients(ctx: _RecurrenceContext, gradients: Gradients) -> Gradients:
    """Returns the gradients of all inputs, from the last step to the first; that of the weights is one product."""
    gates, recurrence, first_hidden, before, products, bias, first_cells, cells_before = ctx.saved_tensors
    hidden_gradients, gathered_gradients, cells_gradient = gradients
    own_segments = ctx.gather.segments[ctx.gather.shard_group.rank]
    hidden_before = take(before, 3, own_segments)
    gate_gradients, product_gradients = torch.empty_like(gates), torch.empty_like(products)
    hidden_gradient = torch.zeros_like(hidden_before[0])
    full_gradient = torch.zeros_like(first_hidden)  # this rank's summand
    for step in reversed(range(len(gates))):
        if hidden_gradients is not None:
            hidden_gradient = hidden_gradient + hidden_gradients[step]
        if step < len(gates) - 1 or not ctx.is_last:
            if gathered_gradients is not None:
                full_gradient = full_gradient + gathered_gradients[step]
            hidden_gradient = hidden_gradient + ctx.gather.backward(full_gradient).wait()
        cells = None if first_cells is None else cells_before[step]
        gate_gradients[step], product_gradients[step], hidden_gradient, cells_gradient = _step_gradients(
            ctx.mode, (gates[step], products[step], hidden_before[step], cells), hidden_gradient, cells_gradient
        )
        full_gradient = product_gradients[step] @ recurrence
    put(own_part := torch.zeros_like(first_hidden), hidden_gradient, 2, own_segments)
    flat_before = before.transpose(0, 1).flatten(1, 2)  # [directions, steps * batch, units]
    recurrence_gradient = product_gradients.transpose(0, 1).flatten(1, 2).mT @ flat_before
    bias_gradient = None if bias is None else product_gradients.sum((0, 2)).unsqueeze(1)
    return gate_gradients, recurrence_gradient, bias_gradient, full_gradient + own_part, cells_gradient


def _step_gradients(
    mode: str,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    hidden_gradient: torch.Tensor,
    cells_gradient: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns the gradients of the inputs of `_next_states`."""
    with torch.enable_grad():
        gates, product, hidden_before = (x.detach().requires_grad_() for x in inputs[:3])
        cells_before = None if inputs[3] is None else inputs[3].detach().requires_grad_()
        hidden, cells = _next_states(mode, gates, product, hidden_before, cells_before)
    outputs, output_gradients = [hidden], [hidden_gradient]
    if cells is not None:
        outputs.append(cells)
        output_gradients.append(torch.zeros_like(cells) if cells_gradient is None else cells_gradient)
    needed = [gates, product, hidden_before] + ([] if cells_before is None else [cells_before])
    found = torch.autograd.grad(outputs, needed, output_gradients, allow_unused=True)
    zeros = torch.zeros_like(hidden)
    gate_gradient, product_gradient, before_gradient = (zeros if x is None else x for x in found[:3])
    return gate_gradient, product_gradient, before_gradient, found[3] if cells is not None else None
