"""Tables and progress for people: rich on a terminal if it is there, plain text otherwise."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

_LINE_S = 10.0
_FIRST_GUESS = 20  # of so many parts one is done: the first one may have waited for what all need


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> None:
    """Print rows of cells to stdout; columns of numbers are aligned to the right."""
    cells_of = [[str(cell) for cell in row] for row in rows]
    right = [
        bool(cells_of) and all(_is_number(row[i]) for row in cells_of) for i in range(len(columns))
    ]
    widths = [max(len(cell) for cell in cells) for cells in zip(columns, *cells_of, strict=True)]
    if sys.stdout.isatty() and _print_rich(columns, cells_of, title, right, sum(widths)):
        return
    if title:
        click.echo(title)
    for row in (columns, ["-" * width for width in widths], *cells_of):
        cells = (
            cell.rjust(width) if at_right else cell.ljust(width)
            for cell, width, at_right in zip(row, widths, right, strict=True)
        )
        click.echo("  ".join(cells).rstrip())


def _is_number(cell: str) -> bool:
    return cell in ("", "-", "inf", "nan") or cell[0].isdigit()


def _print_rich(
    columns: Sequence[str], rows: list[list[str]], title: str, right: list[bool], width: int
) -> bool:
    """False without rich, or where the table is too wide for it: it would cut the cells."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    console = Console()
    if width + 3 * len(columns) + 1 > console.width:
        return False
    table = Table(title=title or None, title_justify="left", title_style="bold")
    for column, at_right in zip(columns, right, strict=True):
        table.add_column(column, justify="right" if at_right else "left")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: brackets are no markup
    console.print(table)
    return True


@contextmanager
def progress(length: int | None, label: str) -> Iterator[Any]:
    """Yield advance(text): a bar on stderr if that is a terminal, else a line there every 10 seconds.

    length: how often it will be called; None: nobody knows yet.
    """
    if not sys.stderr.isatty():
        yield _lines(length, label)
        return
    bar = click.progressbar(
        iterable=None if length is not None else itertools.repeat(None),
        length=length,
        label=label,
        file=sys.stderr,
        item_show_func=lambda text: text,
    )
    with bar:
        yield lambda text="": bar.update(1, text)


def _lines(length: int | None, label: str) -> Any:
    begun = last = time.monotonic()
    done = 0

    def advance(text: str = "") -> None:
        nonlocal done, last
        done += 1
        now = time.monotonic()
        if now - last >= _LINE_S:
            last = now
            share, left = f"{done}", ""
            if length is not None:
                share = f"{done} of {length}"
            if length is not None and _FIRST_GUESS * done >= length:
                left = f", about {(now - begun) * (length - done) / done:.0f} s left"
            line = f"{label}: {share} in {now - begun:.0f} s{left}  {text}"
            click.echo(line.rstrip(), err=True)

    return advance


def number(value: float | None, digits: int = 3) -> str:
    """A figure of a table: "-" for None, else `digits` significant digits, without an exponent
    between 0.001 and a million."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if not -3 <= magnitude <= 5:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{max(0, digits - 1 - magnitude)}f}"


def one_line(text: str) -> str:
    """The first line of a message and, of a compiler's, the first one with an error."""
    lines = [line.strip() for line in text.strip().splitlines()] or [""]
    error = next((line for line in lines[1:] if "error" in line), "")
    return f"{lines[0]} {error}".strip()
