"""Settings of a recipe: defaults, a TOML file, `key=value` on the command line, in this order."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from evenly.errors import SpecError
from evenly.spec._text import load_toml
from evenly.spec._value import Value


class RecipeConfig(Value):
    """The base of every recipe's settings."""

    @classmethod
    def build(cls, file: Path | None, changes: Sequence[str]) -> Self:
        """Returns the settings of `file`, changed by texts like `epochs=3`."""
        values = read_toml(file) if file is not None else {}
        for change in changes:
            key, equals, text = change.partition("=")
            if not equals or not key:
                raise SpecError(f"--set {change!r} was given, but it takes key=value, such as --set epochs=3.")
            values[key.strip()] = _value(text.strip())
        unknown = [key for key in values if key not in cls.model_fields]
        if unknown:
            raise SpecError(
                f"this recipe has no setting {', '.join(map(repr, unknown))}. It has: {', '.join(cls.model_fields)}."
            )
        for key, value in values.items():
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise SpecError(
                    f"the setting {key} was given a number of {len(str(abs(value)))} digits; whole numbers lie between "
                    "-2^63 and 2^63. Give a smaller one."
                )
        if isinstance(values.get("every"), int):
            values["every"] = str(values["every"])
        return cls(**values)


def read_toml(file: Path) -> dict[str, object]:
    """Returns the settings of a TOML file."""
    return load_toml(file)


def _value(text: str) -> object:
    if text.lower() in ("none", "null"):
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # no TOML, thousands of digits, or nested without end
        return text
