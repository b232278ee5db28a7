"""Codecs for values sent between nodes: a pair of functions, floats to bytes and back.

Nodes encode differences to the anchor and add the encoding error to the next difference.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from evenly.comm import first_line
from evenly.errors import SpecError

logger = logging.getLogger(__name__)

TEST_SIZES = (1, 7, 300)  # vector lengths used to test a new codec

Encode = Callable[[torch.Tensor], torch.Tensor]
Decode = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class Codec:
    """How a flat vector of floats becomes bytes, and bytes become float32 again, on any device.

    The number of bytes must depend on the number of values only.
    """

    encode: Encode  # [n] floats -> [bytes] of torch.uint8
    decode: Decode  # [bytes], n -> [n] float32
    _lengths: dict[tuple[int, torch.dtype], int] = field(default_factory=dict, compare=False, repr=False)

    def code_of(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the code of a vector; receivers expect as many bytes as the code of zeros has."""
        code, kind = self.encode(values), (values.numel(), values.dtype)
        if kind not in self._lengths:
            self._lengths[kind] = self.encode(torch.zeros_like(values)).numel()
        expected = self._lengths[kind]
        if code.numel() != expected:
            raise SpecError(
                f"a codec returned {code.numel()} bytes of {values.numel()} values, but {expected} for as many zeros. "
                "Let the number of bytes depend on the number of values only."
            )
        return code


def add_codec(name: str, encode: Encode, decode: Decode) -> None:
    """Registers a codec as `name`; every rank calls it before `synchronize`.

    Args:
        name: the value for `codec=`.
        encode: a flat tensor of floats to a flat tensor of `torch.uint8` on the same device. Its length must depend on
            the number of values only.
        decode: such bytes and the number of values to a flat tensor of float32.
    """
    if name in ("fp32", *CODECS):
        raise SpecError(f"a codec named {name!r} is known already. Choose another name.")
    codec = Codec(encode, decode)
    for size in TEST_SIZES:
        _test_codec(name, codec, size)
    CODECS[name] = codec


def find_codec(name: str) -> Codec | None:
    """Returns the codec `name`; None for the one that sends values as they are."""
    if name == "fp32":
        return None
    if name not in CODECS:
        raise SpecError(
            f"codec={name!r} was asked for, but there are only {', '.join(['fp32', *CODECS])}. "
            "Choose one of these, or register yours with evenly.exchange.add_codec on every rank."
        )
    return CODECS[name]


def _test_codec(name: str, codec: Codec, size: int) -> None:
    """Raises `SpecError` for a codec that fails on `size` values."""
    original = torch.ones(size)
    zeros, ones = codec.encode(torch.zeros(size)), codec.encode(original)
    if not torch.equal(original, torch.ones(size)):
        raise SpecError(f"the codec {name!r} changes the values that it encodes. Let it work on a copy: x.clone().")
    if zeros.dtype != torch.uint8 or zeros.ndim != 1 or zeros.shape != ones.shape:
        raise SpecError(
            f"encode() of the codec {name!r} returned {zeros.dtype} {list(zeros.shape)} for {size} zeros and "
            f"{list(ones.shape)} for {size} ones. It must return 1-D torch.uint8 whose length depends on {size} only."
        )
    values = codec.decode(ones, size)
    if not values.is_floating_point() or values.shape != (size,):
        raise SpecError(
            f"decode() of the codec {name!r} returned {values.dtype} {list(values.shape)} for {size} values. Decode as "
            "many floats as were encoded."
        )


def _to_bf16(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.bfloat16).view(torch.uint8)


def _from_bf16(code: torch.Tensor, size: int) -> torch.Tensor:
    return code.view(torch.bfloat16).float()


INT8_BLOCK = 256  # values that share a scale
INT4_BLOCK = 64


def _to_int8(values: torch.Tensor) -> torch.Tensor:
    kernels = gpu_kernels(values)
    return plain_to_int8(values) if kernels is None else kernels.encode_int8(values, INT8_BLOCK)


def _from_int8(code: torch.Tensor, size: int) -> torch.Tensor:
    kernels = gpu_kernels(code)
    return plain_from_int8(code, size) if kernels is None else kernels.decode_int8(code, size, INT8_BLOCK)


def _to_int4(values: torch.Tensor) -> torch.Tensor:
    kernels = gpu_kernels(values)
    return plain_to_int4(values) if kernels is None else kernels.encode_int4(values, INT4_BLOCK)


