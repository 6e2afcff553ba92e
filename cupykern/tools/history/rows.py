"""Random calls of the row ops."""

from __future__ import annotations

from ...gemm.quantize_nvfp4_plan import NvFp4Config
from ...op import Draw
from ...rows.nonfinite_walk import NonfiniteConfig
from .draws import (
    ANY,
    FLOATS,
    DrawValue,
    Setting,
    array,
    combine,
    family,
    often_none,
    one_of,
    result,
)
from .memory import Alias, Array, Shape

_SHAPES = ((4, 1501), (2, 3, 1501), (16, 1024), (4, 1024), (8, 8))
_LARGE_SHAPES = ((4, 50257), (256, 2048), (1, 40000))
_NVFP4_SHAPES = ((5, 64), (3, 33, 80), (130, 272))
_BENCHES = (((64, 1024), "float16"), ((64, 1501), "float16"), ((64, 1024), "float32"))
_QUANTIZE_BENCHES = (
    *(((16, 1024), "float16"), ((16, 1024), "float16:column"), ((16, 1024), "float16:block")),
)
_X_ALIASES = (*(Alias("x"), Alias("x", "next"), Alias("x", "rows negative"), Alias("x", "F")),)
_OUT_LAYOUTS = ("C", "C", "gap", "gap", "gap of 8", "shifted", "F", "rows negative")


def _settings(shapes: tuple[Shape, ...]) -> tuple[Setting, ...]:
    return combine(shape=shapes, dtype=("float16", *FLOATS))


def _shape(setting: Setting) -> Shape:
    return setting["shape"]


def _mask(draw: Draw, setting: Setting) -> Array:
    shape = _shape(setting)
    kind = draw.choice(("all", "last", "ones"))
    if kind == "last":
        shape = shape[-1:]
    elif kind == "ones":
        shape = tuple(draw.choice((1, size)) for size in shape)
    return Array(shape, "bool", draw.choice(("C", "C", "gap", "F")), draw.choice((0, 0, 1)))


def _column(dtype: str | tuple[str, ...] = "dtype") -> DrawValue:
    layouts = "C", "C", "C", "every other", "negative"
    return often_none(array(lambda setting: _shape(setting)[-1:], dtype, layouts))


_SOFTMAX: dict[str, DrawValue] = {
    "x": array(_shape),
    "axis": one_of(-1, -1, -1, -1, 0),
    "mask": often_none(_mask),
    "scale": one_of(None, None, 1.0, 1, 4.0, 0.125, -1.0, Array((), "float32")),
    "dtype": one_of(None, None, *FLOATS),
    "out": result(_shape, "dtype", _OUT_LAYOUTS, *_X_ALIASES),
}
_NORM: dict[str, DrawValue] = {
    "x": array(_shape),
    "weight": _column(),
    "residual": often_none(array(_shape)),
    "eps": one_of(None, 1e-5, 1e-3, 0.0, 1),
    "return_stats": one_of(False, False, True),
    "dtype": one_of(None, None, *FLOATS),
    "out": result(_shape, "dtype", _OUT_LAYOUTS, *_X_ALIASES, Alias("residual")),
}
_LAYER_NORM = _NORM | {"bias": _column(FLOATS), "compensated": one_of(False, False, True)}
_RMS_NORM = _NORM | {
    "quantize": one_of(None, None, None, "e4m3", "e5m2", "int8"),
    "granularity": one_of("row", "row", "block"),
}
_QUANTIZE: dict[str, DrawValue] = {
    "x": array(_shape),
    "dtype": one_of("e4m3", "e5m2", "int8"),
    "granularity": one_of("tensor", "row", "column", "block"),
    "block": one_of((1, 128), (128, 128), (2, 64), (3, 5)),
}
_NVFP4: dict[str, DrawValue] = {"x": array(_shape), "layout": one_of("plain", "blocked")}
_NONFINITE: dict[str, DrawValue] = {
    "x": array(_shape, (*FLOATS, "float8_e4m3fn", "float8_e5m2"), (*ANY, "broadcast"))
}

FAMILIES = {
    name: family(name, _settings(shapes), _settings(large), options, benches, *configs)
    for name, shapes, large, options, benches, *configs in (
        ("softmax", _SHAPES, _LARGE_SHAPES, _SOFTMAX, _BENCHES),
        ("log_softmax", _SHAPES, _LARGE_SHAPES, _SOFTMAX, _BENCHES),
        ("layer_norm", _SHAPES, _LARGE_SHAPES, _LAYER_NORM, _BENCHES),
        ("rms_norm", _SHAPES, _LARGE_SHAPES, _RMS_NORM, _BENCHES),
        ("quantize", _SHAPES, _LARGE_SHAPES, _QUANTIZE, _QUANTIZE_BENCHES),
        (
            *("quantize_nvfp4", _NVFP4_SHAPES, ((512, 1024),), _NVFP4, _BENCHES[:1]),
            NvFp4Config(256, 4, 1),
        ),
        (
            *("nonfinite_report", _SHAPES, _LARGE_SHAPES, _NONFINITE, _BENCHES[:1]),
            NonfiniteConfig(256, 8, 1, False, 3),
        ),
    )
}
