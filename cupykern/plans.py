"""Plans of launches.  Everything that one call keeps for later ones is listed here.

Two levels decide nothing and only save work:

| cache | key | value |
| --- | --- | --- |
| `remember` (calls) | function, every option with its type, and of every array dtype, shape, strides, address modulo 64, device, distance to `out` | the plan, and the shape and dtype of the result |
| `cached` (plans) | the target, the task (one frozen value, choice.py), the config if the caller gives one | grid, shared memory, parameters, the loaded kernel |

Below them lie resources, each by its whole content: loaded kernels by target and variant (jit.py), tensor
maps by all of their fields (targets/tensor_map.py), workspace by device and stream (workspace.py).
`clear` empties both levels.  A call after it computes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from .typing import Array

MAX_PLANS = 4096
_clears: list[Callable[[], None]] = []


def cached(function: Callable[..., Any]) -> Any:
    """`function` of a target, a task and a given config, with a cache of MAX_PLANS results."""
    wrapped = lru_cache(maxsize=MAX_PLANS)(function)
    _clears.append(wrapped.cache_clear)
    return wrapped


def table() -> dict[Any, Any]:
    """A new dictionary that `clear` empties."""
    made: dict[Any, Any] = {}
    _clears.append(made.clear)
    return made


def clear() -> None:
    """Forget every plan: the next calls choose their configs anew.  Loaded kernels stay."""
    for empty in _clears:
        empty()


Found = tuple[tuple[Any, ...] | None, Any, Any]
_ALIGNMENT = 64  # bytes, the most that a plan asks about an address
_warm = table()
_cuda = SimpleNamespace(runtime=None)  # CuPy's, once there is something to find


def finder(function: str, arrays: int, options: int, either: int = 0) -> Callable[..., Found]:
    """find(*arrays, *either, *options, out): (key, what `remember` kept for a call like this, or None, where
    the arrays, what is either and out lie, None for what is none).

    arrays: how many arguments are arrays, the first of which is always given, others may be None.
    either: how many are arrays, numbers or None.  options: how many others there are.  What is found is
    for launches on the current device, where the arrays are.  The key is None for calls that are not
    kept: those on arrays other than CuPy's (numpy's run on the host target, which has settings), and
    those with options that cannot be hashed.

    Written for these numbers of arguments: a loop over them would take longer than what it does.
    """
    places = [f"x{i}" for i in range(arrays + either)]
    others = [f"o{i}" for i in range(options)]
    lines = [f"def find({', '.join((*places, *others))}, out=None):", " try:"]
    for i, x in enumerate(places):
        if i >= arrays:
            lines += [f"  if {x} is None or isinstance({x}, numbers):"]
            lines += [f"   k{x} = {x}, {x}.__class__", f"   p{x} = None", "  else:"]
        else:
            lines += [f"  if {x} is None: k{x} = p{x} = None", "  else:"]
        lines += [
            f"   d = {x}.data",
            f"   p{x} = d.ptr",
            # Faster than strides; of C-contiguous arrays arrays.steps_of follows from the shape.
            f"   k{x} = ({x}.dtype, {x}.shape, {x}._c_contiguous or {x}.strides,"
            f" p{x} % {_ALIGNMENT}, d.device_id, {x}.__class__)",
        ]
    # 1, 1.0 and True are equal, but not all of them are legal everywhere.
    keys = [f"k{x}" for x in places] + [f"{o}, {o}.__class__" for o in others]
    lines += [
        f"  key = (function, {', '.join(keys)})",
        "  start = None",
        "  if out is not None:",  # whose overlaps follow from the distances
        "   d = out.data",
        "   start = d.ptr",
        f"   key += (out.dtype, out.shape, out._c_contiguous or out.strides, start % {_ALIGNMENT}, d.device_id,"
        " out.__class__,",
        *(f"    0 if p{x} is None else p{x} - start," for x in places),
        "   )",
        "  known = get(key)",
        # Rare: on another device for a while, after all checks.
        "  if known is not None and kx0[4] != cuda.runtime.getDevice(): known = None",
        f"  return key, known, ({', '.join(f'p{x}' for x in places)}, start)",
        " except (AttributeError, TypeError, ValueError):",  # no CuPy arrays; numpy's x.data
        "  return None, None, None",
    ]
    scope: dict[str, Any] = {
        "get": _warm.get,
        "function": function,
        "numbers": (int, float),
        "cuda": _cuda,
    }
    exec(compile("\n".join(lines), f"{__file__}, find of {function}", "exec"), scope)
    return scope["find"]


@lru_cache
def _finder(function: str, arrays: int, options: int) -> Callable[..., Found]:
    return finder(function, arrays, options)


def find(
    function: str, arrays: Sequence[Any], options: tuple[Any, ...], out: Array | None = None
) -> Found:
    """As finder's, for numbers of arrays and options that are not always the same."""
    return _finder(function, len(arrays), len(options))(*arrays, *options, out)


def recall(key: tuple[Any, ...] | None) -> Any:
    """What `remember` kept under `key`, or None."""
    return None if key is None else _warm.get(key)


def remember(key: tuple[Any, ...] | None, known: Any) -> None:
    """Keep `known` for calls whose key `find` gave; None: for none."""
    if key is not None:
        from cupy.cuda import runtime

        _cuda.runtime = runtime
        if len(_warm) >= MAX_PLANS:
            _warm.clear()
        _warm[key] = known
