"""The wrapper of every public op: arrays of other libraries, watches, and tuning at first calls."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

from .arguments import check_complete
from .interop import foreign
from .op import Op
from .tuning.tune import tuned_at_first
from .watch import active, look

Function = TypeVar("Function", bound=Callable[..., Any])


def public(function: Function, op: Op | None = None) -> Function:
    """Wrap `function` for users, as an attribute of `cupykern`, where pickle and help() find it.

    Arrays of other libraries become cupy or numpy arrays of the same memory, and results become
    arrays of that library.  Active watches check the outputs.  With CUPYKERN_TUNE=1 in the
    environment at import, first calls tune `op`.

    For cupy and numpy arrays the wrapper costs a look-up of the first argument's class and one of a
    ContextVar.  The first array of a foreign class is detected by the exception that it causes,
    later ones by the look-up.
    """
    is_watched, foreign_kinds = active.get, foreign.libraries
    run: Any = function
    if op is not None and os.environ.get("CUPYKERN_TUNE") == "1":
        run = tuned_at_first(op, function)

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        if args and args[0].__class__ in foreign_kinds:
            return foreign.call(call, args, kwargs)
        try:
            if is_watched():
                return look(run, args, kwargs)
            return run(*args, **kwargs)
        except (AttributeError, TypeError):
            check_complete(kwargs.get("config"))
            if not foreign.is_foreign(args, kwargs):
                raise
        return foreign.call(call, args, kwargs)

    call.__module__ = __package__
    return cast(Function, call)
