"""Other batches than the example's: what forward decided by sizes is decided again; nothing is frozen in silence."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.shards.playing import Act, play

SHARES = [3, 2]


def batch(samples: int) -> Tensor:
    return torch.randn(samples, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(samples))


class Net(nn.Module):
    def __init__(self, act: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.one, self.two, self.act = nn.Linear(6, 8), nn.Linear(8, 3), act

    def forward(self, x: Tensor) -> Any:
        return self.act(self.two(self.act(self.one(x))))


class Exported(Net):
    """Only torch.export can follow it."""

    def forward(self, x: Tensor) -> Any:
        if not isinstance(x, Tensor):
            raise TypeError
        return super().forward(x)


def halves(x: Tensor) -> Tensor:
    a, b, c = x.split(2, 0)
    return torch.cat([a, b * 2, c])


def looped(x: Tensor) -> Tensor:
    return torch.cat([part * (i + 1) for i, part in enumerate(x.split(2, 0))])


def last_part(x: Tensor) -> Tensor:
    return x + x.split(2, 0)[-1].sum()


ACTS: dict[str, Callable[[Tensor], Any]] = {
    "remainder": lambda x: x * 2 if x.shape[0] % 3 == 0 else x,
    "remainder by size()": lambda x: x * 2 if x.size(0) % 5 == 0 else x,
    "remainder as a number": lambda x: x * [1, 2, 3, 4, 5, 6, 7][int(x.shape[0] % 7 == 0)],
    "some sizes": lambda x: x * 2 if x.shape[0] in (3, 5) else x,
    "large": lambda x: x * 2 if x.shape[0] > 1000 else x,
    "between": lambda x: x * 2 if 7 < x.shape[0] < 12 else x,
    "length": lambda x: x * 2 if len(x) > 8 else x,
    "elements": lambda x: x * 2 if x.numel() % 9 == 0 else x,
    "unpacked parts": halves,
    "all parts": looped,
    "the first part": lambda x: x + x.split(2, 0)[0].sum(),
    "the second part": lambda x: x + x.split(2, 0)[1].sum(),
    "the last part": last_part,
    "chunks": lambda x: torch.cat([c * (i + 1) for i, c in enumerate(x.chunk(3, 0))]),
    "chunks in a call": lambda x: torch.cat(x.chunk(3, 0)[::-1]),
    "rows": lambda x: torch.stack([row * (i + 1) for i, row in enumerate(x)]),
    "rows in a call": lambda x: torch.stack(x.unbind(0)[::-1]),
    "a slice": lambda x: x - x[1:].sum(0) + x[:2].sum(0) + x[-1] + x[2:3].sum(),
    "half of the samples": lambda x: x + x[: x.shape[0] // 2].sum(0),
    "narrow": lambda x: x + x.narrow(0, 1, 2).sum(),
    "a view": lambda x: x.reshape(2, -1, x.shape[-1]).sum(0).repeat(2, 1)[: x.shape[0]] + x,
    "samples as columns": lambda x: x.t().softmax(-1).t() * x.shape[0],
    "mean over samples": lambda x: x - x.mean(0) * x.shape[0],
    "a number of the batch": lambda x: x * x.shape[0] ** 0.5 + x.size(0),
    "zeros like the batch": lambda x: torch.cat([x, x.new_zeros(x.shape[0], 1)], 1)[:, :-1],
}


def build(kind: type[Net], name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return kind(ACTS[name]).double()

    return make


def check(name: str, sizes: Sequence[int], *, cut_batch: bool = False) -> str:
    example = batch(6 if "part" in name or "chunk" in name or "view" in name else 4)
    return play(build(Net, name), example, SHARES, [Act(batch(n)) for n in sizes], cut_batch=cut_batch)


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("remainder", (4, 5, 6), "'eq'"),
        pytest.param("remainder as a number", (4, 5, 7), "Mod(", marks=pytest.mark.slow),
        ("length", (4, 9), "len"),
        ("the second part", (6, 9, 4, 3), ""),
        ("the last part", (6, 4), "gave 3 tensors for the example and gives 2"),
        ("a slice", (4, 5, 3), ""),
    ],
)
def test_another_batch_is_as_on_one_device_or_refused_by_name(name: str, sizes: Sequence[int], said: str) -> None:
    found = check(name, sizes)
    assert said in found
    assert bool(said) == bool(found)


@pytest.mark.slow
@pytest.mark.parametrize("cut_batch", [False, True])
@pytest.mark.parametrize("name", ACTS)
def test_other_batches_are_as_on_one_device_or_refused(name: str, cut_batch: bool) -> None:
    for sizes in ((6, 4, 3), (9, 5, 2), (10, 12, 1)):
        check(name, sizes, cut_batch=cut_batch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["remainder", "length", "some sizes", "all parts"])
def test_other_batches_of_an_exported_network(name: str) -> None:
    for samples in (6, 5):
        said = play(build(Exported, name), batch(4), SHARES, [Act(batch(4)), Act(batch(samples))])
        assert said == "" or said.startswith("SpecError"), said
