"""Kernels of the platform's words: `run` gives them arrays and what they have made of these."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from cupykern.kernels import Variant

F32, U32 = np.float32, np.uint32
FORMATS = {
    "half": (np.float16, np.uint16),
    "bf16": (ml_dtypes.bfloat16, np.uint16),
    "e4m3": (ml_dtypes.float8_e4m3fn, np.uint8),
    "e5m2": (ml_dtypes.float8_e5m2, np.uint8),
}


def run(target, text, *arrays, types=(), grid=1, threads=64, cluster=1, shared=0, waits=False):
    """Run `KERNEL void word(...)` on copies of the arrays; returns them."""
    variant = Variant("word", types, (), threads, cluster, text=text, waits=waits)
    here = [target.xp.asarray(x) for x in arrays]
    here = [x.copy() if target.name == "host" else x for x in here]
    target.compile(variant)(grid, tuple(here), shared)
    return [x if isinstance(x, np.ndarray) else x.get() for x in here]


# Written before the functions: the host's compilers otherwise contract a * b + c where they can, as
# those for GPUs do.
UNCONTRACTED = """
#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif
"""
