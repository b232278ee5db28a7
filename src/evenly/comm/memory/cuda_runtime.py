"""Calls of the CUDA runtime that torch does not offer: device memory that other processes map, host memory it copies.

The library is the one that torch has loaded: the current device is then the same for both.
"""

import ctypes
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_PORTABLE = 1  # cudaHostRegisterPortable
_HANDLE_BYTES = 64


class _Handle(ctypes.Structure):
    """A cudaIpcMemHandle_t."""

    _fields_ = [("content", ctypes.c_ubyte * _HANDLE_BYTES)]  # the form of ctypes


class _RuntimeCalls:
    """The functions of the runtime."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        pointer = ctypes.POINTER(ctypes.c_void_p)
        self.allocate = library.cudaMalloc
        self.allocate.argtypes = [pointer, ctypes.c_size_t]
        self.free = library.cudaFree
        self.free.argtypes = [ctypes.c_void_p]
        self.export = library.cudaIpcGetMemHandle
        self.export.argtypes = [ctypes.POINTER(_Handle), ctypes.c_void_p]
        self.open = library.cudaIpcOpenMemHandle
        self.open.argtypes = [pointer, _Handle, ctypes.c_uint]
        self.close = library.cudaIpcCloseMemHandle
        self.close.argtypes = [ctypes.c_void_p]
        self.register = library.cudaHostRegister
        self.register.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        self.unregister = library.cudaHostUnregister
        self.unregister.argtypes = [ctypes.c_void_p]
        self.last_error = library.cudaGetLastError
        self.name = library.cudaGetErrorName
        self.name.restype = ctypes.c_char_p


@cache
def _calls() -> _RuntimeCalls:
    """Returns the functions; `OSError` if torch has loaded no runtime as a library."""
    torch.cuda.init()
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = sorted({line.split(maxsplit=5)[-1] for line in lines if "libcudart" in line})
    if not paths:
        raise OSError("torch has loaded no library of the CUDA runtime")
    try:
        return _RuntimeCalls(paths[0])
    except AttributeError as error:
        raise OSError(f"{paths[0]}: {error}") from None


def _require(code: int, what: str) -> None:
    if code:
        name = _calls().name(code).decode()
        _calls().last_error()  # torch would find the error at its next call
        raise OSError(f"{what} failed: {name}")


class DeviceMemory:
    """Memory of a CUDA device: made here, or by another process; `bytes` is a tensor over all of it."""

    def __init__(self, address: int, size_bytes: int, device: torch.device, *, is_own: bool) -> None:
        self._address = address
        self._is_own = is_own
        self._device = device
        self.bytes = torch.as_tensor(_Array(address, size_bytes), device=device)

    @classmethod
    def allocate(cls, size_bytes: int, device: torch.device) -> "DeviceMemory":
        """Returns new memory; `OSError` if there is none."""
        address = ctypes.c_void_p()
        with torch.cuda.device(device):
            _require(_calls().allocate(ctypes.byref(address), size_bytes), f"taking {size_bytes >> 20} MiB of {device}")
        return cls(int(address.value or 0), size_bytes, device, is_own=True)

    @classmethod
    def open(cls, handle: bytes, size_bytes: int, device: torch.device) -> "DeviceMemory":
        """Returns memory that another process has allocated; `OSError` if this one cannot map it."""
        address, content = ctypes.c_void_p(), _Handle((ctypes.c_ubyte * _HANDLE_BYTES)(*handle))
        with torch.cuda.device(device):
            code = _calls().open(ctypes.byref(address), content, _PEER_ACCESS)
            _require(code, "mapping the device memory of another process")
        return cls(int(address.value or 0), size_bytes, device, is_own=False)

    @property
    def handle(self) -> bytes:
        """By what another process opens this memory."""
        content = _Handle()
        with torch.cuda.device(self._device):
            _require(_calls().export(ctypes.byref(content), self._address), "sharing device memory")
        return bytes(content.content)

    def close(self) -> None:
        """Gives the memory back, or unmaps it; no work of the device may use it any more."""
        address, self._address = self._address, 0
        self.bytes = torch.empty(0, dtype=torch.uint8)
        if address:
            end = _calls().free if self._is_own else _calls().close
            with torch.cuda.device(self._device), suppress(OSError):  # the end of the process does it, too
                _require(end(address), "giving device memory back")


class _Array:
    """What `torch.as_tensor` reads the address of device memory from."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def register_host_memory(address: int, size_bytes: int, device: torch.device) -> None:
    """Makes memory of the host one that a device copies from and to by itself; `OSError` if that is refused."""
    with torch.cuda.device(device):
        _require(_calls().register(address, size_bytes, _PORTABLE), "registering host memory with the device")


def unregister_host_memory(address: int) -> None:
    """Ends what `register_host_memory` began."""
    with suppress(OSError):
        _require(_calls().unregister(address), "giving host memory back")
