"""Finds tensors that share memory; only the largest of them is exchanged, so that nothing is changed twice."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from evenly.errors import SpecError


class _Span(NamedTuple):
    """The bytes from the first to the last element of a tensor; `fixed` ones were chosen before."""

    device: int
    start: int
    stop: int
    order: int
    fixed: bool
    name: str
    tensor: torch.Tensor

    def view_in(self, marks: torch.Tensor, base: int) -> torch.Tensor:
        """Returns the view of `marks` (one per byte from `base` on) for this tensor's bytes."""
        size = self.tensor.element_size()
        strides = self.tensor.stride()
        shape = [1 if stride == 0 else length for length, stride in zip(self.tensor.shape, strides, strict=True)]
        return marks.as_strided((*shape, size), (*(stride * size for stride in strides), 1), self.start - base)


def distinct(
    named: Iterable[tuple[str, torch.Tensor]], *, fixed: Iterable[tuple[str, torch.Tensor]] = ()
) -> dict[str, torch.Tensor]:
    """Returns the tensors that lie inside no other one, nor inside one of `fixed`, in their order.

    Of equal ones it returns the first. Raises `SpecError` for two that share only a part of their memory.
    """
    tensors = dict(named)
    spans = sorted([*_spans(tensors.items(), fixed=False), *_spans(fixed, fixed=True)])
    inside = {name for cluster in _clusters(spans) for name in _lying_inside(cluster)}
    return {name: tensor for name, tensor in tensors.items() if name not in inside} if inside else tensors


class DistinctTensors:
    """`distinct` with a cache: it compares memory again only when the address of a tensor changed."""

    def __init__(self) -> None:
        self._addresses: list[tuple[str, int]] = []
        self._inside: set[str] = set()

    def __call__(
        self, named: Iterable[tuple[str, torch.Tensor]], *, fixed: Iterable[tuple[str, torch.Tensor]] = ()
    ) -> dict[str, torch.Tensor]:
        """Returns the tensors that lie inside no other one, in their order."""
        tensors = dict(named)
        addresses = [(name, _address(tensor)) for name, tensor in tensors.items()]
        if addresses != self._addresses:
            self._inside = tensors.keys() - distinct(tensors.items(), fixed=fixed).keys()
            self._addresses = addresses
        return {name: t for name, t in tensors.items() if name not in self._inside} if self._inside else tensors


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() if tensor.layout == torch.strided else 0


def _spans(named: Iterable[tuple[str, torch.Tensor]], *, fixed: bool) -> Iterator[_Span]:
    """Yields the memory of tensors; those without memory, such as empty ones, are left out."""
    for order, (name, tensor) in enumerate(named, start=0 if fixed else 1 << 32):  # no two have the same order
        start = _address(tensor)
        if start:
            size = tensor.nbytes if tensor.is_contiguous() else _extent(tensor)
            yield _Span(tensor.get_device(), start, start + size, order, fixed, name, tensor)


def _extent(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _clusters(spans: list[_Span]) -> Iterator[list[_Span]]:
    """Yields spans, sorted by their start, that overlap with others."""
    first, stop = 0, 0
    for index, span in enumerate(spans):
        if span.start >= stop or span.device != spans[first].device:
            if index - first > 1:
                yield spans[first:index]
            first, stop = index, 0
        stop = max(stop, span.stop)
    if len(spans) - first > 1:
        yield spans[first:]


def _lying_inside(cluster: list[_Span]) -> Iterator[str]:
    """Yields the names of tensors whose bytes all belong to others."""
    base = cluster[0].start
    marks = torch.zeros(max(span.stop for span in cluster) - base, dtype=torch.bool)
    for span in sorted(cluster, key=lambda span: (not span.fixed, -span.tensor.nbytes, span.order)):
        view = span.view_in(marks, base)
        if not span.fixed and span.tensor.numel() and bool(view.all()):
            yield span.name
            continue
        if not span.fixed and bool(view.any()):
            others = [s.name for s in cluster if s is not span and s.start < span.stop and span.start < s.stop]
            raise SpecError(
                f"{span.name!r} shares a part of its memory with {', '.join(map(repr, others))}, so that what is "
                "averaged for one would change the other. Let one of them lie in the other, or give each its own."
            )
        view.fill_(True)
