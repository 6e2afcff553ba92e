"""Tables and progress on the console: rich on a terminal if installed, plain text otherwise."""

from __future__ import annotations

import itertools
import math
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

_LINE_S = 10.0
_LEAST_WIDTH = 12  # of a wrapped column
_FIRST_GUESS = 20  # estimate after 1/20 of the parts: the first ones can include a common set-up


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> None:
    """Print rows of cells to stdout; columns of numbers are right-aligned.

    On a terminal, columns of text are wrapped to its width; elsewhere a row is one line.
    """
    texts = [[str(cell) for cell in row] for row in rows]
    right = [bool(texts) and all(_is_number(row[i]) for row in texts) for i in range(len(columns))]
    widths = [max(len(cell) for cell in cells) for cells in zip(columns, *texts, strict=True)]
    if sys.stdout.isatty():
        if _print_rich(columns, texts, title, right, sum(widths)):
            return
        widths = _fitting(widths, right, shutil.get_terminal_size().columns)
    if title:
        click.echo(title)
    for row in (columns, ["-" * width for width in widths], *texts):
        wrapped = [
            [cell] if len(cell) <= width else _wrap(cell, width)
            for cell, width in zip(row, widths, strict=True)
        ]
        for line in itertools.zip_longest(*wrapped, fillvalue=""):
            cells = (
                cell.rjust(width) if at_right else cell.ljust(width)
                for cell, width, at_right in zip(line, widths, right, strict=True)
            )
            click.echo("  ".join(cells).rstrip())


def _fitting(widths: Sequence[int], right: Sequence[bool], limit: int) -> list[int]:
    """Return column widths that fit into `limit`, two spaces apart; the widest shrink first.

    Number columns keep their width.  No text column gets narrower than _LEAST_WIDTH.
    """
    found = list(widths)
    for _ in range(sum(found) + 2 * (len(found) - 1) - limit):
        text = [i for i, at_right in enumerate(right) if not at_right and found[i] > _LEAST_WIDTH]
        if not text:
            break
        found[max(text, key=found.__getitem__)] -= 1
    return found


def _wrap(cell: str, width: int) -> list[str]:
    return textwrap.wrap(cell, width, break_on_hyphens=False)


def _is_number(cell: str) -> bool:
    return cell in ("", "-", "inf", "nan") or cell[0].isdigit()


def _print_rich(
    columns: Sequence[str], rows: list[list[str]], title: str, right: list[bool], width: int
) -> bool:
    """Return False without rich, or if the table is too wide: rich would cut the cells."""
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
        table.add_row(*(Text(cell) for cell in row))  # Text: brackets are not markup
    console.print(table)
    return True


@contextmanager
def progress(length: int | Callable[[], int | None] | None, label: str) -> Iterator[Any]:
    """Yield advance(text): a bar on stderr if it is a terminal, else a line every 10 seconds.

    length: the number of calls of advance; or a function that returns it, and None while it is
        unknown.
    """
    total = length if callable(length) else lambda: length
    if not sys.stderr.isatty():
        yield _lines(total, label)
        return
    bar: Any = click.progressbar(
        iterable=None if total() is not None else itertools.repeat(None),
        length=total(),
        label=label,
        file=sys.stderr,
        item_show_func=lambda text: text,
    )

    def advance(text: str = "") -> None:
        bar.length = total()
        bar.update(1, text)

    with bar:
        yield advance


class Counted(Iterator[Any]):
    """An iterator that counts its items; `total` is None until its end."""

    def __init__(self, items: Iterable[Any]):
        self._items, self._seen = iter(items), 0
        self.total: int | None = None

    def __next__(self) -> Any:
        try:
            item = next(self._items)
        except StopIteration:
            self.total = self._seen
            raise
        self._seen += 1
        return item


def _lines(total: Callable[[], int | None], label: str) -> Any:
    begun = last = time.monotonic()
    done = 0

    def advance(text: str = "") -> None:
        nonlocal done, last
        done += 1
        now = time.monotonic()
        if now - last >= _LINE_S:
            last = now
            share, left, length = f"{done}", "", total()
            if length is not None:
                share = f"{done} of {length}"
            if length is not None and length / _FIRST_GUESS <= done < length:
                left = f", about {(now - begun) * (length - done) / done:.0f} s left"
            line = f"{label}: {share} in {now - begun:.0f} s{left}  {text}"
            click.echo(line.rstrip(), err=True)

    return advance


def number(value: float | None, digits: int = 3) -> str:
    """Format a table's figure with `digits` significant digits; "-" for None.

    Values from 0.001 to a million have no exponent.
    """
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
    """Return a message's first line and, for a compiler's message, its first line with an error."""
    lines = [line.strip() for line in text.strip().splitlines()] or [""]
    error = next((line for line in lines[1:] if "error" in line), "")
    return f"{lines[0]} {error}".strip()
