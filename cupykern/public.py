"""What the calls of every public op pass through: watches, and tuning at first calls."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

from . import arguments
from .op import Op
from .tuning.tune import tuned_at_first
from .watch import active, look

Function = TypeVar("Function", bound=Callable[..., Any])


def public(function: Function, op: Op | None = None) -> Function:
    """`function` as users call it: active watches look at its outputs, and with CUPYKERN_TUNE=1 in the
    environment its first calls tune `op`.

    It is an attribute of `cupykern`: pickle and help() find it there.  Without a watch it costs a
    ContextVar's look-up.
    """
    is_watched = active.get

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            if is_watched():
                return look(function, args, kwargs)
            return function(*args, **kwargs)
        except (AttributeError, TypeError):
            arguments.check_complete(kwargs.get("config"))
            raise

    found: Any = call
    if op is not None and os.environ.get("CUPYKERN_TUNE") == "1":
        found = tuned_at_first(op, call)
    found.__module__ = __package__
    return found
