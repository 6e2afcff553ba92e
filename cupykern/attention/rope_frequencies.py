"""rope_inv_freq: the frequencies of rotary positions, with the scalings of long contexts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import arguments, targets
from ..typing import Array

_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL = {
    "yarn": (
        *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
}
_ALWAYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def rope_inv_freq(
    dim: int,
    theta: float,
    scaling: Mapping[str, Any] | None = None,
    *,
    target: str | None = None,
) -> tuple[Array, float]:
    """(inv_freq, attention_factor) for `rope_and_cache`, for heads with `dim` rotated elements.

    >>> inv_freq, attention_factor = cupykern.rope_inv_freq(8, 10000.0, target="host")
    >>> print(inv_freq, attention_factor)
    [1.    0.1   0.01  0.001] 1.0

    dim: even; with a partial_rotary_factor, head_dim times that factor.
    theta: positive base of the frequencies theta^(-2 i / dim); rope_theta in config.json.
    scaling: rope_scaling or rope_parameters of Hugging Face's config.json; None: "default".  Its
        rope_type (or type) is "default"; "linear", with factor; "llama3", with factor,
        low_freq_factor, high_freq_factor and original_max_position_embeddings; or "yarn", with
        factor and original_max_position_embeddings, and optionally beta_fast (32), beta_slow (1),
        attention_factor, mscale, mscale_all_dim and truncate (True).
    target: "cuda", "hip", "host", or None for the GPU if there is one.

    Returns inv_freq, float32 (dim / 2,) on `target`, and attention_factor, which is 1.0 except for
    yarn.  They are what Hugging Face's `ROPE_INIT_FUNCTIONS` return, computed in FP64 and rounded
    once.  YaRN's factor multiplies cosines and sines of q and k, as in Hugging Face: it is
    attention_factor if given; else, with mscale and mscale_all_dim, m(mscale) / m(mscale_all_dim);
    else m(1), where m(s) = 0.1 s log(factor) + 1.

    Raises TypeError and ValueError (dim, theta, unknown, missing or illegal scaling), and
    targets.UnavailableError.  Formulas: Su et al., RoFormer, arXiv:2104.09864; YaRN: Peng et al.,
    arXiv:2309.00071.
    """
    if isinstance(dim, bool) or not isinstance(dim, (int, np.integer)):
        raise TypeError(f"dim must be an integer; got {type(dim).__name__}")
    if dim < 2 or dim % 2:
        raise ValueError(f"dim must be even and positive; got {dim}")
    theta = _positive("theta", theta)
    scaling = _checked(scaling, theta)
    frequencies = theta ** (-np.arange(0, dim, 2) / dim)
    attention_factor = 1.0
    if scaling["rope_type"] == "linear":
        frequencies = frequencies / scaling["factor"]
    elif scaling["rope_type"] == "llama3":
        frequencies = _llama3(frequencies, scaling)
    elif scaling["rope_type"] == "yarn":
        frequencies = _yarn(frequencies, int(dim), theta, scaling)
        attention_factor = _attention_factor(scaling)
    xp = targets.get(target).xp
    return xp.asarray(frequencies.astype(np.float32)), attention_factor


def _positive(name: str, value: Any) -> float:
    number = arguments.finite_float(name, value, 0.0)
    if number <= 0:
        raise ValueError(f"{name} must be positive; got {value}")
    return number


def _checked(scaling: Any, theta: float) -> dict[str, Any]:
    """`scaling` with its rope_type, and numbers as floats.  Raises TypeError and ValueError."""
    if scaling is None:
        return {"rope_type": "default"}
    if not isinstance(scaling, Mapping):
        raise TypeError(f"scaling must be a mapping or None; got {type(scaling).__name__}")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise ValueError(f"scaling's rope_type must be one of {', '.join(_NEEDED)}; got {kind!r}")
    given = {name: x for name, x in scaling.items() if x is not None}
    for name in ("mscale", "mscale_all_dim"):
        if given.get(name) == 0:  # counts as not given, as in Hugging Face
            del given[name]
    needed, optional = _NEEDED[kind], _OPTIONAL.get(kind, ())
    if missing := [name for name in needed if name not in given]:
        raise ValueError(f"scaling of rope_type {kind!r} lacks {', '.join(missing)}")
    if unknown := given.keys() - {*_ALWAYS, *needed, *optional}:
        names = ", ".join(sorted(map(str, unknown)))
        raise ValueError(f"scaling of rope_type {kind!r} has no {names}")
    if given.get("rope_theta", theta) != theta:
        raise ValueError(f"scaling's rope_theta must be theta; got {given['rope_theta']}, {theta}")
    truncate = given.pop("truncate", True)
    arguments.check_flags(truncate=truncate)
    found = {x: _positive(f"scaling's {x}", given[x]) for x in (*needed, *optional) if x in given}
    if kind == "llama3" and found["low_freq_factor"] >= found["high_freq_factor"]:
        raise ValueError("scaling's low_freq_factor must be less than its high_freq_factor")
    return {**found, "rope_type": kind, "truncate": truncate}


def _llama3(frequencies: np.ndarray, s: dict[str, Any]) -> np.ndarray:
    low, high = s["low_freq_factor"], s["high_freq_factor"]
    turns = s["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # in the context
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - kept) * frequencies / s["factor"] + kept * frequencies


def _yarn(frequencies: np.ndarray, dim: int, theta: float, s: dict[str, Any]) -> np.ndarray:
    if theta == 1:
        raise ValueError("theta must not be 1 with YaRN")

    def pair_of(turns: float) -> float:
        """Index of the pair that makes `turns` turns within the context."""
        context = s["original_max_position_embeddings"]
        return dim * math.log(context / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = (pair_of(s.get(name, x)) for name, x in (("beta_fast", 32.0), ("beta_slow", 1.0)))
    if s["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # as Hugging Face does
    divided = np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
    return divided * frequencies / s["factor"] + (1 - divided) * frequencies


def _attention_factor(s: dict[str, Any]) -> float:
    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(s["factor"]) + 1.0 if s["factor"] > 1 else 1.0

    if "attention_factor" in s:
        return float(s["attention_factor"])
    if "mscale" in s and "mscale_all_dim" in s:
        return magnitude(s["mscale"]) / magnitude(s["mscale_all_dim"])
    return magnitude(1.0)
