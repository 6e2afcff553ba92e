"""Caches of plans.  This list has everything that a call keeps for later calls.

Two levels decide nothing and only save work:

- `remember` (calls).  Key: the function, every option with its type, and for every array its dtype,
  shape, strides, address modulo 64, device and distance to `out`.  Value: the plan, and the shape
  and dtype of the result.
- `cached` (plans).  Key: the target, the task (one frozen value, choice.py), and the config if the
  caller gives one.  Value: grid, shared memory, parameters, the loaded kernel.

Below them are resources, each keyed by its full content: loaded kernels by target and variant
(jit.py), tensor maps by all of their fields (targets/tensor_map.py), workspace by device and stream
(workspace.py).  `clear` empties both levels, and later calls compute the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from ..targets import tensor_map

MAX_PLANS = 4096
_clears: list[Callable[[], None]] = [tensor_map.forget]


def cached(function: Callable[..., Any]) -> Any:
    """`function`(target, task, given config) with a cache of MAX_PLANS results."""
    wrapped = lru_cache(maxsize=MAX_PLANS)(function)
    _clears.append(wrapped.cache_clear)
    return wrapped


def clear() -> None:
    """Forget every plan: the next calls choose their configs anew.  Loaded kernels stay."""
    for empty in _clears:
        empty()


Found = tuple[tuple[Any, ...] | None, Any, Any]
ALIGNMENT = 64  # bytes, the largest alignment that plans depend on
warm: dict[Any, Any] = {}  # what `remember` kept, by the key of `find`
_cuda = SimpleNamespace(runtime=None)  # CuPy's, set by the first `remember`


def find(
    call: tuple[Any, ...],
    out: Any,
    a: Any,
    b: Any = None,
    c: Any = None,
    d: Any = None,
    e: Any = None,
    f: Any = None,
    g: Any = None,
    *others: Any,
) -> tuple[tuple[Any, ...] | None, Any, Any]:
    """(key, value that `remember` kept for such a call or None, addresses of its arrays and out).

    call: the name of the function, and all arguments that are not arrays.  a to others, out: its
    arrays; all but a may be None.  A value is returned only if the arrays are on the current
    device.  The key is None for calls that are not kept: with arrays other than CuPy's (numpy's run
    on the host target, which has settings), or with unhashable arguments.

    The code for an array is repeated seven times: a loop or calls would double the time of this
    function, a tenth of a warm call.  A loop reads the others, which few calls have.
    """
    key: tuple[Any, ...]
    places: tuple[Any, ...]
    try:
        data = a.data
        at_a = data.ptr
        # _c_contiguous is faster to read than strides; if true, the shape determines
        # arrays.steps_of.
        steps = a._c_contiguous or a.strides
        device = data.device_id
        of_a = a.dtype, a.shape, steps, at_a % ALIGNMENT, device, a.__class__
        if b is None:
            of_b = at_b = None
        else:
            data = b.data
            at_b = data.ptr
            steps = b._c_contiguous or b.strides
            of_b = b.dtype, b.shape, steps, at_b % ALIGNMENT, data.device_id, b.__class__
        if c is None:
            of_c = at_c = None
        else:
            data = c.data
            at_c = data.ptr
            steps = c._c_contiguous or c.strides
            of_c = c.dtype, c.shape, steps, at_c % ALIGNMENT, data.device_id, c.__class__
        if d is None:
            of_d = at_d = None
        else:
            data = d.data
            at_d = data.ptr
            steps = d._c_contiguous or d.strides
            of_d = d.dtype, d.shape, steps, at_d % ALIGNMENT, data.device_id, d.__class__
        if e is None:
            of_e = at_e = None
        else:
            data = e.data
            at_e = data.ptr
            steps = e._c_contiguous or e.strides
            of_e = e.dtype, e.shape, steps, at_e % ALIGNMENT, data.device_id, e.__class__
        if f is None:
            of_f = at_f = None
        else:
            data = f.data
            at_f = data.ptr
            steps = f._c_contiguous or f.strides
            of_f = f.dtype, f.shape, steps, at_f % ALIGNMENT, data.device_id, f.__class__
        if g is None:
            of_g = at_g = None
        else:
            data = g.data
            at_g = data.ptr
            steps = g._c_contiguous or g.strides
            of_g = g.dtype, g.shape, steps, at_g % ALIGNMENT, data.device_id, g.__class__
        if out is None:
            key = _same_call(*call), of_a, of_b, of_c, of_d, of_e, of_f, of_g
            places = at_a, at_b, at_c, at_d, at_e, at_f, at_g
        else:
            data = out.data
            at = data.ptr
            steps = out._c_contiguous or out.strides
            of_out = out.dtype, out.shape, steps, at % ALIGNMENT, data.device_id, out.__class__
            key = (
                _same_call(*call), of_a, of_b, of_c, of_d, of_e, of_f, of_g, of_out,
                at_a - at,  # the distances determine overlaps
                None if at_b is None else at_b - at,
                None if at_c is None else at_c - at,
                None if at_d is None else at_d - at,
                None if at_e is None else at_e - at,
                None if at_f is None else at_f - at,
                None if at_g is None else at_g - at,
            )  # fmt: skip
            places = at_a, at_b, at_c, at_d, at_e, at_f, at_g, at
        if others:
            parts: list[Any] = []
            more: list[int | None] = []
            for x in others:
                if x is None:
                    parts.append(None)
                    more.append(None)
                    continue
                data = x.data
                at_x = data.ptr
                steps = x._c_contiguous or x.strides
                parts.append(
                    (x.dtype, x.shape, steps, at_x % ALIGNMENT, data.device_id, x.__class__)
                )
                more.append(at_x)
                if out is not None:
                    parts.append(at_x - at)
            key += tuple(parts)
            places = places, tuple(more)
        known = _warm_get(key)
        # Rare: another device is current.  The call then takes the path with all checks.
        if known is not None and device != _cuda.runtime.getDevice():
            known = None
        return key, known, places
    except (AttributeError, TypeError, ValueError):  # not CuPy arrays; numpy's x.data
        return None, None, None


@lru_cache(maxsize=MAX_PLANS, typed=True)
def _same_call(*call: Any) -> object:
    """The same object for equal arguments of the same types.

    1, 1.0 and True are equal, but an argument can allow only some of them.
    """
    return object()


_clears += [warm.clear, _same_call.cache_clear]
_warm_get = warm.get


def distance(a: Any, b: Any) -> int | None:
    """The bytes from b to a, for a key: they determine whether the arrays overlap.

    None unless the arrays are CuPy's: such calls have no key.
    """
    try:
        found: int = a.data.ptr - b.data.ptr
        return found
    except (AttributeError, TypeError, ValueError):  # as in `find`
        return None


def recall(key: tuple[Any, ...] | None) -> Any:
    """The value that `remember` kept under `key`, or None."""
    return None if key is None else warm.get(key)


def remember(key: tuple[Any, ...] | None, known: Any) -> None:
    """Keep `known` for calls with this key of `find`; do nothing if it is None."""
    if key is not None:
        from cupy.cuda import runtime

        _cuda.runtime = runtime
        if len(warm) >= MAX_PLANS:
            warm.clear()
        warm[key] = known
