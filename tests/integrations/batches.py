"""A network and unequal batches of three ranks on two nodes for the tools that train, and what one process computes."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from tests.reference import Batch, Reference

NODES = [[0, 1], [2]]
SIZES = (4, 3, 6)  # samples of a batch, by rank


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def batch(rank: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(SIZES[rank % len(SIZES)], 5, generator=generator, dtype=torch.float64)
    return x, torch.stack([x.sum(1), x.prod(1)], dim=1)


def batches_of(rank: int, steps: int) -> list[Batch]:
    return [batch(rank, step) for step in range(steps)]


def values(model: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().double().reshape(-1) for parameter in model.parameters()]).tolist()


def put(numbers: Sequence[float], model: nn.Module) -> None:
    nn.utils.vector_to_parameters(torch.tensor(numbers, dtype=torch.float64), model.parameters())


def gan_networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    return maker, nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def judge_loss(judge: nn.Module, maker: nn.Module, noise: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    verdict = judge(torch.cat([real, maker(noise).detach()]))
    return nn.functional.binary_cross_entropy_with_logits(verdict, torch.ones_like(verdict).cumsum(0) % 2)


def maker_loss(judge: nn.Module, maker: nn.Module, noise: torch.Tensor) -> torch.Tensor:
    verdict = judge(maker(noise))
    return nn.functional.binary_cross_entropy_with_logits(verdict, torch.ones_like(verdict))


def reference(model: nn.Module | None = None) -> Reference:
    return Reference(model or network(), lambda copied: torch.optim.AdamW(copied.parameters(), lr=0.01), NODES)


def close(found: Sequence[float], expected: Sequence[float]) -> None:
    pair = (torch.tensor(numbers, dtype=torch.float64) for numbers in (found, expected))
    torch.testing.assert_close(*pair, rtol=0, atol=1e-9)


def average_of(rows: Sequence[Sequence[float]]) -> list[float]:
    """Returns the average of the nodes, whose ranks have used batches of `SIZES` equally often since an exchange."""
    first, second = (torch.tensor(rows[rank], dtype=torch.float64) for rank in (0, 2))
    assert not torch.equal(first, second)
    mean: list[float] = (((SIZES[0] + SIZES[1]) * first + SIZES[2] * second) / sum(SIZES)).tolist()
    return mean


def reference_steps(every: int, steps: int) -> Iterator[list[list[float]]]:
    """Yields the parameters of each rank after each step, with a rate that falls every third step."""
    yield from _steps([[batch(rank, step) for rank in range(3)] for step in range(steps)], every)


def accumulated_steps(every: int, steps: int, *, clip: float) -> Iterator[list[list[float]]]:
    """Yields the same for steps of two batches each, with clipped gradients."""
    pairs = [[(batch(rank, 2 * step), batch(rank, 2 * step + 1)) for rank in range(3)] for step in range(steps)]
    joined = [[_joined(pair) for pair in row] for row in pairs]
    yield from _steps(joined, every, clip=clip)


def _joined(pair: tuple[Batch, Batch]) -> Batch:
    (x, y), (more_x, more_y) = pair
    return torch.cat([x, more_x]), torch.cat([y, more_y])


def _steps(rows: Sequence[Sequence[Batch]], every: int, *, clip: float | None = None) -> Iterator[list[list[float]]]:
    expected = reference()
    expected.clip = clip
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9) for optimizer in expected.optimizers]
    for step, row in enumerate(rows, start=1):
        expected.step(row, nn.functional.mse_loss)
        if step % every == 0:
            expected.exchange()
        for schedule in schedules:
            schedule.step()
        yield [values(model) for model in expected.replicas]


def gan_steps(every: int, steps: int) -> Iterator[list[list[float]]]:
    """Yields the parameters of both networks of each rank after each step of both."""
    maker, judge = (reference(part) for part in gan_networks())
    for step in range(steps):
        batches = [batch(rank, step) for rank in range(3)]
        _apply(judge, [judge_loss(judge.replicas[r], maker.replicas[r], x, y) for r, (x, y) in enumerate(batches)])
        if (step + 1) % every == 0:
            judge.exchange()
        _apply(maker, [maker_loss(judge.replicas[r], maker.replicas[r], x) for r, (x, _) in enumerate(batches)])
        if (step + 1) % every == 0:
            maker.exchange()
        yield [values(maker.replicas[rank]) + values(judge.replicas[rank]) for rank in range(3)]


def _apply(expected: Reference, losses: Sequence[torch.Tensor]) -> None:
    for replica, loss in zip(expected.replicas, losses, strict=True):
        gradients = torch.autograd.grad(loss, list(replica.parameters()))
        for parameter, gradient in zip(replica.parameters(), gradients, strict=True):
            parameter.grad = gradient
    for members in expected.nodes:
        expected.average_gradients(members, [SIZES[rank] for rank in members])
    for rank, optimizer in enumerate(expected.optimizers):
        optimizer.step()
        expected.samples[rank] += SIZES[rank]


def fed_steps() -> Iterator[list[float]]:
    """Yields the parameters of one device, which trains with the samples of all ranks: 13, 13 and 2."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, y = (torch.cat(parts) for parts in zip(*batches_of(0, 7), strict=True))
    for own_x, own_y in zip(x.split(sum(SIZES)), y.split(sum(SIZES)), strict=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(own_x), own_y).backward()
        optimizer.step()
        yield values(model)
