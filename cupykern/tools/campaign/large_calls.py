"""The calls of `large`: per op, ways to read or write arrays of at least `elements` elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import inputs
from ...nvfp4 import NvFp4
from ...op import Call, Op
from ...ops.problems.attention import AttentionProblem
from ...ops.problems.attention_varlen import VarlenProblem
from ...ops.problems.decode_attention import DecodeProblem
from ...ops.problems.products import sampled_rows
from ...ops.quantize_nvfp4 import quantize_nvfp4
from .bits import codes

_COLS = 4096  # columns per row
_VOCABULARY = 2**18
_HEADS, _BATCH, _DIM = 64, 64, 128
_KEPT = 64  # rows or columns per sample
Sample = Callable[[Call, Any], tuple[Call, tuple[Any, ...]]]


@dataclass(frozen=True)
class Large:
    """A call.

    sample: returns the part to verify and its outputs; None: use op.sample.
    on_device: run the reference on the target of the call.
    """

    call: Call
    dtype: str = "float16"
    sample: Sample | None = None
    on_device: bool = False

    def shapes(self) -> str:
        given = (*self.call.args, *self.call.kwargs.values())
        return ", ".join(str(x.shape) for x in given if hasattr(x, "shape"))


Make = Callable[[Op, int, int, Any], Large]
"""(op, elements, seed, xp) -> Large"""


def _bench(
    shape: Callable[[int], tuple[int, ...]],
    dtype: str = "float16",
    sample: Callable[[int], Sample] | None = None,
) -> Make:
    """Make the op's bench problem with shape(elements)."""

    def make(op: Op, elements: int, seed: int, xp: Any) -> Large:
        call = op.inputs(op.bench_problem(shape(elements), dtype), seed, xp)
        return Large(call, dtype, None if sample is None else sample(seed))

    return make


def _of(problem: Callable[[int], Any]) -> Make:
    return lambda op, elements, seed, xp: Large(op.inputs(problem(elements), seed, xp))


def _rows(elements: int) -> tuple[int, int]:
    return elements // _COLS + 3, _COLS


def take(x: Any, numbers: np.ndarray, axis: int = 0) -> Any:
    """Index x's rows or columns, also in formats that CuPy cannot index."""
    return codes(x)[(slice(None),) * axis + (numbers,)].view(x.dtype)


# --- rows ---------------------------------------------------------------------------------------


def _columns_of_softmax(op: Op, elements: int, seed: int, xp: Any) -> Large:
    """Softmax along the first axis."""
    rows, cols = _rows(elements)
    x = inputs.bench_values((cols, rows), np.dtype(np.float16), seed, xp)

    def sample(call: Call, y: Any) -> tuple[Call, tuple[Any, ...]]:
        kept = sampled_rows(rows, min(_KEPT, rows), seed)
        return Call((x[:, kept],), call.kwargs), (y[:, kept],)

    return Large(Call((x,), {"axis": 0}), sample=sample)


