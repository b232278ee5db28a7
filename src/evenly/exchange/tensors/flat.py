"""Many tensors as one vector, without moving them: parts are packed into a buffer and unpacked in place."""

from collections.abc import Iterator, Sequence

import torch

TYPES = (torch.float32, torch.float64)


class Flat:
    """The elements of `tensors`, in order, as one vector of `dtype`; the tensors keep storage, strides and type."""

    def __init__(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        self.tensors = [real(tensor) for tensor in tensors]
        self.dtype = dtype
        self.total = sum(tensor.numel() for tensor in self.tensors)

    def scratch(self) -> torch.Tensor:
        """Returns an uninitialised vector that holds all elements."""
        return torch.empty(self.total, dtype=self.dtype, device=self.tensors[0].device)

    def pack(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Copies the elements [start, stop) into `out`."""
        pieces = [tensor.reshape(-1)[low:high].to(self.dtype) for tensor, low, high in self._overlaps(start, stop)]
        if pieces:
            torch.cat(pieces, out=out)

    def unpack(self, source: torch.Tensor) -> None:
        """Copies the whole vector `source` into the tensors, in place."""
        offset = 0
        for tensor in self.tensors:
            tensor.copy_(source[offset : offset + tensor.numel()].view(tensor.shape))
            offset += tensor.numel()

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[torch.Tensor, int, int]]:
        begin = 0
        for tensor in self.tensors:
            low, high = max(start - begin, 0), min(stop - begin, tensor.numel())
            if low < high:
                yield tensor, low, high
            begin += tensor.numel()


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor as it is sent: complex numbers as pairs."""
    detached = tensor.detach()
    return torch.view_as_real(detached) if detached.is_complex() else detached


def travelling_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Returns the dtype in which a tensor is sent: float64 as it is, all other floats as float32."""
    return torch.float64 if tensor.dtype in (torch.float64, torch.complex128) else torch.float32
