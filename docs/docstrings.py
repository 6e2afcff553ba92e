"""Sphinx extension: cupykern's docstrings, which are plain text for help(), as reStructuredText.

A docstring has paragraphs, doctest examples, and items `name: text` or `name, name: text` whose
further lines are indented.  Items become a definition list, other indented lines a block of code.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from itertools import groupby
from typing import Any

_ITEM = re.compile(r"(?P<names>[a-z_][a-z0-9_]*(?:, [a-z_][a-z0-9_]*)*): +(?P<text>\S.*)")
_CODE = re.compile(r"`([^`]+)`")
_SPECIAL = re.compile(r"([\\*|_])")


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", _process)
    return {"parallel_read_safe": True}


def _process(_app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]):
    lines[:] = to_rst(lines)


def to_rst(lines: list[str]) -> list[str]:
    """The docstring's lines, without its common indentation, as lines of reStructuredText."""
    result: list[str] = []
    for paragraph in _paragraphs(lines):
        if paragraph[0].startswith(">>> "):
            result += [*paragraph, ""]
            continue
        for names, part in _items(paragraph):
            if names is None:
                for is_formula, lines_of in groupby(part, lambda line: line.startswith(" ")):
                    if is_formula:
                        result += ["::", "", *(f"   {line.strip()}" for line in lines_of), ""]
                    else:
                        result += [*map(escape, lines_of), ""]
            else:
                term = ", ".join(f"``{name}``" for name in names)
                body = textwrap.dedent("\n".join([part[0].strip(), *_dedent(part[1:])]))
                result += [term, *(f"   {escape(line)}" for line in body.splitlines()), ""]
    return result


def escape(text: str) -> str:
    """Text for reStructuredText: `code` as literals, everything else as it stands."""
    pieces = _CODE.split(text)
    for i, piece in enumerate(pieces):
        pieces[i] = f"``{piece}``" if i % 2 else _SPECIAL.sub(r"\\\1", piece)
    return "".join(pieces)


def _paragraphs(lines: list[str]) -> Iterator[list[str]]:
    paragraph: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            paragraph.append(line.rstrip())
        elif paragraph:
            yield paragraph
            paragraph = []


def _items(paragraph: list[str]) -> Iterator[tuple[list[str] | None, list[str]]]:
    """(names, lines) of each item, (None, lines) of what is none."""
    names: list[str] | None = None
    part: list[str] = []
    for line in paragraph:
        found = _ITEM.fullmatch(line)
        is_broken = names is None and part and not part[-1].endswith((".", ":"))  # a sentence
        if found and not is_broken:
            if part:
                yield names, part
            names, part = found["names"].split(", "), [found["text"]]
        elif names is not None and not line.startswith(" "):
            yield names, part
            names, part = None, [line]
        else:
            part.append(line)
    yield names, part


def _dedent(lines: list[str]) -> list[str]:
    return textwrap.dedent("\n".join(lines)).splitlines()
