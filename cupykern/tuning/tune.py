"""Tuning: measure the fastest config of a call once and keep it in the store (runtime/store.py)."""

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
    """Return the Op for an Op, its name or its function.  Raises TypeError and ValueError."""
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
    """Measure every legal config of the call op(*inputs, **options), and keep the fastest.

    >>> x = np.ones((4, 64), np.float32)
    >>> config = cupykern.tune(cupykern.quantize_nvfp4, x)  # of few configs
    >>> config.startswith("NvFp4Config(")
    True

    op: a function of cupykern or its name.  inputs, options: its arguments.  They are only read;
    `out` is ignored, and the results are discarded.

    Returns the fastest config as text: the default, unless another config is at least 2% faster.
    The config is kept until the kernels' source changes.  It applies to calls on this device with
    the same dtypes and kind of layout whose sizes fall into the same class (four classes per factor
    of 2), in this process and later ones (except with CUPYKERN_TUNE=0).  Each config is verified
    against FP64 first.

    Takes seconds, mostly for compilation, and waits for other benchmarks to end.  Do not call it
    during stream capture.  Raises what the call raises, TypeError and ValueError for an unknown op,
    RuntimeError if no config is right, OSError if the file cannot be written.
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
    if request is None:  # for example, size 0
        return repr(None)
    with protocol.lock(wait=True):
        _, best = winners.tune_request(found, call, request, target, winners.SETTINGS)
    return best.config


# --- CUPYKERN_TUNE=1 -----------------------------------------------------------------------------

_busy = threading.local()


def tuned_at_first(op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function`: the first call of each kind that the store lacks is tuned after it has run.

    Calls during stream capture, or with an explicit config, are not tuned.
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
