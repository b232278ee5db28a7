"""Parses quantities of the command line: sizes, speeds, bytes, bandwidths and latencies."""

import re
from math import isfinite

from evenly.errors import SpecError
from evenly.spec import Rate

NUMBER = r"(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)"
POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def shape_of(text: str) -> tuple[int, ...]:
    """Returns the sizes of an input.

    >>> shape_of("64x3x32x32")
    (64, 3, 32, 32)
    """
    if not re.fullmatch(r"\d+(x\d+)*", text) or 0 in map(int, text.split("x")):
        raise SpecError(
            f"--input {text} was given, but sizes are whole numbers of at least 1 with x between them, the samples of "
            "a batch first. Write --input 64x3x32x32."
        )
    return tuple(int(size) for size in text.split("x"))


def numbers_between_commas(text: str, option: str) -> list[float]:
    """Returns the numbers between the commas.

    >>> numbers_between_commas("70,25,5", "--speeds")
    [70.0, 25.0, 5.0]
    """
    numbers = []
    for part in text.split(","):
        try:
            numbers.append(float(part))
        except ValueError:
            raise SpecError(
                f"{option} {text} was given, but {part!r} is not a number. Write {option} 70,25,5: one for each rank."
            ) from None
    return numbers


def counts_of(text: str) -> list[int]:
    """Returns the ranks of each node.

    >>> counts_of("2,1")
    [2, 1]
    """
    parts = text.split(",")
    if not all(re.fullmatch(r"\s*0*[1-9]\d*\s*", part) for part in parts):
        raise SpecError(
            f"--nodes {text} was given, but every node has at least 1 rank. Write --nodes 2,1: the ranks of each node."
        )
    return [int(part) for part in parts]


def memories_of(text: str) -> list[int]:
    """Returns the bytes of each rank.

    >>> memories_of("8GB,512MiB")
    [8000000000, 536870912]
    """
    return [_bytes(part, text) for part in text.split(",")]


def flops_of(text: str) -> float:
    """Returns floating-point operations a second.

    >>> flops_of("10T"), flops_of("2e11")
    (10000000000000.0, 200000000000.0)
    """
    match = re.fullmatch(NUMBER + r"\s*([kKMGTPmgtp]?)", text.strip())
    number = _scaled(match[1], match[2]) if match else 0.0
    if not 0 < number < float("inf"):
        raise SpecError(
            f"--flops {text} was given, but it is the floating-point operations a second of the fastest rank, a number "
            "above 0. Write --flops 10T or --flops 1e13."
        )
    return number


def rate_of(text: str, option: str, usual: Rate) -> Rate:
    """Returns bandwidth and, after a comma, latency of a link; latency is that of `usual` if left out.

    >>> rate_of("1Gbit,20ms", "--across", Rate(latency_s=1e-4, bytes_per_s=1))
    Rate(latency_s=0.02, bytes_per_s=125000000.0)
    """
    bandwidth, comma, latency = text.partition(",")
    bandwidth_match = re.fullmatch(NUMBER + r"\s*([kKMGTmgt]?)(i?)(bit|B)(?:/s)?", bandwidth.strip())
    latency_match = re.fullmatch(NUMBER + r"\s*(s|ms|us)", latency.strip()) if comma else None
    number = (
        _scaled(bandwidth_match[1], bandwidth_match[2], binary=bool(bandwidth_match[3])) if bandwidth_match else 0.0
    )
    if bandwidth_match is None or not 1 <= number < 1e18 or (comma and latency_match is None):
        raise SpecError(
            f"{option} {text} was given, but a link has a bandwidth of 1 or more bit or B a second, and after a comma "
            f"its latency. Write {option} 1Gbit, {option} 10GB/s or {option} 1Gbit,20ms."
        )
    latency_s = float(latency_match[1]) * SECONDS[latency_match[2]] if latency_match else usual.latency_s
    return Rate(latency_s=latency_s, bytes_per_s=number / 8 if bandwidth_match[4] == "bit" else number)


def factor_of(number: float, option: str) -> float:
    """Returns a factor, which is above 0 and finite."""
    if not (number > 0 and isfinite(number)):
        after = option if option.endswith("=") else f"{option} "
        raise SpecError(f"{after}{number:g} was given, but a factor is above 0. Write {after}0.5 for half as fast.")
    return number


def _bytes(part: str, text: str) -> int:
    match = re.fullmatch(NUMBER + r"\s*([kKMGTmgt]?)(i?)B", part.strip())
    number = _scaled(match[1], match[2], binary=bool(match[3])) if match else 0.0
    if not 1 <= number < 2**62:
        raise SpecError(
            f"--memory {text} was given, but {part!r} is no amount of memory. Write --memory 8GB,512MiB: one for each "
            "rank, with its unit."
        )
    return int(number)


def _scaled(number: str, prefix: str, *, binary: bool = False) -> float:
    return float(number) * (1024.0 if binary else 1000.0) ** POWERS[prefix.lower()]
