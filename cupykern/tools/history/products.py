"""Random calls of the matrix-product ops."""

from __future__ import annotations

from typing import Any

from ...gemm.product import ACTIVATIONS
from ...op import Draw
from .draws import (
    BEGINS,
    FLOATS,
    MATRICES,
    DrawValue,
    Setting,
    array,
    family,
    often_none,
    one_of,
    result,
)
from .memory import Alias, Array, Fp4, Operands, Shape

# (M, N, K), optionally after a batch of a.
_SIZES = (
    *((8, 64, 257), (8, 64, 256), (33, 64, 256), (1, 96, 64), (8, 64, 0), (8, 1, 64)),
    *((3, 17, 16, 64), (2, 17, 16, 64)),
)
_LARGE_SIZES = (
    *((512, 512, 512), (128, 1024, 1024), (16, 2048, 1024), (256, 257, 511)),
    *((4, 128, 256, 256), (512, 1024, 128)),
)
# Dtypes of a, b and most results.
_PLAIN = (
    *(("float16", "float16", "float16"),) * 2,
    ("bfloat16", "bfloat16", "bfloat16"),
    ("float32", "float32", "float32"),
    ("float32", "bfloat16", "float32"),
    ("float16", "float32", "float32"),
    ("int8", "int8", "int32"),
    ("float8_e4m3fn", "float8_e4m3fn", "bfloat16"),
    ("float8_e5m2", "float8_e4m3fn", "bfloat16"),
    ("float16", "float8_e4m3fn", "float16"),
    ("bfloat16", "int8", "bfloat16"),
)
_SCALED = (
    ("float8_e4m3fn", "float8_e4m3fn", "bfloat16"),
    ("float8_e5m2", "float8_e4m3fn", "bfloat16"),
    ("int8", "int8", "float32"),
    ("float16", "int8", "float16"),
    ("float16", "float8_e4m3fn", "float16"),
    ("bfloat16", "float8_e5m2", "bfloat16"),
    ("nvfp4", "nvfp4", "float32"),
    ("float16", "nvfp4", "float16"),
    ("nvfp4", "bfloat16", "float32"),
)
_DUAL = (
    ("float16", "float16", "float16"),
    ("float32", "float32", "float32"),
    ("float32", "float16", "float32"),
    *((a, b, a if a.endswith("float16") else "float16") for a, b, _ in _SCALED[:-1]),
)
_INT8_WEIGHTS = (("float16", "int8", "float16"), ("bfloat16", "int8", "bfloat16"))
_OUT_LAYOUTS = ("C", "C", "columns of 2048", "gap", "gap of 8", "shifted", "F", "rows negative")


def _settings(
    sizes: tuple[Shape, ...], dtypes: tuple[tuple[str, str, str], ...]
) -> tuple[Setting, ...]:
    """NvFp4 operands need a K that is a multiple of 16; these have no batch."""
    names = "batch", "m", "n", "k", "a", "b", "result"
    return tuple(
        dict(zip(names, (size[:-3], *size[-3:], *kinds), strict=True))
        for size in sizes
        for kinds in dtypes
        if "nvfp4" not in kinds or (len(size) == 3 and size[-1] % 16 == 0)
    )


def _shape_of(name: str) -> Any:
    if name == "a":
        return lambda s: (*s["batch"], s["m"], s["k"])
    return lambda s: (s["k"], s["n"])


def _result_shape(s: Setting) -> Shape:
    return *s["batch"], s["m"], s["n"]


def _addend(draw: Draw, s: Setting) -> Array:
    shape = draw.choice(((s["n"],), (s["m"], s["n"]), (s["m"], 1), _result_shape(s)))
    layout = draw.choice(("C", "C", "gap", "gap of 8", "F", "negative"))
    return Array(shape, draw.choice(FLOATS), layout, draw.choice(BEGINS))


def _operand(name: str) -> DrawValue:
    """Draw a, b, b1, b2 or w; rows of an NvFp4 are columns of b."""
    dtype, shape = name[0] if name != "w" else "b", _shape_of(name)
    layouts = MATRICES if name == "a" else ("F", *MATRICES)  # K-major is the fastest
    draw_array = array(shape, dtype, layouts)

    def draw_operand(draw: Draw, s: Setting) -> Any:
        if s[dtype] != "nvfp4":
            return draw_array(draw, s)
        rows_first = shape(s) if name == "a" else shape(s)[::-1]
        layout, memory = draw.choice(("plain", "blocked")), draw.choice(("C", "C", *MATRICES[4:9]))
        return Fp4(rows_first, layout, memory, draw.choice((1.0, 0.5, None)))

    return draw_operand


