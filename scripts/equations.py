r"""Writes the equations of the documentation as MathML, which browsers show without a script and without a network.

A page has the equation in TeX, in a comment, and below it the MathML that this script has made of it:

    <!-- math: w_n = \frac{S_n}{\sum_m S_m} -->
    <math display="block">...</math>

    python scripts/equations.py            # writes the MathML into all pages of docs/
    python scripts/equations.py --check    # only says which pages would change

Zensical hands TeX to a script in the reader's browser, and imports functions for the build from installed packages
only; hence MathML in the pages. Of TeX it knows what the pages need: letters, numbers, operators, groups, `_`, `^`,
primes, `\frac`, `\text`, `\left(`, `\right)`, and the commands in the tables below. Anything else is an error.
"""

# ruff: noqa: RUF001  (signs and Greek letters of equations)

import argparse
import re
import sys
from html import escape
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
COMMAND = "python scripts/equations.py"
EQUATION = re.compile(r"^<!-- math: (.+?) -->\n(?:<math .*?</math>\n)?", re.MULTILINE | re.DOTALL)
TOKEN = re.compile(r"\\text\{[^}]*\}|\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|\S")
OPERATORS = {
    "in": "∈", "le": "≤", "ge": "≥", "leftarrow": "←", "ast": "∗", "lceil": "⌈", "rceil": "⌉", "{": "{", "}": "}",
}  # fmt: skip
LETTERS = {
    "alpha": "α", "beta": "β", "eta": "η", "sigma": "σ", "partial": "∂",
}  # fmt: skip
WITH_LIMITS = {"sum": "<mo>∑</mo>", "max": "<mo>max</mo>"}  # subscripts stand below
FENCES = "()[]{}⌈⌉"  # as tall as a letter, but for \\left and \\right: as tall as what is between them
STRUT = '<mspace depth="0.15em"/>'  # lowers subscripts also where a system has no font with mathematical metrics
SPACES = {",": "0.17em", ";": "0.28em", "quad": "1em"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page would change")
    is_check = parser.parse_args().check
    changed = []
    for page in sorted(DOCS.rglob("*.md")):
        before = page.read_text()
        after = rewritten(before)
        if after != before:
            changed.append(page.relative_to(DOCS.parent).as_posix())
            if not is_check:
                page.write_text(after)
    if is_check and changed:
        sys.exit(f"The equations of {', '.join(changed)} are not what their TeX says. Run: {COMMAND}")


def rewritten(page: str) -> str:
    """Returns the page with the MathML of all its equations."""
    return EQUATION.sub(lambda match: f"<!-- math: {match[1]} -->\n{mathml(match[1])}\n", page)


def mathml(tex: str) -> str:
    r"""Returns the equation as one element.

    >>> mathml("x_n").partition(">")[2]
    '<msub><mrow><mi>x</mi><mspace depth="0.15em"/></mrow><mi>n</mi></msub></math>'
    """
    tokens = Tokens(tex)
    row = "".join(tokens.items(end=""))
    return f'<math display="block" alttext="{escape(" ".join(tex.split()))}">{row}</math>'


class Tokens:
    """The words of an equation, from which elements are made one after another."""

    def __init__(self, tex: str) -> None:
        self._tex = tex
        self._words = ["", *TOKEN.findall(tex)[::-1]]  # the next one is the last

    def items(self, *, end: str) -> list[str]:
        """Returns the elements up to the word `end`."""
        elements = []
        while self._words[-1] != end:
            elements.append(self._with_scripts())
        if end:
            self._next()
        return elements

    def _next(self) -> str:
        if len(self._words) == 1:
            raise ValueError(f"{self._tex!r} ends too early: a brace is not closed, or an argument is missing.")
        return self._words.pop()

    def _with_scripts(self) -> str:
        has_limits = self._words[-1].removeprefix("\\") in WITH_LIMITS
        base, below, above = self._element(), "", ""
        while self._words[-1] in ("_", "^", "'"):
            word = self._next()
            if word == "_":
                below = self._element()
            else:
                above += "<mo>′</mo>" if word == "'" else self._element()
        scripts = ("munder", "mover", "munderover") if has_limits else ("msub", "msup", "msubsup")
        tag = scripts[0] if not above else scripts[1] if not below else scripts[2]
        if below and not has_limits:
            base = f"<mrow>{base}{STRUT}</mrow>"
        return f"<{tag}>{base}{below}{above}</{tag}>" if below or above else base

    def _element(self) -> str:
        word = self._next()
        name = word.removeprefix("\\")
        if word == "}":
            raise ValueError(f"{self._tex!r} closes a brace that was not opened.")
        if word == "{":
            return f"<mrow>{''.join(self.items(end='}'))}</mrow>"
        if word.startswith("\\text{"):
            return f"<mtext>{escape(word[6:-1])}</mtext>"
        if word.startswith("\\"):
            return self._command(name)
        if word[0].isdigit():
            return f"<mn>{word}</mn>"
        if word.isalpha():
            return f"<mi>{word}</mi>"
        return f'<mo stretchy="false">{word}</mo>' if word in FENCES else f"<mo>{escape(word.replace('-', '−'))}</mo>"

    def _fence(self) -> str:
        word = self._next().removeprefix("\\")
        return OPERATORS.get(word, word)

    def _command(self, name: str) -> str:
        if name == "frac":
            return f"<mfrac>{self._element()}{self._element()}</mfrac>"
        if name in SPACES:
            return f'<mspace width="{SPACES[name]}"/>'
        if name in LETTERS:
            return f"<mi>{LETTERS[name]}</mi>"
        if name == "left":
            first, inner, last = self._fence(), "".join(self.items(end="\\right")), self._fence()
            return f"<mrow><mo>{first}</mo>{inner}<mo>{last}</mo></mrow>"
        if name in OPERATORS:
            sign = OPERATORS[name]
            return f'<mo stretchy="false">{sign}</mo>' if sign in FENCES else f"<mo>{sign}</mo>"
        if name in WITH_LIMITS:
            return WITH_LIMITS[name]
        raise ValueError(
            f"{self._tex!r} has \\{name}, which this script does not know. Add it to a table, or write it otherwise."
        )


if __name__ == "__main__":
    main()
