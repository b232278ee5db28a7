"""The codecs int8 and int4 on a GPU: one kernel each way, with the same bytes as their plain forms.

A kernel reads every value once and writes every byte once. It uses the division of IEEE and rounds to even as torch
does. Triton is imported, and a kernel compiled, when the first vector on a GPU is coded.
"""

import torch
import triton
import triton.language as tl

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds a float32 below 2^22 to an integer, to even
SMALLEST = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32
ROWS = 16  # blocks of values that one program codes


@triton.jit
def _scale_of(x, largest_digit: tl.constexpr):
    has_nan = tl.max((x != x).to(tl.int32), axis=1)
    largest = tl.where(has_nan != 0, float("nan"), tl.max(tl.abs(x), axis=1))
    return tl.math.div_rn(largest, largest_digit)


@triton.jit
def _rounded(x, scale):
    return (tl.math.div_rn(x, scale) + ROUND) - ROUND


@triton.jit
def _encode_int8(values, scales, digits, size, block: tl.constexpr, rows: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    place = row[:, None] * block + tl.arange(0, block)[None, :]
    x = tl.load(values + place, mask=place < size, other=0.0).to(tl.float32)
    scale = _scale_of(x, 127.0)
    scale = tl.where(scale < SMALLEST, 1.0, scale)
    tl.store(scales + row, scale, mask=row * block < size)
    tl.store(digits + place, _rounded(x, scale[:, None]).to(tl.int8), mask=place < size)


@triton.jit
def _decode_int8(scales, digits, values, size, block: tl.constexpr, rows: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    place = row[:, None] * block + tl.arange(0, block)[None, :]
    scale = tl.load(scales + row, mask=row * block < size, other=0.0)
    digit = tl.load(digits + place, mask=place < size, other=0).to(tl.float32)
    tl.store(values + place, digit * scale[:, None], mask=place < size)


@triton.jit
def _digit_int4(x, scale):
    return (tl.minimum(tl.maximum(_rounded(x, scale), -7.0), 7.0) + 8.0).to(tl.uint8)


@triton.jit
def _encode_int4(values, scales, pairs, size, block: tl.constexpr, rows: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    pair = row[:, None] * (block // 2) + tl.arange(0, block // 2)[None, :]
    low = tl.load(values + 2 * pair, mask=2 * pair < size, other=0.0).to(tl.float32)
    high = tl.load(values + 2 * pair + 1, mask=2 * pair + 1 < size, other=0.0).to(tl.float32)
    scale = tl.maximum(_scale_of(low, 7.0), _scale_of(high, 7.0), propagate_nan=tl.PropagateNan.ALL)
    scale = scale.to(tl.bfloat16).to(tl.float32)
    scale = tl.where(scale < SMALLEST, 1.0, scale)
    inside = row * block < size
    tl.store(scales + row, scale.to(tl.bfloat16), mask=inside)
    byte = _digit_int4(low, scale[:, None]) | (_digit_int4(high, scale[:, None]) << 4)
    tl.store(pairs + pair, byte, mask=inside[:, None])


@triton.jit
def _decode_int4(scales, pairs, values, size, block: tl.constexpr, rows: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    pair = row[:, None] * (block // 2) + tl.arange(0, block // 2)[None, :]
    inside = row * block < size
    scale = tl.load(scales + row, mask=inside, other=0.0).to(tl.float32)[:, None]
    byte = tl.load(pairs + pair, mask=inside[:, None], other=0)
    tl.store(values + 2 * pair, ((byte & 15).to(tl.float32) - 8.0) * scale, mask=2 * pair < size)
    tl.store(values + 2 * pair + 1, ((byte >> 4).to(tl.float32) - 8.0) * scale, mask=2 * pair + 1 < size)


def encode_int8(values: torch.Tensor, block: int) -> torch.Tensor:
    """Returns the scales of all blocks and the digits of all values, as bytes."""
    size, blocks = values.numel(), -(-values.numel() // block)
    code = torch.empty(4 * blocks + size, dtype=torch.uint8, device=values.device)
    scales, digits = code[: 4 * blocks].view(torch.float32), code[4 * blocks :].view(torch.int8)
    _encode_int8[(-(-blocks // ROWS),)](values.contiguous(), scales, digits, size, block, ROWS)
    return code


def decode_int8(code: torch.Tensor, size: int, block: int) -> torch.Tensor:
    """Returns the values of a code as float32."""
    blocks = -(-size // block)
    values = torch.empty(size, dtype=torch.float32, device=code.device)
    scales, digits = code[: 4 * blocks].view(torch.float32), code[4 * blocks :].view(torch.int8)
    _decode_int8[(-(-blocks // ROWS),)](scales, digits, values, size, block, ROWS)
    return values


def encode_int4(values: torch.Tensor, block: int) -> torch.Tensor:
    """Returns the scales of all blocks, and two digits in a byte."""
    size, blocks = values.numel(), -(-values.numel() // block)
    code = torch.empty(2 * blocks + blocks * block // 2, dtype=torch.uint8, device=values.device)
    scales, pairs = code[: 2 * blocks].view(torch.bfloat16), code[2 * blocks :]
    _encode_int4[(-(-blocks // ROWS),)](values.contiguous(), scales, pairs, size, block, ROWS)
    return code


def decode_int4(code: torch.Tensor, size: int, block: int) -> torch.Tensor:
    """Returns the values of a code as float32."""
    blocks = -(-size // block)
    values = torch.empty(size, dtype=torch.float32, device=code.device)
    scales, pairs = code[: 2 * blocks].view(torch.bfloat16), code[2 * blocks :]
    _decode_int4[(-(-blocks // ROWS),)](scales, pairs, values, size, block, ROWS)
    return values
