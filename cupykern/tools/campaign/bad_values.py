"""Values that no op accepts, by parameter name: option values, array sizes and dtypes."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np

_NO_NUMBERS: tuple[Any, ...] = ("1", 1j, [1.0], (), True, np.zeros(2))
_NUMBERS = (*_NO_NUMBERS, math.nan, math.inf, -math.inf, 1e39, -1e39, 1e-40)
_DTYPES: tuple[Any, ...] = (
    "float63",
    "float64",
    "complex128",
    np.float64,
    np.uint16,
    7,
    [],
    object(),
)
_FLAGS: tuple[Any, ...] = (0, 1, 1.0, "yes", None, [])
_NAMES: tuple[Any, ...] = ("", "nonsense", 1, [], b"float32", 1.5)
_LENGTHS: tuple[Any, ...] = (-1, 1.5, "8", None, True, [], 2**40)

OPTIONS: dict[str, tuple[Any, ...]] = {
    "axis": (1.5, "0", None, True, [0], 99, -99, 2**40, math.nan),
    "scale": _NUMBERS,
    "alpha": _NUMBERS,
    "attention_factor": _NUMBERS,
    "k_scale": (*_NUMBERS, 0.0, 2.0**127),
    "v_scale": (*_NUMBERS, 0.0, 2.0**127),
    "eps": (*_NUMBERS, -1.0),
    "scale_a": _NUMBERS,
    "scale_b": _NUMBERS,
    "scale_b1": _NUMBERS,
    "scale_b2": _NUMBERS,
    "scale_w": _NUMBERS,
    "dtype": _DTYPES,
    "out_dtype": (*_DTYPES, "int16"),
    "compensated": _FLAGS,
    "return_stats": _FLAGS,
    "causal": _FLAGS,
    "interleaved": _FLAGS,
    "return_lse": _FLAGS,
    "return_row_stats": _FLAGS,
    "quantize": (*_NAMES, "e4m3fn", True),
    "granularity": (*_NAMES, None, "col"),
    "block": (
        *((0, 128), (128,), (1, 2, 3), (1.5, 2), (-1, 128), (2**20, 2**10)),
        *("128", None, [1, 0]),
    ),
    "layout": (*_NAMES, None, "bhds"),
    "activation": (*_NAMES, "swish"),
    "accumulate": (*_NAMES, None, "float64"),
    "epilogue": ("acc +", "acc * unknown", "row_max(acc)", "__import__('os')", 1, 1.5, b"acc"),
    "score": ("s +", "s * unknown", "s * t[h]", "__import__('os')", 1, 1.5, b"s"),
    "operands": ("s", 1, ["s"], {1: 2.0}, {"s": "1"}),
    "window": (1, (1,), (1, 2, 3), (-2, 0), (1.5, 0), ("1", 0), (True, 0)),
    "softcap": (*_NUMBERS, 0.0, -1.0),
    "precision": (*_NAMES, None, "float64"),
    "qk_accumulate": (*_NAMES, None, "float64"),
    "policy": (*_NAMES, None, "fp8"),
    "algorithm": (*_NAMES, None, "fast"),
    "causal_align": (*_NAMES, "left"),
    "input_pos": (-1, 1.5, "0", True, []),
    "max_seqlen_q": _LENGTHS,
    "max_seqlen_k": _LENGTHS,
}  # fmt: skip
"""Values of options, and of arguments that are a number or an array."""

_OF_DEFAULTS = {bool: _FLAGS, float: _NO_NUMBERS, str: _NAMES}


def options(parameter: inspect.Parameter) -> tuple[Any, ...]:
    """Return the bad values of an argument; by default what its default is not, or an object."""
    if parameter.name in OPTIONS:
        return OPTIONS[parameter.name]
    if is_array(parameter.name) or parameter.name in ("out", "config"):
        return ()
    return _OF_DEFAULTS.get(type(parameter.default), (object(),))


def is_array(name: str) -> bool:
    return name in SIZES or name in REQUIRED


ONLY_WHERE = {"block": ("granularity", "block")}
"""Options that are read only if another option has this value."""

MAY_BE_NONE_WITH = {"max_seqlen_k": "block_table"}
"""Options that have a default if another argument is given."""

ALL_AXES = (0, 1, 2, 3)
SIZES: dict[str, tuple[int, ...]] = {
    "mask": ALL_AXES,
    "weight": (-1,),
    "bias": ALL_AXES,
    "residual": ALL_AXES,
    "a": (-1,),
    "b": (-2,),
    "b1": (-2, -1),
    "b2": (-2, -1),
    "w": (0,),
    "scale_a": ALL_AXES,
    "scale_b": ALL_AXES,
    "scale_b1": ALL_AXES,
    "scale_b2": ALL_AXES,
    "scale_w": ALL_AXES,
    "q": (-1,),
    "k": ALL_AXES,
    "v": ALL_AXES,
    "k_cache": ALL_AXES,
    "v_cache": ALL_AXES,
    "shared_k": ALL_AXES,
    "shared_v": ALL_AXES,
    "seq_lens": (0,),
    "seq_lens_k": (0,),
    "block_table": (0,),
    "alibi_slopes": (-1,),
    "sinks": (0,),
    "positions": ALL_AXES,
    "inv_freq": (0,),
    "cos_sin": (1,),
    "q_weight": (0,),
    "k_weight": (0,),
    "k_scale": ALL_AXES,
    "v_scale": ALL_AXES,
    "cu_seqlens_q": (0,),
    "cu_seqlens_k": (0,),
    "out1": ALL_AXES,
    "lse1": ALL_AXES,
    "out2": ALL_AXES,
    "lse2": ALL_AXES,
}
"""Array axes whose size other arguments determine; a size that is EXTRA larger is illegal."""

EXTRA = 7919
DIMS = ("a", "b", "b1", "b2", "w", "weight", "q", "k", "v", "k_cache", "v_cache", "cu_seqlens_q",
        "cu_seqlens_k", "seq_lens", "seq_lens_k", "block_table", "inv_freq", "cos_sin",
        "q_weight", "k_weight", "out1", "lse1", "out2", "lse2", "shared_k", "shared_v")  # fmt: skip
"""Arrays with a fixed or minimum number of dims: () is illegal, and so is (1,) or (1, 1, 1)."""

REQUIRED = ("x", "a", "b", "b1", "b2", "w", "scale_w", "q", "k", "v", "k_cache", "v_cache",
            "cu_seqlens_q", "cu_seqlens_k", "seq_lens_k", "positions", "inv_freq", "cos_sin",
            "out1", "lse1", "out2", "lse2", "shared_k", "shared_v")  # fmt: skip
"""Arrays that cannot be None where the call has them."""

MAY_BE_NUMPY = ("seq_lens", "seq_lens_k", "block_table", "cu_seqlens_q", "cu_seqlens_k")
"""Arrays that a GPU call also accepts from NumPy; the call then checks their contents."""

ARRAY_DTYPES: tuple[Any, ...] = (np.float64, np.int16, np.complex128, np.uint16)
"""Dtypes that no array argument accepts."""

SAME_DTYPE = {"residual": "x", "k": "q", "v": "q", "k_cache": "q", "v_cache": "q",
              "shared_k": "q", "shared_v": "q", "out2": "out1"}  # fmt: skip
"""Arrays that must have the dtype of another argument."""
