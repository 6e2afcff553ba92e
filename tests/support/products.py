"""Products to test: their operands, run and compared with FP64 within their bounds."""

from __future__ import annotations

import numpy as np

import cupykern
from cupykern import OPS, check, dtypes
from cupykern.numerics import as_float64
from cupykern.op import as_tuple
from cupykern.ops.problems.products import operand_values, with_layout

MATMUL, SCALED, DUAL = (
    next(op for op in OPS if op.name == name) for name in ("matmul", "scaled_mm", "dual_gemm_silu")
)
FP8 = ("float8_e4m3fn", "float8_e5m2")
SIXTEEN = ("float16", "bfloat16")


def to_numpy(x) -> np.ndarray:
    x = as_float64(x)
    return x if isinstance(x, np.ndarray) else x.get()


def array(target, values, dtype: str, layout: str = "C"):
    kind = dtypes.NAMES.get(dtype, dtype)  # integers and booleans have numpy's names
    return with_layout(np.asarray(values).astype(kind), layout, target.xp)


def random(target, shape, dtype: str, seed: int, kind: str = "normal"):
    x = operand_values(kind, shape, dtypes.NAMES[dtype], seed)
    return with_layout(x, "C", target.xp)


def compare(op, *args, outputs=None, **kwargs) -> check.Comparison:
    if outputs is None:
        outputs = op.run(*args, **kwargs)
    references = op.reference(*args, **kwargs)
    bounds = op.bound(*args, **kwargs, reference=references)
    return check.compare(as_tuple(outputs), references, bounds)


def check_problem(op, problem, target, seed: int = 1) -> None:
    comparison = check.check_problem(op, problem, seed, target.xp)
    assert comparison.ok, f"{problem!r}: {comparison}"


def check_fp8_sums_of_128(target, dtype, dtype_b):
    """sum |a b| <= 2^13 in every 128 of k; of 512, of one sign, tensor cores would lose bits."""
    rng = np.random.default_rng(2)
    for least in (-8, 7):
        values = [rng.integers(least, 9, shape) for shape in ((70, 1040), (1040, 40))]
        x, y = (
            array(target, v, name, layout)
            for v, name, layout in zip(values, (dtype, dtype_b), "CF", strict=True)
        )
        product = cupykern.scaled_mm(x, y, out_dtype="float32")
        np.testing.assert_array_equal(to_numpy(product), values[0] @ values[1])
