"""asarray: convert any array or numbers to an array of a dtype on a target."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import dtypes, targets
from ..arrays import ONE_BYTE
from ..typing import Array, DTypeLike
from .foreign import native


def asarray(x: Any, dtype: DTypeLike | None = None, target: str | None = None) -> Array:
    """Convert x (an array or nested sequence of numbers) to an array of `dtype` on `target`.

    >>> cupykern.asarray([0.1, 300.0, 500.0], "float8_e4m3fn", target="host").astype(float).tolist()
    [0.1015625, 288.0, nan]

    dtype: by name or dtype; None: x's.
    target: as in `empty`.

    An array of another library (torch, JAX, DLPack) that is on `target` and has `dtype` becomes a
    cupy or numpy array of the same memory.  Numbers are rounded to nearest even, by numpy and
    ml_dtypes on the host.  Beyond the format's largest number they become infinity, or NaN if the
    format has none (float8_e4m3fn).  int8 and int32 are cast like numpy, towards zero and without
    saturation; `quantize` rounds.
    Raises TypeError (dtype), ValueError (target's name), targets.UnavailableError.
    """
    xp = targets.get(target).xp
    x = native("x", x)
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError("x must not be a masked array: its mask would be lost")
    if targets.is_cupy(x):
        if xp is not np and (dtype is None or x.dtype == dtype):
            return x
        x = x.get()
    x = np.asarray(x)
    dtype = x.dtype if dtype is None else dtype
    dtype = dtypes.resolve(dtype, "dtype", dtypes.OF_ARRAYS)
    x = np.asarray(x, dtype)
    if dtype in ONE_BYTE and xp is not np:
        return xp.asarray(np.ascontiguousarray(x).view(np.uint8)).view(dtype)
    return xp.asarray(x)
