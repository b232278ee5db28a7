"""Writes the page: one file, with its style, script and data inside."""

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from evenly.errors import SpecError
from evenly.reports.page.bars import PHASE_WORDS
from evenly.reports.page.data import PageData, page_data
from evenly.reports.page.groups import GROUP_HEADERS
from evenly.reports.phases import PHASE_HEADERS
from evenly.reports.predictions import PREDICTION_HEADERS
from evenly.reports.reading import RecordedRun
from evenly.reports.table import HEADERS

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = "templates"
SCRIPTS = ("draw.js", "lines.js", "timeline.js", "page.js")


def render(runs: Sequence[RecordedRun]) -> str:
    """Returns the page of some runs."""
    from markupsafe import Markup

    page = page_data(runs)
    return (
        _environment()
        .get_template("page.html")
        .render(
            page=page,
            title=_title(page),
            style=Markup(_text("style.css")),  # noqa: S704 (a file of this package)
            script=Markup("\n".join(_text(name) for name in SCRIPTS)),  # noqa: S704 (files of this package)
            data=Markup(_json(page.charts)),  # noqa: S704 (escaped for a script element)
            headers=HEADERS,
            group_headers=GROUP_HEADERS,
            phase_headers=PHASE_HEADERS,
            prediction_headers=PREDICTION_HEADERS,
            phase_words=PHASE_WORDS,
        )
    )


@cache
def _environment() -> "Environment":
    from jinja2 import DictLoader, Environment, StrictUndefined

    templates = {name: _text(name) for name in ("page.html", "run.html", "parts.html")}
    return Environment(
        loader=DictLoader(templates), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def write_page(runs: Sequence[RecordedRun], path: Path) -> None:
    """Writes the page of some runs to a file."""
    text = render(runs)
    try:
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise SpecError(
            f"the page {path} cannot be written: {error.strerror}. Give a file in a folder that exists."
        ) from None


def _title(page: PageData) -> str:
    if len(page.runs) == 1:
        return page.runs[0].name
    return f"{len(page.runs)} runs: {', '.join(group.name for group in page.groups[:4])}"


def _json(charts: dict[str, object]) -> str:
    """Returns JSON that may stand in a script element."""
    text = json.dumps(charts, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _text(name: str) -> str:
    return files(__package__).joinpath(TEMPLATES, name).read_text(encoding="utf-8")
