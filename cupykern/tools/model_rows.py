"""A model's steps as lines of a table, for `report`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from .tables import number

DECODE, PREFILL = "decode", "prefill"


def tokens_per_second(op: str, shape: Sequence[int], us: float) -> float:
    """Return new tokens per second; a decode step makes one token per sequence."""
    return 1e6 * (shape[0] if op.endswith(DECODE) else math.prod(shape)) / us


def lines(
    rows: Sequence[dict[str, Any]], peer_cell: Callable[[dict[str, Any], dict[str, Any]], str]
) -> list[tuple[str, ...]]:
    """Return a header and a line per row.  peer_cell: formats (a peer's result, ours)."""
    peers = list(dict.fromkeys(r["name"] for row in rows for r in row["results"][1:]))
    figures = "µs", "floor, µs", "% of floor", "tokens/s"
    found = [("step", "sequences", "tokens of each", *figures, *(f"{p}, µs" for p in peers))]
    for row in rows:
        ours, us = row["results"][0], row["results"][0]["median_us"]
        by_name = {result["name"]: result for result in row["results"][1:]}
        decode = row["op"].endswith(DECODE)
        floor = row["plain_us"] if decode and us and ours["verified"] else None
        speed = tokens_per_second(row["op"], row["shape"], us) if us else None
        found.append(
            (
                row["op"].rpartition(" ")[2],
                *map(str, row["shape"]),
                number(us, 4) if ours["verified"] else "wrong",
                number(floor, 4),
                number(floor and 100 * floor / us),
                number(speed, 4),
                *(peer_cell(by_name[p], ours) if p in by_name else "-" for p in peers),
            )
        )
    return found
