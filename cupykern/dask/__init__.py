"""Ops on dask arrays: lazy, chunk by chunk, for arrays larger than memory and for many GPUs.

    import cupykern.dask

    y = cupykern.dask.softmax(x)  # nothing runs yet
    y.sum().compute()

The functions (those in `__all__`) have the names and arguments of cupykern's, without `out` and
`config`; matmul also has `split_every`.  Chunks are numpy
arrays (computed on the host target) or CuPy arrays (computed on their GPU).  The first argument is
a dask array; other arguments may also be plain arrays, which are embedded in the graph.  Arguments
are checked when the graph is built, with the errors of the plain ops; chunks of unknown sizes raise
ValueError.  Results have a `_meta` of the chunks' kind and the result's dtype, and deterministic
names.

Dims that an op needs in one chunk are rechunked: the axis of softmax, the last axis of norms and of
row-wise quantization, and chunk boundaries inside quantization tiles.  Other chunks are kept.

Each block of a result is bitwise the plain op's result for that block in C order, aligned to 64
bytes.  Other blocks, e.g. slices and transposes, are copied first, so that bits do not depend on
the memory layout.
"""

from __future__ import annotations

from .products import matmul
from .quantization import quantize, quantize_nvfp4
from .rows import layer_norm, log_softmax, nonfinite_report, rms_norm, softmax

__all__ = [
    "layer_norm",
    "log_softmax",
    "matmul",
    "nonfinite_report",
    "quantize",
    "quantize_nvfp4",
    "rms_norm",
    "softmax",
]