def _quantize(granularity: str, block: tuple[int, int] = (1, 128)) -> Make:
    """The first row holds every column's largest number, so that a sample sees the same scales."""

    def make(op: Op, elements: int, seed: int, xp: Any) -> Large:
        rows = _rows(elements)[0]
        call = op.inputs(op.bench_problem(_rows(elements), f"float16:{granularity}"), seed, xp)
        (x, to), kwargs = call.args, dict(call.kwargs)
        if granularity in ("tensor", "column"):
            x[0] = 100
        height = block[0] if granularity == "block" else 1
        if granularity == "block":
            kwargs["block"] = block

        def sample(call: Call, outputs: Any) -> tuple[Call, tuple[Any, ...]]:
            """Take whole groups of `height` rows."""
            values, scale = outputs
            groups = sampled_rows(-(-rows // height), min(_KEPT, -(-rows // height)), seed)
            kept = (groups[:, None] * height + np.arange(height)).reshape(-1)
            kept = kept[kept < rows]
            if granularity in ("row", "block"):
                scale = scale[groups]
            return Call((x[kept], to), kwargs), (take(values, kept), scale)

        return Large(Call((x, to), kwargs), f"float16:{granularity}", sample)

    return make


def _quantize_nvfp4(op: Op, elements: int, seed: int, xp: Any) -> Large:
    x = inputs.bench_values(_rows(elements), np.dtype(np.float16), seed, xp)
    x[0] = 100  # the largest value

    def sample(call: Call, y: NvFp4) -> tuple[Call, tuple[Any, ...]]:
        kept = sampled_rows(x.shape[0], min(_KEPT, x.shape[0]), seed)
        return Call((x[kept],), call.kwargs), y.rows(kept).outputs()

    return Large(Call((x,), {"layout": "plain"}), sample=sample)


def _nonfinite(op: Op, elements: int, seed: int, xp: Any) -> Large:
    """NaN and infinities only in the last elements.  The reference processes the array in parts."""
    x = inputs.bench_values((elements,), np.dtype(np.float16), seed, xp)
    for i, value in enumerate((np.nan, np.inf, -np.inf, np.nan)):
        x[elements - 7 * i - 1] = value
    return Large(Call((x,)), sample=lambda call, outputs: (call, outputs), on_device=True)


# --- products -----------------------------------------------------------------------------------


def _large_a(elements: int) -> tuple[int, int, int]:
    return elements // 128 + 3, 16, 128


def _large_b(elements: int) -> tuple[int, int, int]:
    return 16, elements // 128 + 3, 128


def _large_result(elements: int) -> tuple[int, int, int]:
    """2^15 + 8 columns, fewer in NumPy."""
    n = min(2**15 + 8, elements // 32)
    return elements // n + 3, n, 64


def _columns(seed: int) -> Sample:
    """Sample columns of a matrix product without bias."""

    def sample(call: Call, y: Any) -> tuple[Call, tuple[Any, ...]]:
        n = y.shape[-1]
        kept = sampled_rows(n, min(_KEPT, n), seed)

        def cut(x: Any) -> Any:
            if isinstance(x, NvFp4):
                return x.rows(kept)
            wide = getattr(x, "ndim", 0) == 2 and x.shape[1] == n
            return take(x, kept, 1) if wide else x

        a, *others = call.args
        kwargs = {name: cut(x) if "_b" in name else x for name, x in call.kwargs.items()}
        return Call((a, *map(cut, others)), kwargs), (take(y, kept, 1),)

    return sample


def _nvfp4_weights(op: Op, elements: int, seed: int, xp: Any) -> Large:
    a = inputs.bench_values((16, 128), np.dtype(np.float16), seed, xp)
    weights = inputs.bench_values((elements // 128 + 3, 128), np.dtype(np.float16), seed + 1, xp)
    return Large(Call((a, quantize_nvfp4(weights))), "float16*float4_e2m1fn", _columns(seed))


def _large_weights_of_softmax(op: Op, elements: int, seed: int, xp: Any) -> Large:
    """Zero all columns of a but a few, so that only the matching rows of w affect the result."""
    n = min(_VOCABULARY, elements // 32)
    problem = op.bench_problem((4, n, elements // n + 3), "float16")
    call = op.inputs(problem, seed, xp)
    a, w, scale = call.args
    kept = sampled_rows(w.shape[0], min(_KEPT, w.shape[0]), seed)
    some = a[:, kept]
    a.fill(0)
    a[:, kept] = some

    def sample(call: Call, y: Any) -> tuple[Call, tuple[Any, ...]]:
        return Call((some, take(w, kept), scale), call.kwargs), (y,)

    return Large(call, sample=sample)


def _large_softmax(elements: int) -> tuple[int, int, int]:
    n = min(_VOCABULARY, elements // 32)
    return elements // n + 3, n, 64


# --- attention ----------------------------------------------------------------------------------


def _sizes(elements: int, heads: int, batch: int) -> tuple[int, int, int]:
    """Return (batch, heads, length); NumPy gets few heads."""
    if elements < 2**31:
        heads, batch = 2, 2
    return batch, heads, elements // (batch * heads * _DIM) + 3


def _queries(elements: int) -> AttentionProblem:
    b, h, length = _sizes(elements, _HEADS, _BATCH)
    return AttentionProblem(b, h, h, length, 64, _DIM, _DIM, kind="bench")


def _keys(elements: int) -> AttentionProblem:
    b, h, length = _sizes(elements, 8, 8)
    return AttentionProblem(b, h, h, 64, length, _DIM, _DIM, kind="bench")


def _varlen_queries(elements: int) -> VarlenProblem:
    b, h, length = _sizes(elements, _HEADS, _BATCH)
    return VarlenProblem(((length, 64),) * b, h, h, _DIM, _DIM, kind="bench")


def _varlen_keys(elements: int) -> VarlenProblem:
    b, h, length = _sizes(elements, 8, 8)
    return VarlenProblem(((8, length),) * b, h, h, _DIM, _DIM, kind="bench")


def _caches(elements: int) -> DecodeProblem:
    b, h, length = _sizes(elements, 8, _BATCH)
    return DecodeProblem(b, 2 * h, h, 1, length, _DIM, kind="bench")


def _own_caches(elements: int) -> tuple[int, ...]:
    b, h, length = _sizes(elements, 8, _BATCH)
    return b, 2 * h, h, 64, length, _DIM


def _shared_keys(elements: int) -> tuple[int, ...]:
    h = 128 if elements >= 2**31 else 2  # many: a sample has two
    return 4, 2 * h, h, elements // (h * _DIM) + 3, 16, _DIM


def _pages(op: Op, elements: int, seed: int, xp: Any) -> Large:
    """Pages of 64 keys in random order.  The sample's cache is contiguous."""
    page = 64 if elements >= 2**31 else 4
    b, h, length = _sizes(elements, 8, _BATCH)
    table = np.random.default_rng(seed).permutation(b * -(-length // page)).astype(np.int32)
    table = table.reshape(b, -1)
    shape = (table.size, h, page, _DIM)
    dtype = np.dtype(np.float16)
    q = inputs.bench_values((b, 2 * h, 1, _DIM), dtype, seed, xp)
    caches = [inputs.bench_values(shape, dtype, seed + i, xp) for i in (1, 2)]

    def sample(call: Call, y: Any) -> tuple[Call, tuple[Any, ...]]:
        kept = np.array([0, b - 1])
        found = [x[table[kept].reshape(-1)].reshape(2, -1, *shape[1:]) for x in caches]
        found = [x.swapaxes(1, 2).reshape(2, h, -1, _DIM) for x in found]
        return op.sample(Call((q[kept], *found)), (y[kept],), 1 << 16, seed)

    return Large(Call((q, *caches), {"block_table": xp.asarray(table)}), sample=sample)


def _one_head(problem: Callable[[int], Any]) -> Make:
    """Sample one head of a sequence with op.sample, where q has more elements than one head."""

    def make(op: Op, elements: int, seed: int, xp: Any) -> Large:
        call = op.inputs(problem(elements), seed, xp)
        return Large(call, sample=lambda call, y: op.sample(call, (y,), 1, seed))

    return make


_NORMS = {"rows": _bench(_rows)}
_SOFTMAX = {"rows": _bench(_rows), "columns": _columns_of_softmax}
_FP8_ROWS = "float8_e4m3fn:rows"
CALLS: dict[str, dict[str, Make]] = {
    "softmax": _SOFTMAX,
    "log_softmax": _SOFTMAX,
    "layer_norm": _NORMS,
    "rms_norm": {**_NORMS, "quantized": _bench(_rows, "float16:e4m3")},
    "add_rms_norm": _NORMS,
    "quantize": {
        "row": _quantize("row"),
        "tensor": _quantize("tensor"),
        "column": _quantize("column"),
        "block": _quantize("block"),
        "tile": _quantize("block", (128, 128)),
    },
    "quantize_nvfp4": {"rows": _quantize_nvfp4},
    "nonfinite_report": {"all": _nonfinite},
    "matmul": {
        "a": _bench(_large_a),
        "b": _bench(_large_b, sample=_columns),
        "result": _bench(_large_result),
    },
    "complex_matmul": {
        "a": _bench(_large_a, "complex64"),
        "result": _bench(_large_result, "complex64"),
    },
    "scaled_mm": {
        "a": _bench(_large_a, _FP8_ROWS),
        "b": _bench(_large_b, _FP8_ROWS, _columns),
        "nvfp4": _nvfp4_weights,
        "result": _bench(_large_result, _FP8_ROWS),
    },
    "dual_gemm_silu": {
        "a": _bench(_large_a),
        "b": _bench(_large_b, sample=_columns),
        "result": _bench(_large_result),
    },
    "dequant_softmax": {"w": _large_weights_of_softmax, "result": _bench(_large_softmax)},
    "attention": {"queries": _one_head(_queries), "keys": _one_head(_keys)},
    "attention_varlen": {"queries": _one_head(_varlen_queries), "keys": _one_head(_varlen_keys)},
    "decode_attention": {"caches": _of(_caches), "pages": _pages},
    "cascade_attention": {"own": _bench(_own_caches), "shared": _bench(_shared_keys)},
    "merge_attention": {"rows": _bench(lambda n: (n // (8 * _DIM) + 3, 8, _DIM))},
    "rope_and_cache": {
        "heads": _bench(lambda n: (2, n // (2 * 32 * _DIM) + 3, 32, 8, _DIM)),
        "cache": _bench(lambda n: (2, n // (2 * 8 * _DIM) + 3, 8, 8, _DIM), "float16:nhd+int8"),
    },
}


def calls(op: Op) -> dict[str, Make]:
    """Return the calls of an op by label; by default a bench problem of a longer first dim."""

    def shape(elements: int) -> tuple[int, ...]:
        rest = op.bench_shapes("host")[0][1:]
        return elements // math.prod(rest) + 3, *rest

    return CALLS.get(op.name) or {"rows": _bench(shape, op.dtypes[0])}
