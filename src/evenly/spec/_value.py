"""The base of all values: frozen, versioned, exact round trip through JSON, errors that name the field."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from evenly._torch.pydantic import ModelMetaclass
from evenly.errors import SpecError
from evenly.spec._text import load_json, long_number


class _SpecErrorMeta(ModelMetaclass):
    """Constructs values: allows positional fields and turns pydantic's error into `SpecError`."""

    if not TYPE_CHECKING:  # a type checker sees the fields

        def __call__(cls, *args: object, **fields: object) -> object:  # noqa: N805  # a metaclass's self is a class
            names = cls._positional
            if len(args) > len(names):
                raise TypeError(f"{cls.__name__} takes {len(names)} positional arguments, {len(args)} were given")
            positional = dict(zip(names, args, strict=False))
            duplicates = [name for name in positional if name in fields]
            if duplicates:
                raise TypeError(f"{cls.__name__} was given {duplicates[0]} twice, by position and by name")
            fields = {**positional, **fields}
            try:
                return super().__call__(**fields)
            except ValidationError as error:
                raise _spec_error(cls.__name__, error, fields) from None


class Value(BaseModel, metaclass=_SpecErrorMeta):
    """A frozen value that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    _positional: ClassVar[tuple[str, ...]] = ()


class Document(Value):
    """A value that can be a file of its own."""

    def to_json(self) -> str:
        """Returns the JSON text of this value; `from_json` gives an equal value back."""
        return self.model_dump_json(indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Returns the value that `text` describes, or raises `SpecError` naming the offending field."""
        if (number := long_number(text)) is not None:
            raise SpecError(f"{cls.__name__} is not valid: it holds the number {number}. Correct it and try again.")
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise _spec_error(cls.__name__, error, load_json(text)) from None

    def save(self, path: str | Path) -> None:
        """Writes the JSON text to `path`."""
        try:
            Path(path).write_text(self.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            raise SpecError(
                f"cannot write {type(self).__name__} to {path}: {error.strerror}. Give a file in a folder that exists."
            ) from None

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Returns the value stored in the file `path`."""
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise SpecError(f"cannot read {cls.__name__} from {path}: {error.strerror}. Check the path.") from None
        try:
            return cls.from_json(text)
        except SpecError as error:
            raise SpecError(f"{path}: {error}") from None


def _field_path(loc: tuple[int | str, ...], value: object) -> str:
    """Returns the path of an error inside `value`; pydantic's `loc` also names the chosen member of a union."""
    parts: list[str] = []
    chosen = False
    for part in loc:
        if isinstance(value, Mapping):
            if not chosen and part in (value.get("kind"), value.get("event")):
                chosen = True
                continue
            value = value.get(str(part))
        elif isinstance(value, list | tuple) and isinstance(part, int) and part < len(value):
            value = value[part]
        elif not isinstance(part, int) and parts:  # the member of a union of plain types
            break
        chosen = False
        parts.append(str(part))
    return ".".join(parts) or "(whole value)"


def _spec_error(name: str, error: ValidationError, fields: object) -> SpecError:
    lines = []
    for item in error.errors():
        path = _field_path(item["loc"], fields)
        input_text = "" if item["type"] in ("missing", "json_invalid") else f", given {_short(item['input'])}"
        lines.append(f"{path}: {_plain(item)}{input_text}")
    return SpecError(f"{name} is not valid: " + "; ".join(lines) + ". Correct the field and try again.")


def _plain(item: ErrorDetails) -> str:
    if item["type"] == "extra_forbidden":
        return "unknown field"
    return str(item["msg"]).removeprefix("Value error, ")


def _short(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # more digits than Python prints, or nested too deeply
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."
