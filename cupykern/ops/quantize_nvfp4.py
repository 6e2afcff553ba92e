"""quantize_nvfp4: e2m1 codes, an e4m3 scale per 16 elements of a row and a global FP32 scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from .. import arguments, arrays, dtypes, inputs, nvfp4, reference
from ..arguments import check_config
from ..arrays import take
from ..gemm import quantize_nvfp4_plan
from ..gemm.product import Matrix, matrix
from ..gemm.quantize_nvfp4_plan import DTYPES, NvFp4Config, NvFp4Task, configs, variant_of
from ..numerics import as_float64, namespace
from ..nvfp4 import GROUP, NvFp4
from ..op import Call, Draw, Op, Work
from ..runtime import plans
from ..targets import Target, address_of
from ..typing import Array, Namespace


def quantize_nvfp4(
    x: Array, *, layout: Literal["plain", "blocked"] = "plain", config: NvFp4Config | None = None
) -> NvFp4:
    """Quantize x to an NvFp4: x = code * scale * global_scale up to rounding.

    >>> x = np.linspace(-6, 6, 16, dtype=np.float32)[None]
    >>> p = cupykern.quantize_nvfp4(x)
    >>> p.data.shape, p.scale.shape  # two codes a byte, a scale for 16 numbers
    ((1, 8), (1, 1))
    >>> print(p.dequantize()[0, :4].round(3))
    [-6. -6. -4. -4.]

    x: float16, bfloat16 or float32 (..., rows, K), K a multiple of 16, of any strides.
    layout: of the scales, "plain" or "blocked" (see `NvFp4`).
    config: an NvFp4Config; None: the default one.

    global_scale, a float32 array of shape (), is the largest finite |x| over 2688 = 6 * 448, or 1
    where that is below 2^-126.  scale is the largest |x| of 16 elements over 6 * global_scale; it
    is NaN for a group with a NaN or an infinity, whose codes are 0.  All are rounded to nearest
    even; codes beyond 6 saturate.  (Two-level scaling: NVIDIA, "Pretraining Large Language Models
    with NVFP4", arXiv 2509.25149.)

    x is read twice.  It is copied if its batch dims do not merge to one stride.

    Raises TypeError (types, dtypes), NotImplementedError (float64) and ValueError (shape, layout,
    config).  Error bound: `reference.quantize_nvfp4_bound`.
    """
    key, plan, places = plans.find(("quantize_nvfp4", layout, config), None, x)
    if plan is not None:
        return plan.launch(x, places)
    target = check(x, layout)
    if config is not None:
        check_config(config, NvFp4Config)
    xp, (*outer, rows, k) = target.xp, x.shape
    with arguments.on_device(target):
        scale_shape = nvfp4.scale_shape(x.shape, layout)
        if x.size == 0:
            data = arrays.empty_of(xp, (*outer, rows, k // 2), np.uint8)
            scale = arrays.empty_of(xp, scale_shape, dtypes.float8_e4m3fn)
            return NvFp4(data, scale, layout, xp.ones((), np.float32))
        batch = math.prod(outer)
        if batch * (rows + 127) >= 2**32:
            raise ValueError(f"x must have less than 2^32 rows; got {batch * rows}")
        # Rare: byte strides that are not multiples of the itemsize.
        flat = (x if arrays.in_elements(x) else arrays.packed(x)).reshape(batch, rows, k)
        task = NvFp4Task(x.shape, x.dtype, cast(Matrix, matrix(flat, (batch,))), layout)
        plan = quantize_nvfp4_plan.plan(target, task, config)
        plans.remember(key if address_of(flat) == address_of(x) else None, plan)
        return plan.launch(flat, (address_of(flat),))


def check(x: Array, layout: str) -> Target:
    """Check the arguments; return x's target.  Raises TypeError and ValueError."""
    target = arguments.target_of("x", x)
    dtypes.resolve(x.dtype, "x's dtype", DTYPES)
    arguments.check_choice("layout", layout, nvfp4.LAYOUTS)
    if x.ndim < 2 or x.shape[-1] % GROUP:
        raise ValueError(f"x must have shape (..., rows, K), K a multiple of 16; got {x.shape}")
    return target


# --- the op's record -----------------------------------------------------------------------------


@dataclass(frozen=True)
class NvFp4Problem:
    """One call, without data.  memory: one of inputs.LAYOUTS."""

    shape: tuple[int, ...]
    dtype: str = "float16"
    layout: str = "plain"
    kind: str = "normal"
    memory: str = "C"

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.dtype}, {self.layout}"


