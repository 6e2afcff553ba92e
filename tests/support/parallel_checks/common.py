"""What the checks of `cupykern.parallel` share.  Each is called on every rank of an MPI job."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from cupykern import parallel
from cupykern.check import compare

DTYPES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32))


def numbers(seed: int, *shape: int, dtype: Any = np.float16) -> np.ndarray:
    """The same on all ranks."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def shards(comm: parallel.Communicator, x: np.ndarray, axis: int) -> list[np.ndarray]:
    """Each rank's part, views."""
    parts = parallel.shares(x.shape[axis], comm.size)
    return [x[(slice(None),) * (axis % x.ndim) + (part,)] for part in parts]


def verify(outputs: Any, references: Any, bounds: Any, *, only_worst: bool = False) -> None:
    """Within the bounds; unless only_worst, errors are also as large as expected."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    found = compare(outputs, references, bounds)
    assert found.within_bound if only_worst else found.ok, found


def with_delays(
    comm: parallel.Communicator, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """The call's result, which is the same, bit for bit, whichever rank is slow."""
    plain, begin = function(*args, **kwargs), comm._exchange
    for slow in (0, comm.size - 1):

        def late(sends: Any, receives: Any, slow: int = slow) -> Any:
            if comm.rank == slow:
                time.sleep(0.01)
            return begin(sends, receives)

        comm._exchange = late
        try:
            again = function(*args, **kwargs)
        finally:
            comm._exchange = begin
        for x, y in zip(_arrays(plain), _arrays(again), strict=True):
            assert x.dtype == y.dtype and x.tobytes() == y.tobytes(), f"rank {slow} slow"
    return plain


def _arrays(outputs: Any) -> tuple[np.ndarray, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def raises(kind: type[Exception], call: Callable[[], Any]) -> str:
    """The message of the error that the call raises."""
    try:
        call()
    except kind as error:
        assert type(error) is kind, type(error)
        return str(error)
    raise AssertionError(f"no {kind.__name__}")
