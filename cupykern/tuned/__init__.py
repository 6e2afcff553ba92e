"""Measured numbers of an architecture, as data: cupykern/tuned/<arch>.json.

A number stands there with its unit, its meaning and what it was measured on.  Code holds the
models alone.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any


@cache
def load(arch: str) -> dict[str, Any]:
    """The file of `arch`.  Raises FileNotFoundError if nothing was measured on it."""
    return json.loads(resources.files(__name__).joinpath(f"{arch}.json").read_text())


def constants(arch: str, section: str) -> dict[str, Any]:
    """The values of a section, by name: constants("sm_90a", "gemm")["epilogue"] is in us.

    Lists are tuples, and names that are numbers are integers.
    """
    return {name: _frozen(entry["value"]) for name, entry in load(arch)[section].items()}


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        names = (int(name) if name.isdecimal() else name for name in value)
        return dict(zip(names, map(_frozen, value.values()), strict=True))
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
