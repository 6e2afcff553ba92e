"""The ops over dask arrays: lazily, chunk by chunk, for arrays larger than memory and many GPUs.

    import cupykern.dask

    y = cupykern.dask.softmax(x)  # nothing runs yet
    y.sum().compute()

Functions of the same names and arguments as cupykern's, but for `out` and `config`, of dask arrays
whose chunks are numpy arrays (computed on the host target) or CuPy arrays (on their GPU).  The
first argument is a dask array; the others may be arrays too, which then travel with the graph.
Arguments are checked when the graph is built, with the errors of the plain ops; ValueError too for
chunks of unknown sizes.  Results have `_meta` of the chunks' kind and the result's dtype, and names
that follow from the arguments.

What must lie in one chunk is rechunked to one: the axis of softmax, the last one of norms and of
quantization by rows, tiles that a boundary would cut.  Other chunks stay as they are.

Each block of a result has the bits that the plain op gives for that block in C order, aligned to 64
bytes: blocks that lie otherwise, such as slices and transposes, are copied first, so that it does
not matter where a block comes from.
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
