"""Many tensors as one vector, without moving them: parts are packed into a buffer and unpacked in place."""

from collections.abc import Iterator, Sequence

import torch

TYPES = (torch.float32, torch.float64)
CHUNK = 2**22  # elements that are copied between devices at once


class Flat:
    """The elements of `tensors`, in order, as one vector of `dtype`; the tensors keep storage, strides and type.

    Vectors are on the device of the tensors, or in host memory if `is_on_host`.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype, *, is_on_host: bool = False) -> None:
        self.tensors = [real(tensor) for tensor in tensors]
        self.dtype = dtype
        self._is_moved = is_on_host and self.tensors[0].is_cuda
        self.total = sum(tensor.numel() for tensor in self.tensors)

    def scratch(self) -> torch.Tensor:
        """Returns an uninitialised vector that holds all elements."""
        if self._is_moved:
            return torch.empty(self.total, dtype=self.dtype, pin_memory=True)
        return torch.empty(self.total, dtype=self.dtype, device=self.tensors[0].device)

    def pack(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Copies the elements [start, stop) into `out`; to host memory, without waiting for the copy."""
        if self._is_moved:
            offset = 0
            for tensor, low, high in self._overlaps(start, stop):
                _copy_in_chunks(out[offset : offset + high - low], tensor.reshape(-1)[low:high])
                offset += high - low
            return
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


def _copy_in_chunks(out: torch.Tensor, vector: torch.Tensor) -> None:
    """Copies a vector to another device; if its dtype changes, the device needs memory for one chunk only."""
    for target, chunk in zip(out.split(CHUNK), vector.split(CHUNK), strict=True):
        target.copy_(chunk, non_blocking=True)


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor as it is sent: complex numbers as pairs."""
    detached = tensor.detach()
    return torch.view_as_real(detached) if detached.is_complex() else detached


def travelling_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Returns the dtype in which a tensor is sent: float64 as it is, all other floats as float32."""
    return torch.float64 if tensor.dtype in (torch.float64, torch.complex128) else torch.float32
