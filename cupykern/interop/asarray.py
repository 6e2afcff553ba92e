"""asarray: any array or numbers as an array of a dtype on a target."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import dtypes, targets
from ..arrays import ONE_BYTE
from ..typing import Array, DTypeLike
from .foreign import native


def asarray(x: Any, dtype: DTypeLike | None = None, target: str | None = None) -> Array:
    """x (an array or nested sequence of numbers) as an array of `dtype` on `target`.

    >>> cupykern.asarray([0.1, 300.0, 500.0], "float8_e4m3fn", target="host").astype(float).tolist()
    [0.1015625, 288.0, nan]

    dtype None: x's.  An array of another library (torch, JAX, DLPack) that is on `target` and of
    `dtype` becomes a cupy or numpy array of the same memory.  Numbers are rounded to nearest even
    by numpy and ml_dtypes on the host: beyond the format's largest number they become infinity, or
    NaN where it has none (float8_e4m3fn).  To int8 and int32 they are cast as by numpy, towards
    zero and without a limit: `quantize` rounds.
    Raises TypeError (dtype), ValueError (target's name), targets.UnavailableError.
    """
    xp = targets.get(target).xp
    x = native("x", x)
    if targets.is_cupy(x):
        if xp is not np and (dtype is None or x.dtype == dtype):
            return x
        x = x.get()
    x = np.asarray(x)
    dtype = x.dtype if dtype is None else dtype
    dtype = dtypes.resolve(dtype, "dtype", tuple(dtypes.NAMES.values()))
    x = np.asarray(x, dtype)
    if dtype in ONE_BYTE and xp is not np:
        return xp.asarray(np.ascontiguousarray(x).view(np.uint8)).view(dtype)
    return xp.asarray(x)
