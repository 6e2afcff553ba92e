"""Configs and checks of skinny GEMMs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from products import DUAL, MATMUL, SCALED, array, compare, to_numpy

import cupykern
from cupykern import check, dtypes
from cupykern.arrays import address_of
from cupykern.gemm.skinny_gemm import SkinnyGemmConfig
from cupykern.op import as_tuple
from cupykern.ops.problems.products import FORMULAS, MatmulProblem, operand_values
from cupykern.ops.problems.scaled import ScaledProblem
from cupykern.targets import Target, host

E4M3, NVFP4 = "float8_e4m3fn", "float4_e2m1fn"


CONFIG = SkinnyGemmConfig(32, 128, 4, 3)


WIDE = SkinnyGemmConfig(64, 64, 2, 2)


MANY = replace(CONFIG, tile_k=64, rows=32)


FP32 = SkinnyGemmConfig(32, 32, 4, 3)
FP32_4 = replace(FP32, rows=4)


MISALIGNED = replace(CONFIG, tile_k=64)


def holds(op, problem, config, target, seed: int = 1) -> check.Comparison:
    call = op.inputs(problem, seed, target.xp)
    outputs = as_tuple(op.run(*call.args, **call.kwargs, config=config))
    references = op.reference(*call.args, **call.kwargs)
    bounds = op.bound(*call.args, **call.kwargs, reference=references)
    return check.compare(outputs, references, bounds)


def check_problem_of(m, n, k, dtype, dtype_b, layout_b, config, **options) -> None:
    """Raises AssertionError."""
    options = {"kind": "same_sign", **options}
    problem = MatmulProblem(m, n, k, dtype, dtype_b, layout_b=layout_b, **options)
    op = SCALED if dtype_b == NVFP4 else MATMUL
    problem = ScaledProblem(problem, "none") if dtype_b == NVFP4 else problem
    comparison = holds(op, problem, config, host.current())
    assert comparison.ok, f"{problem!r} {config}: {comparison}"


def check_formula(dtype_b: str) -> None:
    """Raises AssertionError.  Of all indices, with scales of rows and columns, or NVFP4's."""
    problem = MatmulProblem(5, 75, 576, "float16", dtype_b, layout_b="F", epilogue=FORMULAS[1])
    problem = ScaledProblem(problem, "none" if dtype_b == NVFP4 else "rows")
    comparison = holds(SCALED, problem, CONFIG, host.current())
    assert comparison.ok, f"{problem!r}: {comparison}"


def check_blocks(dtype: str, m: int, n: int = 300, k: int = 1168) -> None:
    """Raises AssertionError.  Scales of blocks, of several stages and blocks of columns.  m: if
    more than 16, a multiple of it."""
    problem = MatmulProblem(m, n, k, dtype, E4M3, layout_b="F", out_dtype="float32")
    config = replace(CONFIG, rows=8) if m <= 8 else CONFIG if m <= 16 else replace(MANY, rows=m)
    comparison = holds(SCALED, ScaledProblem(problem, "blocks"), config, host.current())
    assert comparison.ok, f"{problem!r}: {comparison}"


def check_dual(m: int, scales: str, target: Target | None = None) -> None:
    """Raises AssertionError.  silu(a @ b1) * (a @ b2) of e4m3 weights, with scales of columns
    ("rows") or blocks."""
    target = target or host.current()
    rng = np.random.default_rng(2)
    k, n, shape = 272, 72, {"rows": (1, 72), "blocks": (3, 1)}[scales]
    a = array(target, rng.standard_normal((m, k)), "float16")
    b1, b2 = (array(target, rng.standard_normal((k, n)), E4M3, "F") for _ in range(2))
    s1, s2 = (array(target, rng.uniform(0.5, 2, shape), "float32") for _ in range(2))
    options = {"scale_b1": s1, "scale_b2": s2, "out_dtype": "float32"}
    config = SkinnyGemmConfig(16, 64, 2, 2, rows=16 * -(-m // 16))
    y = cupykern.dual_gemm_silu(a, b1, b2, **options, config=config)
    comparison = compare(DUAL, a, b1, b2, outputs=y, **options)
    assert comparison.ok, f"{m} rows, {scales}: {comparison}"


def check_misaligned(m: int, n: int, k: int, layout_b: str) -> None:
    """Raises AssertionError.  NaN in the gaps between rows."""
    a = misaligned_rows(np, (m, k), "float16", 1 if layout_b == "F" else -k % 8, 1)
    b = (
        misaligned_rows(np, (n, k), "float16", 1, 2).T
        if layout_b == "F"
        else misaligned_rows(np, (k, n), "float16", 1, 2)
    )
    comparison = compare(MATMUL, a, b, config=MISALIGNED if layout_b == "F" else WIDE)
    assert comparison.ok, f"{m, n, k, layout_b}: {comparison}"


def misaligned_rows(xp, shape, dtype, gap: int, seed: int):
    """Rows with a gap behind each, NaN on all sides, the first one aligned to 16 bytes."""
    count, size = shape
    values = operand_values("same_sign", shape, dtypes.NAMES[dtype], seed)
    frame = xp.full(count * (size + gap) + 24, np.nan, values.dtype)
    first = 8 + -address_of(frame) // 2 % 8
    x = xp.lib.stride_tricks.as_strided(frame[first:], shape, (2 * (size + gap), 2))
    x[...] = xp.asarray(values)
    return x


def check_misaligned_epilogue(name: str) -> None:
    """Raises AssertionError.

    Columns by phases of alignment, whose bias or residual differs from column to column.
    """
    m, n, k = 5, 300, 329
    a, b = (misaligned_rows(np, shape, "float16", 1, i) for i, shape in enumerate(((m, k), (n, k))))
    addend = np.arange(m * n).reshape(m, n).astype(np.float32)
    addend = {"bias": addend[0], "residual": addend}[name]
    plain = to_numpy(cupykern.matmul(a, b.T, out_dtype="float32", config=MISALIGNED))
    y = cupykern.matmul(a, b.T, out_dtype="float32", config=MISALIGNED, **{name: addend})
    np.testing.assert_allclose(to_numpy(y), plain + addend, rtol=2.0**-22)
