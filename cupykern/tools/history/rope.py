"""Random calls of rope_and_cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...op import Draw
from .draws import (
    FLOATS,
    DrawValue,
    Setting,
    ShapeOf,
    array,
    combine,
    family,
    often_none,
    one_of,
    result,
)
from .memory import Alias, Array, Integers, Shape

_HEADS = ("C", "C", "C", "gap", "gap of 8", "shifted", "heads negative", "heads inside")
_CACHES = ("C", "C", "C", "gap", "gap of 8", "shifted", "heads inside")
# If slots of a sequence and KV heads are equal in number, any layout is legal.
_NAMES = "b", "s", "h", "h_kv", "d", "r", "slots"
_SIZES = (
    *((2, 3, 4, 2, 64, 32, 32), (1, 1, 6, 2, 128, 64, 32), (2, 4, 2, 2, 10, 4, 32)),
    (1, 2, 2, 2, 80, 8, 2),
)
_LARGE_SIZES = ((1, 256, 32, 8, 128, 64, 512), (16, 1, 32, 8, 128, 64, 32))
_PAGE, _PAGES = 8, 4
# The cache's dtype ("own": q's); "outputs": scales are output arrays, else numbers or arrays.
_KINDS = (
    *("none", "none", "own", "own", "float8_e4m3fn", "int8"),
    *("float8_e4m3fn outputs", "int8 outputs"),
)


def _settings(sizes: tuple[Shape, ...]) -> tuple[Setting, ...]:
    return tuple(
        {**dict(zip(_NAMES, size, strict=True)), **rest, "cache": cache}
        for size in sizes
        for rest in combine(
            dtype=FLOATS, order=("hnd", "nhd"), paged=(False, True), table=(False, True)
        )
        for cache in _KINDS[:: 1 if rest["dtype"] == "float16" else 3]
    )


def _has_cache(s: Setting) -> bool:
    return s["cache"] != "none"


def _cache_dtype(s: Setting) -> str:
    return s["dtype"] if s["cache"] == "own" else s["cache"].split()[0]


def _cache_shape(s: Setting) -> Shape:
    count, slots = (s["b"] * _PAGES + 1, _PAGE) if s["paged"] else (s["b"], s["slots"])
    rows = (s["h_kv"], slots) if s["order"] == "hnd" else (slots, s["h_kv"])
    return count, *rows, s["d"]


def _cache(draw: Draw, s: Setting) -> Array | None:
    if not _has_cache(s):
        return None
    return Array(_cache_shape(s), _cache_dtype(s), draw.choice(_CACHES), draw.choice((0, 0, 1, 16)))


def _heads(name: str) -> ShapeOf:
    return lambda s: (s["b"], s["s"], s[name], s["d"])


def _scale(draw: Draw, s: Setting) -> Any:
    if not _has_cache(s) or s["cache"] == "own":
        return None
    if s["cache"].endswith("outputs"):
        return Array(_cache_shape(s)[:3], "float32", draw.choice(("C", "C", "gap")))
    heads = Array((s["h_kv"],), "float32", draw.choice(("C", "every other")))
    return draw.choice((None, 0.5, 2, Array((), "float32"), heads))


def _positions(draw: Draw, s: Setting) -> Integers:
    first = draw.choice((0, 5, s["slots"] - s["s"] + 1))
    row = tuple(range(first, first + s["s"]))
    layout = draw.choice(("C", "C", "every other"))
    return Integers(draw.choice((row, (row,) * s["b"])), True, layout)


def _block_table(draw: Draw, s: Setting) -> Integers | None:
    if not s["paged"] or not _has_cache(s):
        return None
    pages = np.arange(s["b"] * _PAGES)[:: draw.choice((1, -1))].reshape(s["b"], -1)
    return Integers(tuple(map(tuple, pages.tolist())), True, draw.choice(("C", "C", "gap")))


def _inv_freq(draw: Draw, s: Setting) -> Array | None:
    if s["table"]:
        return None
    return Array((s["r"],), "float32", draw.choice(("C", "C", "every other")))


def _cos_sin(draw: Draw, s: Setting) -> Array | None:
    if not s["table"]:
        return None
    rows = draw.choice((1, s["slots"] - 1, s["slots"]))
    return Array((rows, 2 * s["r"]), "float32", draw.choice(("C", "C", "gap", "every other")))


_WEIGHT = often_none(array(lambda s: (s["d"],), FLOATS, ("C", "C", "every other", "negative")))
_ROPE: dict[str, DrawValue] = {
    "q": array(_heads("h"), "dtype", _HEADS),
    "k": array(_heads("h_kv"), "dtype", _HEADS),
    "v": array(_heads("h_kv"), "dtype", _HEADS),
    "positions": _positions,
    "k_cache": _cache,
    "v_cache": _cache,
    "inv_freq": _inv_freq,
    "cos_sin": _cos_sin,
    "interleaved": one_of(False, True),
    "attention_factor": one_of(1.0, 1, 1.25),
    "q_weight": _WEIGHT,
    "k_weight": _WEIGHT,
    "eps": one_of(1e-6, 1e-3, 0.0, 1),
    "block_table": _block_table,
    "layout": lambda draw, s: draw.choice((*[s["order"]] * 6, "hnd", "nhd")),
    "k_scale": _scale,
    "v_scale": _scale,
    "out": result(_heads("h"), "dtype", ("C", "gap", "gap of 8", "shifted"), Alias("q")),
}

FAMILIES = {
    "rope_and_cache": family(
        *("rope_and_cache", _settings(_SIZES), _settings(_LARGE_SIZES), _ROPE),
        (((1, 64, 4, 2, 64), "float16"), ((1, 4096, 32, 8, 128), "float16")),
        written=("out", "k_cache", "v_cache", "k_scale", "v_scale"),
    )
}