def _from_int4(code: torch.Tensor, size: int) -> torch.Tensor:
    kernels = gpu_kernels(code)
    return plain_from_int4(code, size) if kernels is None else kernels.decode_int4(code, size, INT4_BLOCK)


def plain_to_int8(values: torch.Tensor) -> torch.Tensor:
    """Returns the scale of each block, and a digit for each value, as bytes."""
    blocks = _blocks(values, INT8_BLOCK)  # [blocks, 256]
    scales = _scales(blocks, 127)  # [blocks, 1]
    digits = blocks.div_(scales).round_().to(torch.int8)
    return torch.cat([scales.flatten().view(torch.uint8), digits.flatten().view(torch.uint8)[: values.numel()]])


def plain_from_int8(code: torch.Tensor, size: int) -> torch.Tensor:
    """Returns the values of such bytes."""
    head = 4 * -(-size // INT8_BLOCK)
    digits = _blocks(code[head:].view(torch.int8), INT8_BLOCK)
    return digits.mul_(code[:head].clone().view(torch.float32)[:, None]).flatten()[:size]


def plain_to_int4(values: torch.Tensor) -> torch.Tensor:
    """Returns the scale of each block, and two digits in a byte."""
    blocks = _blocks(values, INT4_BLOCK)  # [blocks, 64]
    scales = _scales(blocks, 7, torch.bfloat16)  # [blocks, 1]
    digits = blocks.div_(scales.float()).round_().clamp_(-7, 7).add_(8).to(torch.uint8).flatten()
    pairs = digits[0::2] | (digits[1::2] << 4)
    return torch.cat([scales.flatten().view(torch.uint8), pairs])


def plain_from_int4(code: torch.Tensor, size: int) -> torch.Tensor:
    """Returns the values of such bytes."""
    head = 2 * -(-size // INT4_BLOCK)
    pairs = code[head:]
    digits = torch.stack([pairs & 15, pairs >> 4], dim=1).view(-1, INT4_BLOCK).float().sub_(8)
    return digits.mul_(code[:head].clone().view(torch.bfloat16).float()[:, None]).flatten()[:size]


def _blocks(values: torch.Tensor, block: int) -> torch.Tensor:
    """Returns a copy of the values as float32, [blocks, block], zero-padded."""
    count = -(-values.numel() // block)
    blocks = torch.zeros(count * block, dtype=torch.float32, device=values.device)
    blocks[: values.numel()].copy_(values)
    return blocks.view(count, block)


def _scales(blocks: torch.Tensor, largest: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the scale of each block: 1 for zeros and what is next to them; non-finite scales stay so.

    A scale is a normal number, as devices do not agree about smaller ones.
    """
    scales = blocks.abs().amax(1, keepdim=True).div_(largest).to(dtype)
    return scales.masked_fill_(scales < torch.finfo(torch.float32).tiny, 1.0)


@cache
def _kernels_on(device: torch.device) -> ModuleType | None:
    """Returns the kernels for this device; None, and a warning, if they cannot be compiled or give other bytes."""
    try:
        kernels = import_module("evenly.exchange.codec_kernels")
        values = torch.linspace(-3.0, 5.0, 300, device=device)
        for encode, decode, name, block in (
            (plain_to_int8, plain_from_int8, "int8", INT8_BLOCK),
            (plain_to_int4, plain_from_int4, "int4", INT4_BLOCK),
        ):
            code = getattr(kernels, f"encode_{name}")(values, block)
            decoded = getattr(kernels, f"decode_{name}")(code, len(values), block)
            if not torch.equal(code, encode(values)) or not torch.equal(decoded, decode(code, len(values))):
                raise ValueError(f"the kernels of {name} give other bytes than its plain form")
    except Exception as error:  # whatever a compiler raises
        reason = first_line(error)
        logger.warning("codecs run without kernels of their own on %s, and take longer there: %s", device, reason)
        return None
    return kernels


def gpu_kernels(tensor: torch.Tensor) -> ModuleType | None:
    """Returns the kernels that code such a tensor; None for the plain forms."""
    return _kernels_on(tensor.device) if tensor.is_cuda and tensor.numel() else None


CODECS: dict[str, Codec] = {
    "bf16": Codec(_to_bf16, _from_bf16),
    "int8": Codec(_to_int8, _from_int8),
    "int4": Codec(_to_int4, _from_int4),
}