def _scale(name: str) -> DrawValue:
    """Draw None, a number, or an array with scales per tensor, per row or column, or per block."""

    def draw_scale(draw: Draw, s: Setting) -> Any:
        if s[name[0]] == "nvfp4":
            return None
        m, n, blocks_k, blocks_n = s["m"], s["n"], -(-s["k"] // 128), -(-s["n"] // 128)
        rows, blocks = ((m, 1), (m, blocks_k)) if name == "a" else ((1, n), (blocks_k, blocks_n))
        one = draw.choice((None, 1.0, 1, 0.5, (), rows, rows, blocks))
        if not isinstance(one, tuple):
            return one
        return Array(one, "float32", draw.choice(("C", "C", "F", "gap")), draw.choice((0, 0, 1)))

    return draw_scale


def _accumulate(draw: Draw, s: Setting) -> str:
    return draw.choice(("float32", "float16" if s["a"] == s["b"] == "float16" else "float32"))


def _precision(draw: Draw, s: Setting) -> str:
    names = ("fma", "tf32", "fp16x3", "bf16x6") if "float32" in (s["a"], s["b"]) else ()
    return draw.choice(("float32", "float32", *names))


def _scale_w(draw: Draw, s: Setting) -> Any:
    one = draw.choice((0.5, 1.0, 1, (), (s["n"],), (1, s["n"])))
    layouts = "C", "gap", "negative"
    return Array(one, "float32", draw.choice(layouts)) if isinstance(one, tuple) else one


def _operands(draw: Draw, s: Setting) -> Operands | None:
    if draw.choice((True, False, False, False)):
        return None
    shapes = draw.choice((((s["n"],), (s["m"], 1)), ((s["m"], s["n"]), ())))
    first = draw.choice((0.5, 2, Array(shapes[0], draw.choice(FLOATS), "C", draw.choice(BEGINS))))
    return Operands((("s", first), ("t", Array(shapes[1], "float32"))))


_EPILOGUE: dict[str, DrawValue] = {
    "bias": often_none(_addend),
    "activation": one_of(None, *ACTIVATIONS),
    "out_dtype": one_of(None, None, *FLOATS),
    "out": result(_result_shape, "result", _OUT_LAYOUTS, Alias("a"), Alias("bias")),
    "epilogue": one_of(
        *[None] * 4,
        "maximum(acc, 0) + i",
        "acc * s, acc + t",
        "acc * t + s",
        "acc * s, row_sum(acc + t)",
    ),
    "operands": _operands,
}
_MATMUL = _EPILOGUE | {
    "out_dtype": one_of(None, None, None, *FLOATS, "int32"),
    "a": _operand("a"),
    "b": _operand("b"),
    "residual": often_none(_addend),
    "alpha": one_of(1.0, 1.0, 1, 0.5, -2.0, Array((), "float32")),
    "accumulate": _accumulate,
    "precision": _precision,
}
_SCALED_MM = _EPILOGUE | {
    "a": _operand("a"),
    "b": _operand("b"),
    "scale_a": _scale("a"),
    "scale_b": _scale("b"),
}
_DUAL_GEMM: dict[str, DrawValue] = {
    "a": _operand("a"),
    "b1": _operand("b1"),
    "b2": _operand("b2"),
    "scale_a": _scale("a"),
    "scale_b1": _scale("b1"),
    "scale_b2": _scale("b2"),
    "policy": one_of("fp32", "fp32", "hybrid", "fp16"),
    "out_dtype": one_of(None, None, *FLOATS),
    "precision": _precision,
    "out": result(_result_shape, "result", _OUT_LAYOUTS, Alias("a")),
    "epilogue": one_of(
        *[None] * 4,
        "maximum(acc1, 0) * acc2 + i",
        "acc2 * s + acc1 * t",
        "acc2 * s, row_max(acc1 * t)",
    ),
    "operands": _operands,
}
_DEQUANT_SOFTMAX: dict[str, DrawValue] = {
    "a": _operand("a"),
    "w": _operand("w"),
    "scale_w": _scale_w,
    "bias": often_none(_addend),
    "dtype": one_of(None, None, *FLOATS),
    "out": result(_result_shape, "result", _OUT_LAYOUTS, Alias("bias")),
}

FAMILIES = {
    name: family(
        *(name, _settings(_SIZES, dtypes), _settings(_LARGE_SIZES, dtypes), options),
        (((64, 64, 256), dtypes[0][0]), ((512, 512, 512), dtypes[0][0])),
    )
    for name, dtypes, options in (
        ("matmul", _PLAIN, _MATMUL),
        ("scaled_mm", _SCALED, _SCALED_MM),
        ("dual_gemm_silu", _DUAL, _DUAL_GEMM),
        ("dequant_softmax", _INT8_WEIGHTS, _DEQUANT_SOFTMAX),
    )
}
