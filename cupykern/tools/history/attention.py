"""Random calls of the attention ops."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...op import Draw
from .draws import (
    BEGINS,
    FLOATS,
    DrawValue,
    Setting,
    ShapeOf,
    array,
    family,
    often_none,
    one_of,
    result,
)
from .memory import Alias, Array, Blocks, Integers, Operands, Shape

_DTYPES = ("float16", "bfloat16")
_ORDERS = ("bhsd", "bhsd", "bshd")
_HEADS = (
    *("C", "C", "C", "gap", "gap of 8", "shifted"),
    *("rows negative", "heads negative", "heads inside", "broadcast"),
)
_PACKED = ("C", "C", "C", "gap", "gap of 8", "shifted", "heads negative")
# (B, H, Hkv, Sq, Sk, D, Dv).  If heads and rows are equal in number, any layout is legal.
_SIZES = (
    *((1, 2, 2, 64, 64, 64, 64), (2, 6, 2, 40, 72, 16, 24), (1, 16, 16, 16, 16, 64, 64)),
    (1, 2, 2, 16, 0, 64, 64),
)
_LARGE_SIZES = (
    *((1, 8, 8, 256, 256, 128, 128), (1, 8, 4, 128, 384, 64, 64), (2, 4, 4, 256, 256, 256, 256)),
)
_DECODE_SIZES = (
    *((1, 2, 1, 1, 40, 16, 16), (2, 6, 2, 1, 300, 64, 64), (1, 2, 2, 4, 64, 64, 24)),
    *((1, 2, 2, 1, 0, 16, 16), (1, 2, 2, 1, 2, 16, 16)),
)
_CASCADE_SIZES = (
    *((2, 6, 2, 1, 40, 16, 16), (2, 4, 2, 3, 32, 64, 32), (1, 2, 2, 1, 2, 16, 16)),
    *((33, 2, 2, 2, 8, 16, 16), (1, 2, 2, 1, 0, 16, 16)),
)
_LARGE_CASCADE_SIZES = ((4, 16, 2, 1, 256, 128, 128), (96, 8, 2, 1, 64, 64, 64))
_LARGE_DECODE_SIZES = (
    *((2, 16, 2, 1, 1024, 128, 128), (1, 32, 1, 4, 2048, 64, 64), (2, 2, 2, 1, 1200, 256, 256)),
)
# If heads and rows are equal in number, any layout is legal.
_MERGE_SIZES = ((40, 4, 64), (2, 3, 5, 128), (1, 6, 6, 24), (1, 2, 2, 5))
_LARGE_MERGE_SIZES = ((256, 32, 128), (2, 8, 300, 64))
# (D, query lengths, key lengths).
_PACKS = ((16, (3, 40, 0), (5, 40, 7)),)
_LARGE_PACKS = ((64, (100, 300, 1), (200, 300, 65)), (128, (128,) * 4, (128,) * 4))


def _settings(
    sizes: tuple[Shape, ...], layouts: tuple[str, ...] = ("bhsd",)
) -> tuple[Setting, ...]:
    names = "b", "h", "h_kv", "sq", "sk", "d", "dv", "dtype", "layout"
    return tuple(
        dict(zip(names, (*size, dtype, layout), strict=True))
        | {"qk_accumulate": "float16" if dtype == "float16" else "float32"}
        for size in sizes
        for dtype in _DTYPES
        for layout in layouts
    )


def _varlen_settings(packs: tuple[Any, ...]) -> tuple[Setting, ...]:
    """Concatenated and paged keys; if a page has as many keys as heads, any layout is legal."""
    names = "h", "h_kv", "d", "lengths_q", "lengths_k", "dtype", "page", "order", "cache"
    return tuple(
        dict(zip(names, (4, 2, *pack, dtype, *keys, cache or dtype), strict=True))
        for pack in packs
        for dtype in _DTYPES
        for keys, cache in (
            *(((None, "hnd"), None), ((16, "hnd"), None), ((16, "nhd"), None)),
            *(((2, "nhd"), None), ((16, "hnd"), "int8"), ((16, "hnd"), "float8_e4m3fn")),
        )
    )


def _merge_settings(sizes: tuple[Shape, ...]) -> tuple[Setting, ...]:
    return tuple(
        {"shape": size, "dtype": dtype, "layout": layout}
        for size in sizes
        for dtype in (*_DTYPES, "float32")
        for layout in ("bhsd", "bshd")
    )


def _merged(s: Setting) -> Shape:
    return s["shape"]


def _merged_lse(s: Setting) -> Shape:
    *outer, first, second, _ = s["shape"]
    swaps = len(s["shape"]) == 3 or s["layout"] == "bshd"
    return (*outer, second, first) if swaps else (*outer, first, second)


def _decode_settings(
    sizes: tuple[Shape, ...], pages: tuple[int | None, ...]
) -> tuple[Setting, ...]:
    return tuple(
        {**setting, "page": page, "order": order, "cache": cache or setting["dtype"]}
        for setting in _settings(sizes)
        for page in pages
        for order, cache in (
            ("hnd", None),
            ("hnd", "int8"),
            ("nhd", None),
            ("nhd", "float8_e4m3fn"),
        )
    )


def _cascade_settings(
    sizes: tuple[Shape, ...], pages: tuple[int | None, ...]
) -> tuple[Setting, ...]:
    """Those of decoding with 33, 0 or 200 shared keys in turn; with 2, the number of KV heads, if
    sequences have at most 2 keys: then any layout is legal."""
    lengths = 33, 0, 200
    return tuple(
        {**setting, "shared": lengths[number % 3] if setting["sk"] > 2 else 2}
        for number, setting in enumerate(_decode_settings(sizes, pages))
    )


def _bhsd(heads: str, length: str, dim: str) -> ShapeOf:
    def shape(s: Setting) -> Shape:
        rows = (s[heads], s[length]) if s["layout"] == "bhsd" else (s[length], s[heads])
        return s["b"], *rows, s[dim]

    return shape


def _thd(heads: str, lengths: str, dim: str) -> ShapeOf:
    return lambda s: (sum(s[lengths]), s[heads], s[dim])


def _keys(dim: str) -> ShapeOf:
    """Shape of attention_varlen's keys, concatenated or paged."""

    def shape(s: Setting) -> Shape:
        if s["page"] is None:
            return sum(s["lengths_k"]), s["h_kv"], s[dim]
        return *_rows_of_pages(s), s[dim]

    return shape