def _draw_problem(draw: Draw) -> NvFp4Problem:
    outer = draw.choice(((), (), (3,), (2, 3)))
    return NvFp4Problem(
        shape=(*outer, draw.choice((0, 1, 5, 32, 129)), draw.choice((0, 16, 48, 64, 80, 272))),
        dtype=draw.choice(OP.dtypes),
        layout=draw.choice(nvfp4.LAYOUTS),
        kind=draw.choice(inputs.KINDS),
        memory=draw.choice(("C", "C", *inputs.LAYOUTS)),
    )


def _bench_problem(shape: tuple[int, ...], dtype: str) -> NvFp4Problem:
    if len(shape) < 2 or shape[-1] % GROUP:
        raise ValueError(f"quantize_nvfp4 needs a shape (..., rows, K), K % 16 = 0; got {shape}")
    dtypes.resolve(dtype, "dtype", DTYPES)
    return NvFp4Problem(shape, dtype, "blocked", "bench")


def _bench_shapes(target: str) -> tuple[tuple[int, ...], ...]:
    return ((1024, 1024),) if target == "host" else ((4096, 4096), (16384, 16384))


def _inputs(problem: NvFp4Problem, seed: int, xp: Namespace) -> Call:
    p, dtype = problem, dtypes.NAMES[problem.dtype]
    if p.kind == "bench":
        x = inputs.bench_values(p.shape, dtype, seed, xp)
    else:
        x = inputs.with_layout(inputs.values(p.kind, p.shape, dtype, seed), p.memory, xp)
    return Call((x,), {"layout": p.layout})


def _work(problem: NvFp4Problem) -> Work:
    size = math.prod(problem.shape)
    scales = math.prod(nvfp4.scale_shape(problem.shape, problem.layout))
    return Work(size * dtypes.NAMES[problem.dtype].itemsize, size // 2 + scales + 4)


def _sample(
    call: Call, outputs: tuple[Array, ...], max_elements: int, seed: int
) -> tuple[Call, tuple[Array, ...]]:
    """Sample rows of one matrix, among them that of the largest magnitude, which sets global_scale.

    outputs: the arrays of NvFp4.outputs, with the scales in the layout "plain".
    """
    x = call.args[0]
    rows = inputs.sample_rows(x, max_elements, seed) if x.ndim == 2 and x.size else None
    if rows is None:
        return call, outputs
    y = as_float64(x)
    xp = namespace(y)
    largest = xp.argmax(xp.where(xp.isfinite(y), xp.abs(y), 0))
    rows = np.union1d(rows, int(largest) // x.shape[1])
    part = tuple(take(y, rows) if y.ndim else y for y in outputs)
    return Call((take(x, rows),), call.kwargs), part


OP = Op(
    name="quantize_nvfp4",
    run=quantize_nvfp4,
    reference=reference.quantize_nvfp4,
    bound=reference.quantize_nvfp4_bound,
    draw_problem=_draw_problem,
    bench_problem=_bench_problem,
    bench_shapes=_bench_shapes,
    inputs=_inputs,
    work=_work,
    variants=lambda arch: tuple(
        variant_of(x, config) for x in DTYPES for config in configs(x, arch)
    ),
    configs=lambda problem, arch: configs(dtypes.NAMES[problem.dtype], arch),
    variant=lambda problem, config: variant_of(dtypes.NAMES[problem.dtype], config),
    sample=_sample,
)
