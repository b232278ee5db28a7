"""Relative differences between tensors of a cut network and of the uncut one, the largest of all ranks."""

import torch

from evenly.comm import ShardGroup

NOISE = 100  # multiples of the rounding error of the largest number that count as 0
SLACK = 4  # multiples of the uncut network's own rounding error that count as 0


class Differences:
    """Differences of tensors of one kind, by name; all ranks add the same names in the same order.

    The difference of two tensors is the largest one of an element, divided by the tensor's largest number. Rounding is
    tolerated: the divisor is at least a fraction of the largest number of all tensors (a gradient may be 0 but for
    rounding), and at least a multiple of the uncut network's own rounding error, where float64 values are known.
    """

    def __init__(self, rtol: float, eps: float) -> None:
        self._rtol = max(rtol, 1e-300)
        self._floor = min(1.0, NOISE * eps / self._rtol)
        self._names: list[str] = []
        self._rows: list[torch.Tensor] = []  # [difference, peak, noise]; the peak of integers is NaN

    def add(self, name: str, mine: torch.Tensor, truth: torch.Tensor, exact: torch.Tensor | None = None) -> None:
        """Compares one tensor with the true one; `exact` is the true one in float64."""
        is_integer = not (truth.is_floating_point() or truth.is_complex())
        peak = _largest(torch.where(truth.isfinite(), truth, 0).abs()) if not is_integer else torch.tensor(torch.nan)
        noise = _largest_difference(truth, exact) if exact is not None else torch.tensor(0.0)
        self._names.append(name)
        self._rows.append(
            torch.stack([x.detach().cpu().double() for x in (_largest_difference(mine, truth), peak, noise)])
        )

    def reduce(self, shard_group: ShardGroup, device: torch.device) -> dict[str, float]:
        """Returns the differences by name, each the largest of all ranks."""
        if not self._names:
            return {}
        differences, peaks, noises = torch.stack(self._rows).unbind(1)
        float_peaks = peaks.nan_to_num(0.0)
        sizes = torch.maximum(torch.maximum(float_peaks, self._floor * float_peaks.max()), SLACK / self._rtol * noises)
        ratios = torch.where(peaks.isnan(), (noises == 0).double(), differences / sizes)
        ratios = torch.where(differences == 0, 0.0, torch.where(differences.isinf(), torch.inf, ratios))
        worst = shard_group.sum(ratios.to(device), name="verify", largest=True).wait().tolist()
        return dict(zip(self._names, worst, strict=True))


def noise_of(tensors: list[torch.Tensor], eps: float) -> float:
    """Returns the size up to which numbers are rounding noise, given the largest number of these tensors."""
    return NOISE * eps * max((_largest(tensor.detach().abs()).item() for tensor in tensors), default=0.0)


def _largest_difference(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns the largest difference; infinite for unequal shapes, and where only one number is NaN."""
    if one.shape != other.shape:
        return torch.tensor(torch.inf)
    a, b = one.detach().to(other.device), other.detach()
    kind = torch.complex128 if b.is_complex() else torch.float64
    a, b = a.to(kind), b.to(kind)
    same = (a == b) | (a.isnan() & b.isnan())  # also of infinite numbers
    return _largest(torch.where(same, 0.0, (a - b).abs()).nan_to_num(torch.inf, torch.inf))


def _largest(x: torch.Tensor) -> torch.Tensor:
    return x.max() if x.numel() else torch.zeros(())
