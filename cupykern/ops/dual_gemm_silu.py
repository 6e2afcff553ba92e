"""dual_gemm_silu: the gated half of a feed-forward layer, silu(a @ b1) * (a @ b2), in one pass."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from .. import arguments, dtypes, reference
from ..gemm import gemm, launch
from ..gemm.gemm import AnyConfig
from ..nvfp4 import NvFp4
from ..op import Op
from ..runtime import plans
from ..targets import Target
from ..typing import Array, Factor, FormulaLike, Operands, Precision, ResultDTypes, Results
from .checks.formulas import NO_FORMULA, ReadFormula, each_dtype, read_formula
from .checks.gates import POLICIES, SILU, check_float32, gate_shape, result_dtype
from .checks.products import check_precision
from .checks.scales import (
    arrays_and_numbers,
    blocked_groups,
    check_scales,
    product_of_scales,
    read_operand,
    same_memory,
)
from .problems import dual_gemm as problems


def dual_gemm_silu(
    a: Array | NvFp4,
    b1: Array | NvFp4,
    b2: Array | NvFp4,
    *,
    scale_a: Factor | None = None,
    scale_b1: Factor | None = None,
    scale_b2: Factor | None = None,
    policy: Literal["fp32", "hybrid", "fp16"] = "fp32",
    out_dtype: ResultDTypes = None,
    out: Array | None = None,
    precision: Precision = "float32",
    config: AnyConfig | None = None,
    epilogue: FormulaLike | None = None,
    operands: Operands | None = None,
) -> Results:
    """silu((scale_a * a) @ (scale_b1 * b1)) * ((scale_a * a) @ (scale_b2 * b2)),
    with silu(x) = x sigmoid(x)

    >>> a = np.array([[1.0, 2.0]], np.float16)
    >>> gate, up = np.eye(2, dtype=np.float16), np.ones((2, 2), np.float16)
    >>> cupykern.dual_gemm_silu(a, gate, up).round(2).astype(float).round(2).tolist()
    [[2.19, 5.28]]
    >>> cupykern.dual_gemm_silu(a, gate, up, epilogue="maximum(acc1, 0) * acc2 + j").tolist()
    [[3.0, 7.0]]

    a: (..., M, K), b1 and b2: (..., K, N) of one dtype; batches broadcast.  dtypes, one of:
        all float16, all bfloat16 or all float32;
        a float32 and b1, b2 float16 or bfloat16, or the reverse;
        a pair of `scaled_mm`: all FP8, all int8, a float16 or bfloat16 and b1, b2 FP8, int8 or
        NvFp4, or all NvFp4.
    scale_a, scale_b1, scale_b2: as scale_a and scale_b of `scaled_mm`; None: 1.
    policy: precision of the epilogue.  "fp32": FP32 up to the result.  "hybrid": SiLU in FP32, its
        product with the other accumulator in FP16, which gives NaN where silu rounds to 0 and the
        other accumulator is beyond 65504.  "fp16": every operation in FP16, so that a gate
        accumulator below -65504 gives NaN and one below -11.1 gives 0.
    out_dtype: float16, bfloat16 or float32.  None: float32 if an operand is float32, else a's dtype
        for float16 and bfloat16, else float16.  For a formula's results as for `matmul`, 8-bit
        dtypes included.
    out: array to write into, of the result's shape and dtype; must not overlap an operand.
    precision: of float32 operands, as for `matmul`.
    config: a GemmConfig, a SkinnyGemmConfig or one of Hopper's dual GEMM configs; for float32
        operands a config of `matmul`, used for both products.  None: the tuned one, else the
        estimated fastest.
    epilogue: another gate in place of silu(acc1) * acc2, with policy "fp32": a formula of acc1 and
        acc2, the scaled products of b1 and b2; see `expression`, kind "gate".  A tuple gives
        several results, as for `matmul`.
    operands: named operands of the formula, at most 7, as for `matmul`.

    Returns (..., M, N).  Neither product is written to memory: a block computes the same tile of
    both.  Accumulators are FP32, for int8 exact int32.  Layouts and copies as for `scaled_mm`; b1
    and b2 of different layouts are read by scalar loads.  float32 operands take no scales and only
    policy "fp32"; they run as two products, the second with the gate as its epilogue.

    Raises TypeError (types, dtypes), ValueError (shapes, overlap, scales, policy, config, devices),
    NotImplementedError (float64), SyntaxError and NameError (epilogue).  Error bound:
    `reference.dual_gemm_silu_bound`.
    """
    formula, place = NO_FORMULA, a.data if isinstance(a, NvFp4) else a
    if epilogue is not None or operands is not None:
        formula = read_formula(epilogue, operands, place, "gate")
    if any(isinstance(x, NvFp4) for x in (a, b1, b2)):
        arrays, numbers = arrays_and_numbers(a=(a, scale_a), b=(b1, scale_b1), b2=(b2, scale_b2))
        names, given = tuple(arrays), tuple(arrays.values())
        call = ("dual_gemm_silu", names, *numbers, policy, out_dtype, precision, config)
    else:
        names = ("a", "b", "b2", "scale_a", "scale_b", "scale_b2")
        array_a = None if scale_a is None or isinstance(scale_a, (int, float)) else scale_a
        array_b = None if scale_b1 is None or isinstance(scale_b1, (int, float)) else scale_b1
        array_b2 = None if scale_b2 is None or isinstance(scale_b2, (int, float)) else scale_b2
        number_a = scale_a if array_a is None else None
        number_b = scale_b1 if array_b is None else None
        number_b2 = scale_b2 if array_b2 is None else None
        given = a, b1, b2, array_a, array_b, array_b2
        numbers = number_a, number_b, number_b2
        call = ("dual_gemm_silu", *numbers, policy, out_dtype, precision, config)
    given = *given, *formula.arrays
    key, known, _ = plans.find((*call, *formula.key), out, *given)
    if known is not None:
        return launch.launch_known(known, given, out)
    target = arguments.target_of("a", place)
    pairs = (("a", a, scale_a), ("b1", b1, scale_b1), ("b2", b2, scale_b2))
    x, y1, y2 = (read_operand(name, value, scale, a) for name, value, scale in pairs)
    if y1.dtype != y2.dtype:
        raise TypeError(f"b1 and b2 must be of one dtype; got {y1.dtype} and {y2.dtype}")
    dtype_of_each = each_dtype(formula, out_dtype)
    out_dtype, *more = (
        result_dtype(x.dtype, y1.dtype, dtype, formula.result_dtypes) for dtype in dtype_of_each
    )
    arguments.check_choice("policy", policy, POLICIES)
    if formula.nodes and policy != "fp32":
        raise ValueError(f"policy must be 'fp32' beside epilogue; got {policy!r}")
    shape = gate_shape(x, y1, y2)
    chosen = check_precision(precision, x.dtype, y1.dtype, target)
    if dtypes.float32 in (x.dtype, y1.dtype):
        check_float32(policy, scale_a=scale_a, scale_b1=scale_b1, scale_b2=scale_b2)
        if out is not None:
            named = {"a": x.array, "b1": y1.array, "b2": y2.array}
            arguments.check_new_out(out, shape, out_dtype, named)
        gate = formula if formula.nodes else read_formula(SILU, None, place, "gate")
        return _of_float32(
            *(target, x.array, y1.array, y2.array, gate, shape, out_dtype, out, config, key),
            *(chosen, tuple(more)),
        )
    alpha, alpha2 = product_of_scales(x, y1), product_of_scales(x, y2)
    blocks = check_scales((x, y1, y2), shape[:-2], *shape[-2:])
    arrays = {**x.arrays("a"), **y1.arrays("b"), **y2.arrays("b2")}
    arrays |= formula.broadcast(place, shape)
    if out is not None:
        theirs = {"b": "b1", "scale_b": "scale_b1"}
        named = {theirs.get(name, name): array for name, array in arrays.items()}
        arguments.check_new_out(out, shape, out_dtype, named)
    return launch.run(
        target,
        arrays,
        shape,
        out_dtype,
        out,
        config,
        key if same_memory((a, x), (b1, y1), (b2, y2)) else None,
        (*names, *formula.array_names),
        tuple(more),
        alpha=alpha,
        alpha2=alpha2,
        block_scales=blocks,
        k=x.shape[-1],
        blocked=blocked_groups({"groups_a": x, "groups_b": y1, "groups_b2": y2}),
        policy=POLICIES.index(policy),
        kernel="dual_gemm",
        **formula.options,
    )


def _of_float32(
    target: Target,
    a: Array,
    b1: Array,
    b2: Array,
    gate: ReadFormula,
    shape: tuple[int, ...],
    out_dtype: np.dtype,
    out: Array | None,
    config: AnyConfig | None,
    key: Any,
    precision: str,
    more: tuple[np.dtype, ...],
) -> Any:
    """Run two products, because no kernel computes two FP32 products in one pass.

    The second has the gate as its epilogue, with the first one's result as an operand.
    """

    def step(name: str, operands: dict[str, Any], dtype: np.dtype, to: Any, **options: Any) -> Any:
        own_key = None if key is None else (key, name)
        return launch.run_step(
            target, operands, shape, dtype, to, config, own_key, precision=precision, **options
        )

    up = step("up", {"a": a, "b": b2}, dtypes.float32, None)
    epilogue = gate.with_second(up)
    operands = {"a": a, "b": b1, **epilogue.broadcast(a, shape)}
    return step("gate", operands, out_dtype, out, more=more, **epilogue.options)


OP = Op(
    name="dual_gemm_silu",
    run=dual_gemm_silu,
    reference=reference.dual_gemm_silu,
    bound=reference.dual_gemm_silu_bound,
    draw_problem=problems.draw_problem,
    bench_problem=problems.bench_problem,
    bench_shapes=problems.bench_shapes,
    inputs=problems.make_inputs,
    work=problems.work,
    variants=problems.variants,
    configs=lambda problem, arch: gemm.configs(problems.task_of(problem), arch),
    variant=lambda problem, config: gemm.variant(problems.task_of(problem), config),
    sample=problems.sample,
    dtypes=problems.DTYPES,
)
