"""Which kernel normalises the rows of a call, and what it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kernels_cu import EITHER, Variant

from .. import dtypes
from ..arrays import Twins, small_twins
from ..targets import Target
from ..targets.limits import is_measured
from .norm_configs import admissible_norm_configs, quantizes, streams_fit
from .row_configs import RowConfig, tuned_config
from .row_fit import check_config
from .row_layout import Operand, contiguous_operand, layout_dtype, operand, row_layout
from .rows import RowPlan, evicts_last, row_plan, row_variant

DTYPES = (dtypes.float16, dtypes.bfloat16, dtypes.float32)

_PARAMS = np.dtype(  # norm_params.cuh: NormParams
    [
        ("stores_last_from", np.int64),
        ("loads_last", np.int64),
        ("layout", layout_dtype(5)),
        ("num_chunks", np.int64),
        ("weight_stride", np.int64),
        ("bias_stride", np.int64),
        ("dtype", np.int32),
        ("weight_dtype", np.int32),
        ("bias_dtype", np.int32),
        ("centered", np.int32),
        ("compensated", np.int32),
        ("stages", np.int32),
        ("eps", np.float32),
        ("threads_log2", np.int32),
    ]
)

_PLAIN_PARAMS = np.dtype(  # held_rows.cuh: PlainParams
    [
        ("x_stride", np.int64),
        ("residual_stride", np.int64),
        ("whole", np.uint16),
        ("loads_last", np.uint16),
        ("eps", np.float32),
        ("y_stride", np.int64),
        ("sum_stride", np.int64),
        ("stores_last_from", np.int64),
    ]
)
_RARE_PARAMS = np.dtype(  # held_rows.cuh: RareParams
    [(name, np.int64) for name in ("statistic_stride", "num_rows", "num_cols", "dtype")]
)
# The strides of the operands of a layout.
_STRIDES = ("x_stride", "residual_stride", "y_stride", "sum_stride", "statistic_stride")

_MOMENTS_BYTES = 16  # moments.cuh: Moments


class Options(NamedTuple):
    centered: bool
    compensated: bool
    return_stats: bool
    quantize: str | None

    @property
    def quantized(self) -> np.dtype | None:
        return None if self.quantize is None else dtypes.QUANTIZED[self.quantize]


@dataclass(frozen=True)
class Norm:
    """A call's plan, and what it returns.  simple: y, and the sum with the residual if there is one.  twins:
    both of these, if they are small."""

    plan: RowPlan
    y_dtype: np.dtype
    options: Options
    has_residual: bool
    simple: bool
    twins: Twins | None


def make_norm(
    target: Target,
    x: Any,
    weight: Any,
    bias: Any,
    eps: float,
    residual: Any,
    options: Options,
    y: Any,
    total: Any,
    config: RowConfig | None,
) -> Norm | None:
    """total: where s goes; None: to a new C-contiguous array."""
    place = operand(x)
    total_place = contiguous_operand(x.shape, x.itemsize) if total is None else operand(total)
    statistics = contiguous_operand((*x.shape[:-1], 1), 4)
    operands = (
        place,
        place if residual is None else operand(residual),
        operand(y),
        place if residual is None else total_place,
        statistics._replace(strides=(*statistics.strides[:-1], 0)),
    )
    layout = row_layout(x.shape, x.ndim - 1, operands, vectored=(1, 2, 3))
    if layout is None:
        return None
    if layout.lanes_across_rows and config is None and not is_measured(target.arch):
        return None  # which is rare
    columns = [array for array in (weight, bias) if array is not None]
    quantized = options.quantized is not None
    plain = (
        (y.dtype == x.dtype or quantized)
        and not options.compensated
        and all(a.dtype == x.dtype and _is_aligned(operand(a)) for a in columns)
    )
    if not (
        y.dtype == x.dtype
        and not options.compensated
        and all(
            a.dtype in (x.dtype, dtypes.float32) and a.strides[0] == a.itemsize for a in columns
        )
    ):
        layout = layout.for_options()
    has_residual = residual is not None
    held = 1 + has_residual
    bare = len(columns) == 1 + options.centered and not (options.return_stats or quantized)
    if config is not None:
        check_config(config, target.arch, x.itemsize, layout, plain, held, norms=True)
        if config.stages and not streams_fit(options.centered, held):
            raise ValueError("config does not fit: layer_norm has no stages with a residual")
        if config.filled and not bare:
            raise ValueError(
                "config does not fit: filled is for calls with weights and biases, without statistics"
            )
        if quantized and not quantizes(config):
            raise ValueError(
                "config does not fit: plain rows are quantized by a block or a warp, up to two at a time"
            )
    else:
        config = tuned_config(
            *(
                "layer_norm" if options.centered else "rms_norm",
                target,
                x.dtype,
                layout,
                plain,
                held,
            ),
            lambda: admissible_norm_configs(
                target.arch, x.itemsize, layout, plain, held, options.centered, quantized, bare
            ),
            lambda config: norm_variant(x.dtype, options.centered, config, quantized, has_residual),
            rounds="to FP32" if options.quantized is None else "by row",
            bare=str(bare),
        )
    if config.split_rows and quantized:
        return None  # a row's scale is known only when all of it has been normalised
    own = config.plain and not config.stages
    params, arguments = np.zeros((), _PLAIN_PARAMS if own else _PARAMS), None
    params["eps"] = eps
    if own:
        rare = np.zeros((), _RARE_PARAMS)
        params["whole"] = config.is_whole(layout) and len(columns) == 1 + options.centered
        rare["num_rows"], rare["num_cols"] = layout.num_rows, layout.num_cols
        rare["dtype"] = dtypes.CODES[y.dtype]
        for _, strides in layout.outer:  # one dim, or there is one row
            for name, stride in zip(_STRIDES, strides, strict=True):
                (rare if name == "statistic_stride" else params)[name] = stride
    else:
        params["dtype"] = dtypes.CODES[y.dtype]
        for name, array in (("weight", weight), ("bias", bias)):
            if array is not None:
                params[f"{name}_dtype"] = dtypes.CODES[array.dtype]
                params[f"{name}_stride"] = array.strides[0] // array.itemsize
        params["centered"], params["compensated"] = options.centered, options.compensated
    evicts_last(params, layout, held * x.itemsize, y.itemsize + has_residual * x.itemsize)
    if own:
        if config.filled:
            arguments = _filled_arguments(np.float32(eps))
        else:
            arguments = _plain_arguments(target.by_value(params), target.by_value(rare))
    variant = norm_variant(x.dtype, options.centered, config, quantized, has_residual)
    shared_bytes = held * config.shared_bytes(x.itemsize)
    plan = row_plan(
        target, variant, config, layout, params, _MOMENTS_BYTES, shared_bytes, arguments
    )
    simple = not (options.return_stats or options.quantized)
    twins = small_twins(x.shape, y.dtype, x.dtype) if has_residual else None
    return Norm(plan, y.dtype, options, has_residual, simple, twins)


def _plain_arguments(params: Any, rare: Any) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """What normalize_plain takes: of normalize's arrays."""

    def arguments(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        x, residual, weight, bias, y, total, mean, rstd, row_scale = arrays
        return x, weight, residual, params, bias, y, total, rstd, mean, row_scale, rare

    return arguments


def _filled_arguments(eps: np.float32) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """What normalize_filled takes: of normalize's arrays."""

    def arguments(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        x, residual, weight, bias, y, total, *_ = arrays
        return x, weight, bias if residual is None else residual, y, total, eps, bias

    return arguments


def norm_variant(
    dtype: np.dtype, centered: bool, config: RowConfig, quantized: bool, has_residual: bool
) -> Variant:
    """The variant of a norm; quantized: its results are."""
    either = config.shared and not config.plain
    constants: tuple[tuple[str, int], ...] = (("kCentered", EITHER if either else centered),)
    if config.stretch:
        return row_variant("normalize_stretch", dtype, config, constants)
    if not config.plain or config.stages:
        return row_variant("normalize", dtype, config, constants)
    constants += (
        ("kQuantized", quantized),
        ("kRowsPerThread", config.rows_per_thread),
        ("kInRegisters", config.in_registers),
        ("kWeightsFirst", config.weights_first),
        ("kSums", EITHER if quantized or config.shared else int(has_residual)),
    )
    kernel = "normalize_filled" if config.filled else "normalize_plain"
    return row_variant(kernel, dtype, config, constants)


def _is_aligned(column: Operand) -> bool:
    """Whether a weight can be read in vectors."""
    return column.offset % 16 == 0 and column.strides[0] == column.itemsize
