"""Problems that reach all kernels of an op: rows for a warp up to a cluster, skinny products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...op import Op, RandomDraw
from ...targets import Target

_ROWS = ((64, 1024), (16, 4096), (4, 65536), (2, 262144))  # from a warp to a cluster
_PRODUCTS = ((256, 256, 256), (300, 520, 264), (64, 512, 512), (16, 512, 512), (1, 512, 512))
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "softmax": _ROWS,
    "log_softmax": _ROWS,
    "layer_norm": _ROWS,
    "rms_norm": _ROWS,
    "add_rms_norm": _ROWS,
    "quantize": _ROWS[:2],
    "quantize_nvfp4": ((256, 512),),
    "nonfinite_report": ((256, 1024), (1024, 1024)),
    "matmul": (*_PRODUCTS, (2048, 2048, 128), (128, 256, 4096), (128, 128, 16384)),
    "complex_matmul": _PRODUCTS,
    "scaled_mm": (*_PRODUCTS, (2048, 2048, 128), (4096, 2048, 128)),
    "dual_gemm_silu": (*_PRODUCTS[::3], (1024, 512, 256)),
    "dequant_softmax": ((1, 2048, 256), (16, 2048, 256), (256, 2048, 256), (4, 32768, 128)),
    "attention": ((1, 2, 256, 64), (1, 2, 256, 128, 1), (1, 2, 300, 256), (1, 2, 512, 128, 2)),
    "attention_varlen": ((2, 2, 200, 128), (2, 2, 200, 128, 1)),
    "decode_attention": ((1, 8, 2, 512, 128), (2, 8, 8, 300, 128)),
    "cascade_attention": ((4, 8, 2, 600, 128, 128), (96, 8, 2, 300, 40, 64)),
    "merge_attention": ((256, 32, 128), (2, 4, 300, 64)),
    "rope_and_cache": ((1, 2048, 32, 8, 128), (2, 300, 14, 2, 64), (16, 1, 8, 4, 256)),
}
"""Shapes for `Op.bench_problem`, used with all dtypes of the op.  Others: the host's own."""
OTHERS = {"matmul": (((4096, 2048, 128), "float16*int8"),)}
"""(shape, dtype) of dtypes that the op's benchmarks do not have: weights converted first."""


def large(op: Op) -> Iterator[Any]:
    """Yield the op's problems of SHAPES, one dtype after the other."""
    for dtype in op.dtypes:
        for shape in SHAPES.get(op.name) or op.bench_shapes("host"):
            try:
                yield op.bench_problem(shape, dtype)
            except (ValueError, TypeError):  # a K that the dtype does not support
                continue
    for shape, dtype in OTHERS.get(op.name, ()):
        yield op.bench_problem(shape, dtype)


def problems(op: Op, target: Target, count: int, seed: int) -> list[Any]:
    """Return `count` problems that write results; on a GPU half are from SHAPES, half drawn."""
    found = [] if target.name == "host" else list(large(op))
    step = max(1, 2 * len(found) // count)
    found = found[::step][: count // 2]
    while len(found) < count:
        problem = op.draw_problem(RandomDraw(seed))
        seed += 1
        if op.work(problem).bytes_written:
            found.append(problem)
    return found
