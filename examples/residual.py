"""The residual of a least-squares solution in FP32: cupykern beside CuPy, time and error.

    python examples/residual.py --rows 16384 --columns 4096 --solutions 4096

The residual B - A X is small beside both, so that errors of the product show in its digits.
Without a GPU it runs on the CPU, where times are those of an emulation.
"""

from __future__ import annotations

import argparse

import numpy as np
from nearest_neighbours import timed

import cupykern
from cupykern import targets


def main() -> None:
    parser = argparse.ArgumentParser(description="Residuals B - A X in FP32.")
    for name, default in (("rows", 256), ("columns", 256), ("solutions", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    xp = targets.get().xp
    rng = xp.random.default_rng(0)
    a = rng.standard_normal((options.rows, options.columns), dtype=np.float32)
    x = rng.standard_normal((options.columns, options.solutions), dtype=np.float32)
    noise = rng.standard_normal((options.rows, options.solutions), dtype=np.float32)
    b = a @ x + np.float32(1e-3) * noise
    rows = slice(0, min(64, options.rows))
    exact = b[rows].astype(np.float64) - a[rows].astype(np.float64) @ x.astype(np.float64)
    print(f"({options.rows}, {options.columns}) @ ({options.columns}, {options.solutions})")
    print(f"{'':12} {'ms':>9} {'rms error / rms residual':>25}")
    ways = {
        xp.__name__: lambda: b - a @ x,
        "fma": lambda: cupykern.matmul(a, x, alpha=-1.0, residual=b, precision="fma"),
        "float32": lambda: cupykern.matmul(a, x, alpha=-1.0, residual=b),
    }
    for name, residual in ways.items():
        found, ms = timed(xp, residual)
        error = float(xp.sqrt(((found[rows] - exact) ** 2).mean() / (exact**2).mean()))
        print(f"{name:12} {ms:9.2f} {error:25.2e}")


if __name__ == "__main__":
    main()
