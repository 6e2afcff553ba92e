"""Brute-force nearest neighbours of FP32 vectors: cupykern beside CuPy, time and error.

    python examples/nearest_neighbours.py --queries 8192 --vectors 65536 --dim 1024

Each query is a vector with a little noise, whose nearest neighbour is therefore known.  Without a
GPU it runs on the CPU, where times are those of an emulation.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import cupykern
from cupykern import targets


def timed(xp: Any, function: Callable[[], Any]) -> tuple[Any, float]:
    """(the result, the median of five times in ms)."""
    times = []
    for _ in range(6):  # the first compiles
        start = time.perf_counter()
        result = function()
        if xp is not np:
            xp.cuda.get_current_stream().synchronize()
        times.append(time.perf_counter() - start)
    return result, 1e3 * float(np.median(times[1:]))


def distances(queries: Any, vectors: Any, precision: str | None) -> Any:
    """Squared, but for the queries' norms; precision None: by the array library."""
    norms = (vectors * vectors).sum(1)
    if precision is None:
        return norms - 2 * (queries @ vectors.T)
    return cupykern.matmul(queries, vectors.T, alpha=-2.0, bias=norms, precision=precision)


def main() -> None:
    parser = argparse.ArgumentParser(description="Nearest neighbours of FP32 vectors.")
    for name, default in (("queries", 256), ("vectors", 512), ("dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    xp = targets.get().xp
    rng = xp.random.default_rng(0)
    vectors = rng.standard_normal((options.vectors, options.dim), dtype=np.float32)
    own = xp.arange(options.queries) % options.vectors
    noise = rng.standard_normal((options.queries, options.dim), dtype=np.float32)
    queries = vectors[own] + noise * np.float32(1e-3)
    sample = slice(0, min(64, options.queries))
    exact = distances(queries[sample].astype(np.float64), vectors.astype(np.float64), None)
    print(f"{options.queries} queries, {options.vectors} vectors of {options.dim}")
    print(f"{'':12} {'ms':>9} {'largest error':>14} {'found':>7}")
    for name, precision in ((xp.__name__, None), ("fma", "fma"), ("float32", "float32")):
        found, ms = timed(xp, lambda p=precision: distances(queries, vectors, p))
        error = float(abs(found[sample] - exact).max())
        share = float((found.argmin(1) == own).mean())
        print(f"{name:12} {ms:9.2f} {error:14.2e} {share:7.1%}")


if __name__ == "__main__":
    main()