def _rows_of_pages(s: Setting) -> Shape:
    rows = (s["h_kv"], s["page"]) if s["order"] == "hnd" else (s["page"], s["h_kv"])
    return _pages_of(s).size + 1, *rows


def _pages_of(s: Setting) -> np.ndarray:
    """A block table; every sequence has as many pages as the longest needs."""
    room = -(-max(s["lengths_k"]) // s["page"])
    return np.arange(len(s["lengths_k"]) * room).reshape(-1, room)


def _pages_of_keys(draw: Draw, s: Setting) -> Integers | None:
    if s["page"] is None:
        return None
    return _integers(draw, tuple(map(tuple, _pages_of(s)[:: draw.choice((1, -1))].tolist())))


def _lens_of_keys(draw: Draw, s: Setting) -> Integers | None:
    """seq_lens_k; rarely drawn with concatenated keys, for which it is illegal."""
    given = s["page"] is not None or draw.choice((*[False] * 9, True))
    return _integers(draw, s["lengths_k"]) if given else None


def _offsets_of_keys(draw: Draw, s: Setting) -> Any:
    """cu_seqlens_k; rarely drawn with pages, for which it is illegal."""
    given = s["page"] is None or draw.choice((*[False] * 9, True))
    return _offsets("lengths_k")(draw, s) if given else None


def _mask(draw: Draw, s: Setting) -> Any:
    batch = draw.choice(((1, 1), (s["b"], 1), (s["b"], s["h"])))
    if draw.choice((True, False)):
        q_block, kv_block = draw.choice((64, 128)), draw.choice((64, 128))
        return Blocks(batch, s["sq"], s["sk"], q_block, kv_block, draw.choice((0, 0, 3)))
    shape = draw.choice(((*batch, s["sq"], s["sk"]), (s["sq"], s["sk"]), (*batch, 1, s["sk"])))
    dtype = draw.choice(("bool", "bool", *FLOATS))
    return Array(shape, dtype, draw.choice(("C", "C", "gap", "negative")), draw.choice(BEGINS))


def _integers(draw: Draw, values: tuple[Any, ...]) -> Integers:
    layout = draw.choice(("C", "C", "C", "every other", "gap"))
    return Integers(values, draw.choice((True, True, False)), layout, draw.choice((0, 0, 1)))


def _offsets(lengths: str) -> DrawValue:
    return lambda draw, s: _integers(draw, tuple(np.cumsum((0, *s[lengths])).tolist()))


def _longest(lengths: str) -> DrawValue:
    return lambda draw, s: max(s[lengths]) + draw.choice((0, 0, 5, 64))


def _num_pages(s: Setting) -> int:
    return s["b"] * -(-s["sk"] // s["page"]) + 1


def _cache_rows(s: Setting) -> Shape:
    batch, keys = (s["b"], s["sk"]) if s["page"] is None else (_num_pages(s), s["page"])
    return batch, *((s["h_kv"], keys) if s["order"] == "hnd" else (keys, s["h_kv"]))


def _cache(dim: str) -> DrawValue:
    return array(lambda s: (*_cache_rows(s), s[dim]), "cache", _HEADS)


def _shared(dim: str) -> DrawValue:
    """Shared keys or values, which precede those of every sequence."""

    def shape(s: Setting) -> Shape:
        heads, length = s["h_kv"], s["shared"]
        return 1, *((heads, length) if s["order"] == "hnd" else (length, heads)), s[dim]

    return array(shape, "dtype", _HEADS)


def _cache_scale(rows: ShapeOf) -> DrawValue:
    """rows: the shape of per-token scales."""

    def scale(draw: Draw, s: Setting) -> Any:
        if s["cache"] == s["dtype"]:
            return None
        tokens = Array(rows(s), "float32", draw.choice(("C", "C", "gap")))
        heads = Array((s["h_kv"],), "float32", draw.choice(("C", "every other")))
        return draw.choice((None, 0.5, 2, Array((), "float32"), heads, tokens))

    return scale


def _seq_lens(draw: Draw, s: Setting) -> Integers:
    return _integers(draw, tuple(draw.choice((0, s["sk"] // 2, s["sk"])) for _ in range(s["b"])))


def _block_table(draw: Draw, s: Setting) -> Integers | None:
    if s["page"] is None:
        return None
    pages = np.arange(_num_pages(s) - 1)[:: draw.choice((1, -1))].reshape(s["b"], -1)
    return _integers(draw, tuple(map(tuple, pages.tolist())))


_SCALES = one_of(None, None, 1.0, 1, 0.3, -0.3, 0.0)
_WINDOWS = one_of(None, None, None, (5, 0), (20, 3), (0, -1), (-1, 2), (1000, -1))
_CAPS = one_of(None, None, None, 30.0, 2.0)


def _numbers(draw: Draw, heads: int, batch: int | None = None) -> Array | None:
    """None or a float32 array, per head or per batch element and head."""
    shape = draw.choice(((heads,), (heads,) if batch is None else (batch, heads)))
    layout = draw.choice(("C", "C", "gap", "negative"))
    return draw.choice((None, None, Array(shape, "float32", layout, draw.choice((0, 0, 1)))))


def _operands(draw: Draw, s: Setting) -> Operands | None:
    if draw.choice((True, False, False, False)):
        return None
    return Operands((("t", Array((s["h"],), "float32", draw.choice(("C", "negative")))),))


_OPTIONS: dict[str, DrawValue] = {
    "window": _WINDOWS,
    "softcap": _CAPS,
    "sinks": lambda draw, s: _numbers(draw, s["h"]),
    "score": one_of(*[None] * 4, "s + 0.01 * (j - 3 * h) - t[h]", "s * 0.5 + t[h]"),
    "operands": _operands,
}
_MASK_FORMULA = one_of(*[None] * 5, "(j <= i) & (i - j < 30) | (j < 2)")
_OUT = ("C", "gap", "gap of 8", "shifted", "heads inside")
_ALIASES = Alias("q", "heads negative"), Alias("q")
_ATTENTION: dict[str, DrawValue] = {
    "q": array(_bhsd("h", "sq", "d"), "dtype", _HEADS),
    "k": array(_bhsd("h_kv", "sk", "d"), "dtype", _HEADS),
    "v": array(_bhsd("h_kv", "sk", "dv"), "dtype", _HEADS),
    "causal": one_of(False, True),
    "causal_align": one_of("top_left", "bottom_right", None),
    "mask": often_none(_mask),
    "seq_lens": often_none(_seq_lens),
    "input_pos": one_of(0, 0, 0, 1, 20),
    "scale": _SCALES,
    **_OPTIONS,
    "alibi_slopes": lambda draw, s: _numbers(draw, s["h"], s["b"]),
    "layout": lambda draw, s: draw.choice((*[s["layout"]] * 6, "bhsd", "bshd")),
    "qk_accumulate": lambda draw, s: draw.choice(("float32", "float32", s["qk_accumulate"])),
    "return_lse": one_of(False, False, True),
    "return_row_stats": one_of(False, False, True),
    "algorithm": one_of(*["flash"] * 5, "naive"),
    "out": result(_bhsd("h", "sq", "dv"), "dtype", _OUT, *_ALIASES),
}
_VARLEN: dict[str, DrawValue] = {
    "q": array(_thd("h", "lengths_q", "d"), "dtype", _PACKED),
    "k": array(_keys("d"), "cache", _PACKED),
    "v": array(_keys("d"), "cache", _PACKED),
    "cu_seqlens_q": _offsets("lengths_q"),
    "cu_seqlens_k": _offsets_of_keys,
    "max_seqlen_q": _longest("lengths_q"),
    "max_seqlen_k": _longest("lengths_k"),
    "block_table": _pages_of_keys,
    "seq_lens_k": _lens_of_keys,
    "k_scale": _cache_scale(_rows_of_pages),
    "v_scale": _cache_scale(_rows_of_pages),
    "layout": lambda draw, s: draw.choice((*[s["order"]] * 6, "hnd", "nhd")),
    "causal": one_of(False, True),
    "causal_align": one_of("top_left", "bottom_right"),
    "scale": _SCALES,
    **_OPTIONS,
    "mask": _MASK_FORMULA,
    "alibi_slopes": lambda draw, s: _numbers(draw, s["h"], len(s["lengths_q"])),
    "return_lse": one_of(False, True),
    "out": result(_thd("h", "lengths_q", "d"), "dtype", _OUT, *_ALIASES),
}
_DECODE: dict[str, DrawValue] = {
    "q": array(_bhsd("h", "sq", "d"), "dtype", _HEADS),
    "k_cache": _cache("d"),
    "v_cache": _cache("dv"),
    "seq_lens": often_none(_seq_lens),
    "block_table": _block_table,
    "layout": lambda draw, s: draw.choice((*[s["order"]] * 6, "hnd", "nhd")),
    "k_scale": _cache_scale(_cache_rows),
    "v_scale": _cache_scale(_cache_rows),
    "causal": one_of(True, False),
    "scale": _SCALES,
    **_OPTIONS,
    "mask": _MASK_FORMULA,
    "alibi_slopes": lambda draw, s: _numbers(draw, s["h"], s["b"]),
    "return_lse": one_of(False, True),
    "out": result(_bhsd("h", "sq", "dv"), "dtype", _OUT, *_ALIASES),
}
_CASCADE: dict[str, DrawValue] = {
    **{name: _DECODE[name] for name in ("q", "k_cache", "v_cache", "seq_lens", "block_table")},
    "shared_k": _shared("d"),
    "shared_v": _shared("dv"),
    **{name: _DECODE[name] for name in ("layout", "k_scale", "v_scale", "scale", "softcap")},
    "return_lse": one_of(False, True),
    "out": result(_bhsd("h", "sq", "dv"), "dtype", _OUT, *_ALIASES),
}
_MERGE: dict[str, DrawValue] = {
    "out1": array(_merged, "dtype", _HEADS),
    "lse1": array(_merged_lse, ("float32",), _HEADS),
    "out2": array(_merged, "dtype", _HEADS),
    "lse2": array(_merged_lse, ("float32",), _HEADS),
    "layout": lambda draw, s: draw.choice((*[s["layout"]] * 6, "bhsd", "bshd")),
    "out": result(_merged, "dtype", _OUT, Alias("out1"), Alias("out2"), Alias("out1", "shifted")),
}

FAMILIES = {
    "attention": family(
        *("attention", _settings(_SIZES, _ORDERS), _settings(_LARGE_SIZES, _ORDERS), _ATTENTION),
        (((1, 4, 256, 64), "float16"), ((1, 4, 256, 64, 1), "float16")),
    ),
    "attention_varlen": family(
        *("attention_varlen", _varlen_settings(_PACKS), _varlen_settings(_LARGE_PACKS), _VARLEN),
        (((2, 4, 64, 64), "float16"), ((2, 4, 64, 128), "float16")),
    ),
    "merge_attention": family(
        *("merge_attention", _merge_settings(_MERGE_SIZES), _merge_settings(_LARGE_MERGE_SIZES)),
        _MERGE,
        (((40, 4, 64), "float16"), ((4096, 32, 128), "float16")),
    ),
    "decode_attention": family(
        *("decode_attention", _decode_settings(_DECODE_SIZES, (None, None, 16))),
        *(_decode_settings(_LARGE_DECODE_SIZES, (None, 64)), _DECODE),
        (((1, 4, 2, 256, 64), "float16"), ((1, 4, 2, 4096, 64), "float16")),
    ),
    "cascade_attention": family(
        *("cascade_attention", _cascade_settings(_CASCADE_SIZES, (None, None, 16))),
        *(_cascade_settings(_LARGE_CASCADE_SIZES, (None, 64)), _CASCADE),
        (((2, 4, 2, 64, 40, 64), "float16"), ((2, 4, 2, 64, 4096, 64), "float16")),
    ),
}
