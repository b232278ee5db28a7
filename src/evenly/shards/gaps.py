"""How far tensors of a cut network are from those of the uncut one, the worst of all ranks."""

import torch

from evenly.comm import Wire

NOISE = 100  # roundings of the largest number of a kind that count as none


class Gaps:
    """Differences of tensors of one kind, by name; all ranks add the same names in the same order.

    A difference is the largest of a tensor, divided by the tensor's largest number. What is small beside the largest
    number of all tensors is divided by a share of that instead: a gradient that is 0 but for rounding is no difference.
    """

    def __init__(self, rtol: float, eps: float) -> None:
        self._floor = min(1.0, NOISE * eps / rtol) if rtol else 1.0
        self._names: list[str] = []
        self._gaps: list[torch.Tensor] = []  # scalars
        self._peaks: list[torch.Tensor] = []  # scalars; NaN for whole numbers, which must be the same

    def add(self, name: str, mine: torch.Tensor, truth: torch.Tensor) -> None:
        """Compares one tensor with the true one."""
        self._names.append(name)
        a, b = mine.detach().to(truth.device), truth.detach()
        if a.shape != b.shape:
            self._gaps.append(torch.tensor(torch.inf, dtype=torch.float64))
            self._peaks.append(torch.tensor(torch.nan, dtype=torch.float64))
            return
        is_float = b.is_floating_point() or b.is_complex()
        same = (a == b) | (a.isnan() & b.isnan())  # also of infinite numbers
        a, b = (x if x.is_complex() else x.double() for x in (a, b))
        gap = torch.where(same, 0.0, (a - b).abs()).nan_to_num(torch.inf, torch.inf)
        peak = torch.where(b.isfinite(), b.abs(), 0.0)
        self._gaps.append(_largest(gap))
        self._peaks.append(_largest(peak) if is_float else torch.tensor(torch.nan, dtype=torch.float64))

    def settle(self, wire: Wire, device: torch.device) -> dict[str, float]:
        """Returns the differences by name, each the largest of all ranks."""
        if not self._names:
            return {}
        gaps = torch.stack([gap.cpu() for gap in self._gaps])
        peaks = torch.stack([peak.cpu() for peak in self._peaks])
        sizes = torch.maximum(peaks.nan_to_num(0.0), self._floor * peaks.nan_to_num(0.0).max())
        ratios = torch.where(peaks.isnan(), 1.0, gaps / sizes)
        ratios = torch.where(gaps == 0, 0.0, torch.where(gaps.isinf(), torch.inf, ratios))
        worst = wire.sum(ratios.to(device), name="verify", largest=True).wait().tolist()
        return dict(zip(self._names, worst, strict=True))


def noise_of(tensors: list[torch.Tensor], eps: float) -> float:
    """Returns the size up to which numbers are rounding noise beside the largest of these tensors."""
    return NOISE * eps * max((_largest(tensor.detach().abs()).item() for tensor in tensors), default=0.0)


def _largest(x: torch.Tensor) -> torch.Tensor:
    return x.max().double() if x.numel() else torch.zeros((), dtype=torch.float64)
