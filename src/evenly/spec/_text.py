"""Reads text of files and users before it becomes a value, and rejects what no value may hold.

Whole numbers are at most 40 digits long, so that results computed from them stay within the range of a float.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from evenly.errors import SpecError

MOST_DIGITS = 40
_LIMIT = 10**MOST_DIGITS
_LONG = re.compile(rf"[0-9]{{{MOST_DIGITS + 1}}}")
_LONG_BYTES = re.compile(_LONG.pattern.encode())


def long_number(text: str | bytes) -> str | None:
    """Returns the beginning of a whole number in JSON `text` that is too long; None if there is none."""
    if not (_LONG_BYTES.search(text) if isinstance(text, bytes) else _LONG.search(text)):
        return None
    long_numbers: list[str] = []

    def collect(digits: str) -> int:
        if len(digits.lstrip("-")) > MOST_DIGITS:
            long_numbers.append(digits)
        return 0

    try:
        json.loads(text, parse_int=collect)
    except (ValueError, RecursionError):
        return None  # the parser of the text reports the error
    return f"{long_numbers[0][:20]}... ({len(long_numbers[0])} digits)" if long_numbers else None


def load_json(text: str | bytes) -> object:
    """Returns the value of JSON `text`; None if it cannot be read."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def load_toml(file: str | Path, text: str | None = None) -> dict[str, object]:
    """Returns the values of a TOML file, or of `text` in its place; raises `SpecError` if they are not valid."""
    try:
        values = tomllib.loads(Path(file).read_text(encoding="utf-8") if text is None else text)
        long = next((number for number in _whole_numbers(values) if abs(number) >= _LIMIT), None)
    except OSError as error:
        raise SpecError(f"the settings file {file} cannot be read: {error.strerror}. Check the path.") from None
    except RecursionError:
        raise SpecError(f"{file} is not valid: it is nested too deeply. Correct the file.") from None
    except ValueError as error:  # also of tomllib, of UTF-8 decoding, and of Python for thousands of digits
        raise SpecError(f"{file} is not valid TOML: {error}. Correct the file and try again.") from None
    if long is not None:
        raise SpecError(f"{file} is not valid: a whole number has more than {MOST_DIGITS} digits. Correct the file.")
    return values


def _whole_numbers(value: object) -> Iterator[int]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _whole_numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from _whole_numbers(item)
    elif isinstance(value, int):
        yield value
