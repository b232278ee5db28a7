"""Tensors that share memory: of those the largest speaks for all, so that nothing is changed twice."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from evenly._errors import SpecError


@dataclass(frozen=True)
class _Span:
    """The bytes from the first to the last element of a tensor; `fixed` ones have been chosen before."""

    device: int
    start: int
    stop: int
    fixed: bool
    name: str
    tensor: torch.Tensor

    def seen_in(self, marks: torch.Tensor, base: int) -> torch.Tensor:
        """Returns the view of `marks`, one for each byte from `base` on, in which this tensor's bytes are."""
        size = self.tensor.element_size()
        strides = self.tensor.stride()
        shape = [1 if stride == 0 else length for length, stride in zip(self.tensor.shape, strides, strict=True)]
        return marks.as_strided((*shape, size), (*(stride * size for stride in strides), 1), self.start - base)


def distinct(
    named: Iterable[tuple[str, torch.Tensor]], *, fixed: Iterable[tuple[str, torch.Tensor]] = ()
) -> dict[str, torch.Tensor]:
    """Returns those of the tensors that lie in no other one, also not in one of `fixed`, in their order.

    Of equal ones it is the first. Raises `SpecError` for two that share only a part of their memory.
    """
    tensors = dict(named)
    spans = [_span(name, tensor, fixed=False) for name, tensor in tensors.items()]
    spans += [_span(name, tensor, fixed=True) for name, tensor in fixed]
    found = sorted((span for span in spans if span is not None), key=lambda span: (span.device, span.start))
    inside = {name for cluster in _clusters(found) if len(cluster) > 1 for name in _lying_inside(cluster)}
    return {name: tensor for name, tensor in tensors.items() if name not in inside}


def _span(name: str, tensor: torch.Tensor, *, fixed: bool) -> _Span | None:
    place = tensor.data_ptr() if tensor.layout == torch.strided and tensor.numel() else 0
    if not place:
        return None
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _Span(tensor.get_device(), place, place + (last + 1) * tensor.element_size(), fixed, name, tensor)


def _clusters(spans: list[_Span]) -> Iterator[list[_Span]]:
    """Yields spans, sorted by their start, that overlap with each other."""
    cluster: list[_Span] = []
    for span in spans:
        if cluster and (span.device != cluster[0].device or span.start >= max(other.stop for other in cluster)):
            yield cluster
            cluster = []
        cluster.append(span)
    if cluster:
        yield cluster


def _lying_inside(cluster: list[_Span]) -> Iterator[str]:
    """Yields the names of those whose bytes are all bytes of others."""
    base = cluster[0].start
    marks = torch.zeros(max(span.stop for span in cluster) - base, dtype=torch.bool)
    for span in sorted(cluster, key=lambda span: (not span.fixed, -span.tensor.nbytes)):
        view = span.seen_in(marks, base)
        if not span.fixed and bool(view.all()):
            yield span.name
            continue
        if not span.fixed and bool(view.any()):
            others = [s.name for s in cluster if s is not span and s.start < span.stop and span.start < s.stop]
            raise SpecError(
                f"{span.name!r} shares a part of its memory with {', '.join(map(repr, others))}, so that what is "
                "averaged for one would change the other. Let one of them lie in the other, or give each its own."
            )
        view.fill_(True)
