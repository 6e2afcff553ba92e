"""Every precision of FP32 products beside the array library: time, rms and largest error.

    python examples/precisions.py --size 4096

Errors are relative to abs(a) @ abs(b), against FP64, for inputs of four kinds.  Without a GPU it
runs on the CPU, where times are those of an emulation.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from nearest_neighbours import timed

import cupykern
from cupykern import targets

PRECISIONS = ("float32", "fma", "fp16x3", "bf16x9", "bf16x6", "bf16x3", "tf32")


def normal(xp: Any, rng: Any, shape: tuple[int, int]) -> Any:
    return rng.standard_normal(shape, dtype=np.float32)


def same_sign(xp: Any, rng: Any, shape: tuple[int, int]) -> Any:
    return rng.random(shape, dtype=np.float32)


def badly_scaled(xp: Any, rng: Any, shape: tuple[int, int]) -> Any:
    """Exponents from -60 to 60, so that products span 240 of FP32's 254 exponents."""
    exponents = rng.random(shape, dtype=np.float32) * 120 - 60
    return normal(xp, rng, shape) * xp.exp2(exponents)


def operands(xp: Any, n: int) -> Iterator[tuple[str, Any, Any]]:
    rng = xp.random.default_rng(0)
    for make in (normal, same_sign, badly_scaled):
        yield make.__name__, make(xp, rng, (n, n)), make(xp, rng, (n, n))
    # The second half of K cancels the first but for 2^-12 of it.
    a, b = normal(xp, rng, (n, n // 2)), normal(xp, rng, (n // 2, n))
    yield "cancelling", xp.hstack((a, -a)), xp.vstack((b, b * np.float32(1 + 2.0**-12)))


def errors(xp: Any, found: Any, a: Any, b: Any) -> tuple[float, float]:
    """rms and largest."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    ratio = abs(found - a @ b) / (abs(a) @ abs(b))
    return float(xp.sqrt((ratio**2).mean())), float(ratio.max())


def main() -> None:
    parser = argparse.ArgumentParser(description="Precisions of FP32 products.")
    parser.add_argument("--size", type=int, default=256)
    n = parser.parse_args().size
    xp = targets.get().xp
    ways: dict[str, Callable[[Any, Any], Any]] = {xp.__name__: lambda a, b: a @ b}
    for precision in PRECISIONS:
        ways[precision] = lambda a, b, p=precision: cupykern.matmul(a, b, precision=p)
    for kind, a, b in operands(xp, n):
        print(f"{kind}, {n} cubed")
        print(f"{'':12} {'ms':>9} {'rms error':>10} {'largest':>10}")
        for name, product in ways.items():
            found, ms = timed(xp, lambda p=product, a=a, b=b: p(a, b))
            rms, largest = errors(xp, found, a, b)
            print(f"{name:12} {ms:9.2f} {rms:10.1e} {largest:10.1e}")


if __name__ == "__main__":
    main()
