"""What the calls of every public op pass through: watches, and tuning at first calls."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from .op import Op
from .tools.tuning import tuned_at_first
from .watch import watched

Function = TypeVar("Function", bound=Callable[..., Any])


def public(function: Function, op: Op | None = None) -> Function:
    """`function` as users call it: active watches look at its outputs, and with CUPYKERN_TUNE=1 in the
    environment its first calls tune `op`.

    It is an attribute of `cupykern`: pickle and help() find it there.
    """
    found = watched(function)
    if op is not None and os.environ.get("CUPYKERN_TUNE") == "1":
        found = tuned_at_first(op, found)
    found.__module__ = __package__
    return found
