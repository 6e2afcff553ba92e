"""Tuning: the fastest config of a call, measured once and kept in the store (runtime/store.py)."""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any

from .. import targets
from ..op import Call, Op
from ..ops import OPS
from ..ops.nonfinite_report import is_capturing
from ..runtime import choice, store


def find_op(op: Any) -> Op:
    """An Op by itself, its name or its function.  Raises TypeError and ValueError."""
    if isinstance(op, Op):
        return op
    if not isinstance(op, str) and not callable(op):
        raise TypeError(f"op must be an op's function or name; got {type(op).__name__}")
    function = None if isinstance(op, str) else inspect.unwrap(op)
    name = op if isinstance(op, str) else op.__name__
    for known in OPS:
        if known.run is function or known.name == name:
            return known
    names = ", ".join(known.name for known in OPS)
    raise ValueError(f"op must be one of {names}; got {name!r}")


def tune(op: Any, *inputs: Any, **options: Any) -> str:
    """Measure every config that the call op(*inputs, **options) admits, and keep the fastest.

    >>> x = np.ones((4, 64), np.float32)
    >>> config = cupykern.tune(cupykern.quantize_nvfp4, x)  # of few configs
    >>> config.startswith("NvFp4Config(")
    True

    op: a function of cupykern or its name.  inputs, options: its arguments.  They are read, not
    written: `out` is left out, the results are thrown away.

    Returns the fastest config, as text: the default unless another one was at least 2% faster.  It
    is kept for calls of the same dtypes and kind of layout on this device, whose sizes round up to
    the same eighths (choice.bucket), in this process and those to come (CUPYKERN_TUNE=0: they do
    not look), until the kernels' source changes.  Each config is verified against FP64 before it
    counts.

    Takes seconds, most of them compiling, and waits for another benchmark's end; not to be called
    while a stream is captured.  Raises what the call raises, TypeError and ValueError for an
    unknown op, RuntimeError where no config is right, OSError where the file cannot be written.
    """
    from . import protocol, sweep, winners

    found = find_op(op)
    call = Call(inputs, {k: v for k, v in options.items() if k not in ("out", "config")})
    arrays = [x for x in (*inputs, *options.values()) if hasattr(x, "__array_interface__")
              or targets.is_cupy(x)]  # fmt: skip
    if not arrays:
        raise TypeError(f"inputs must hold the arrays of a call of {found.name}")
    target = targets.of_array(arrays[0])
    request = sweep.first_request(found, call)
    if request is None:  # of size 0, say
        return repr(None)
    with protocol.lock(wait=True):
        _, best = winners.tune_request(found, call, request, target, winners.SETTINGS)
    return best.config


# --- CUPYKERN_TUNE=1 -----------------------------------------------------------------------------

_busy = threading.local()


def tuned_at_first(op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose first call of each kind that the store lacks tunes it afterwards.

    Not while the stream is captured, nor for calls with a config of their own.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("config") is not None or getattr(_busy, "tuning", False):
            return function(*args, **kwargs)
        with choice.recording() as requests:
            outputs = function(*args, **kwargs)
        known = store.find(requests[0].key) if requests else None
        if requests and (known is None or known["digest"] != requests[0].digest):
            _tune_quietly(op, requests[0], args, kwargs)
        return outputs

    return call


def _tune_quietly(
    op: Op, request: choice.Request, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    from . import protocol, winners
    from .sweep import ContextLost

    if is_capturing(request.target) or len(request.configs()) < 2:
        return
    options = {name: value for name, value in kwargs.items() if name != "out"}
    _busy.tuning = True
    try:
        with protocol.lock(wait=False):
            winners.tune_request(op, Call(args, options), request, request.target, winners.SETTINGS)
    except ContextLost:
        raise
    except targets.UnavailableError:  # another benchmark runs: the next process will tune
        pass
    except (RuntimeError, OSError) as error:
        warnings.warn(f"{op.name} was not tuned: {error}", RuntimeWarning, stacklevel=4)
    finally:
        _busy.tuning = False
