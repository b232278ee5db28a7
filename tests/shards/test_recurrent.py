"""LSTM, GRU and RNN cut by units: exact, with the messages that were predicted, chosen where they are faster."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.shards.compare import compare

BY_UNITS = {"recurrent": ["units"]}
SEQUENCES = torch.randn(3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()


class Outputs(nn.Module):
    """A recurrent module between linear layers; all of its outputs are used."""

    def __init__(self, kind: Callable[..., nn.RNNBase], *, given: bool = False, units: int = 7, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(6, units, batch_first=options.pop("batch_first", True), **options)
        rows = self.rnn.num_layers * (2 if self.rnn.bidirectional else 1)
        self.first, self.start = nn.Linear(6, 6), nn.Parameter(torch.randn(2, rows, 1, units) / 2) if given else None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        is_lstm = self.rnn.mode == "LSTM"
        if self.start is None:
            y, last = self.rnn(self.first(x))
        else:
            samples = x.shape[0 if self.rnn.batch_first else 1]
            hidden, cells = self.start[0].expand(-1, samples, -1), self.start[1].expand(-1, samples, -1)
            y, last = self.rnn(self.first(x), (hidden, cells) if is_lstm else hidden)
        return (y, *last) if is_lstm else (y, last)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": partial(Outputs, nn.LSTM),
    "LSTM of 2 layers, steps first": partial(Outputs, nn.LSTM, num_layers=2, batch_first=False),
    "LSTM of both directions, given states": partial(Outputs, nn.LSTM, num_layers=2, bidirectional=True, given=True),
    "GRU of both directions": partial(Outputs, nn.GRU, num_layers=2, bidirectional=True, bias=False),
    "GRU, given states": partial(Outputs, nn.GRU, given=True),
    "RNN": partial(Outputs, nn.RNN, num_layers=2),
    "RNN with relu": partial(Outputs, nn.RNN, nonlinearity="relu", given=True),
}


@pytest.mark.parametrize("name", KINDS)
def test_units_are_computed_by_the_rank_that_holds_them(name: str) -> None:
    layout = compare(lambda: KINDS[name]().double(), SEQUENCES, [5, 3, 1], modes=BY_UNITS)
    (choice,) = [choice for choice in layout.choices if choice.op == "recurrent"]
    assert choice.mode == "units"
    assert " 4 / 2 / 1 of 7 units" in layout.explain() or " 8 / 4 / 2 of 14 units" in layout.explain()
