"""Planted faults in 8-bit caches with scales, each of which a check must catch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from planted import Fault, fault_tests

from cupykern import attention_varlen, check, dtypes, inputs
from cupykern.ops.attention_varlen import OP
from cupykern.ops.decode_attention import OP as DECODE_OP
from cupykern.ops.problems.attention_varlen import VarlenProblem
from cupykern.ops.problems.decode_attention import DecodeProblem

SCALES, PAGED = "attention/cache_scales.cuh", "attention/kv_8bit.cuh"

FAULTS = {
    "scales of the first head": Fault(
        SCALES, "scales += kv_head * strides[1];", "(void)kv_head;", "scales"
    ),
    "a scale of all heads for one of tokens": Fault(
        SCALES, "if (per_token) tokens = scales;", "if (per_token) factor = *scales;", "scales"
    ),
    "strides of k's scales for v's": Fault(
        SCALES, "v(v, params.v_strides,", "v(v, params.k_strides,", "a row of v's scales"
    ),
    "k's number for v's": Fault(SCALES, "params.v_number,", "params.k_number,", "numbers"),
    "scores without their keys' scales": Fault(
        SCALES, "scores.at(m, n).values[i] *= scale;", "(void)scale;", "scales"
    ),
    "probabilities without their keys' scales": Fault(
        SCALES, ".values[i] *= scale * inverse;", ".values[i] *= inverse;", "scales"
    ),
    "the largest scale, not the largest magnitude": Fault(
        SCALES, "magnitude(scale)", "scale", "growing scales"
    ),
    "no new unit": Fault(SCALES, "unit = unit_of(largest);", "", "scales"),
    "outputs in the unit before": Fault(
        SCALES, "return before * inverse_of(unit);", "return before < 0.0f ? 0.0f : 1.0f;", "pages"
    ),
    "the first page's scales": Fault(
        PAGED, "x.tokens[page * x.page_stride +", "x.tokens[0 * x.page_stride +", "pages"
    ),
    "the first token's scale": Fault(PAGED, "key * x.stride]", "0 * x.stride]", "pages"),
    "scales past the end": Fault(
        PAGED, "exists && x.tokens;", "x.tokens;", "NaN in scales past the end"
    ),
    "codes past the end": Fault(
        PAGED, "if (from.exists && has(i, num_rows))", "if (from.exists)", "a page of NaN"
    ),
    "keys' scales for values'": Fault(
        PAGED, "kv.tile.v[threadIdx.x] = v_scale;", "kv.tile.v[threadIdx.x] = k_scale;", "pages"
    ),
    "scores without the factor": Fault(
        PAGED, "scores.at(m, n).values[i] *= scales.factor;", "(void)scores;", "pages"
    ),
    "outputs without the unit": Fault(
        PAGED, "scales.of_values ? scales.unit : of_head().v.factor", "of_head().v.factor", "pages"
    ),
    "outputs without the factor": Fault(
        PAGED, "scales.of_values ? scales.unit : of_head().v.factor", "scales.unit", "pages"
    ),
    "codes of the tile before": Fault(PAGED, "if constexpr (!kAhead) load(from);", "", "wide"),
}  # fmt: skip

MIX = ((40, 170), (65, 65), (0, 30), (1, 100), (50, 20))


def _problems() -> Iterator[tuple[str, object, object]]:
    for page, layout, scales in ((16, "nhd", "tokens"), (24, "hnd", "heads"), (8, "hnd", "number")):
        options = {"causal": True, "lse": True, "page": page, "layout": layout}
        stored = {"cache_dtype": "int8", "scales": scales}
        for name in ("pages", "scales"):
            yield name, OP, VarlenProblem(MIX, 4, 2, 16, 24, **options, **stored)
        yield "scales", DECODE_OP, DecodeProblem(2, 4, 2, 1, 300, 64, page=page, **stored)
    yield "wide", OP, VarlenProblem(MIX, 2, 1, 256, 256, page=16, cache_dtype="float8_e4m3fn")


def _check(v_scale: object, k_scale: object = None, lengths: tuple[int, int] = (20, 100)) -> None:
    """One sequence of two heads over pages of 16 keys."""
    queries, keys = lengths
    q = inputs.values("normal", (queries, 2, 16), dtypes.float16, 1)
    k, v = (
        np.random.default_rng(seed).integers(-127, 128, (8, 2, 16, 16), np.int8) for seed in (2, 3)
    )
    call = {
        "max_seqlen_q": queries, "block_table": np.array([[3, 1, 2, 6, 5, 4, 7]], np.int32),
        "seq_lens_k": np.array([keys], np.int32), "scale": 0.02, "k_scale": k_scale,
        "v_scale": v_scale,
    }  # fmt: skip
    args = q, k, v, np.array([0, queries], np.int32)
    references = OP.reference(*args, **call)
    bounds = OP.bound(*args, **call, reference=references)
    assert check.compare((attention_varlen(*args, **call),), references, bounds).ok


def _scales(seed: int) -> np.ndarray:
    return np.exp2(np.random.default_rng(seed).uniform(-2, 2, (8, 2, 16))).astype(np.float32)


def _check_growing_scales() -> None:
    """Each page's are larger than those before, and negative."""
    scale = np.empty((8, 2, 16), np.float32)
    for i, page in enumerate((3, 1, 2, 6, 5, 4, 7, 0)):
        scale[page] = -(16.0**i)
    _check(scale)


def _check_rows_of_v() -> None:
    """Scales of V a row apart where those of K are side by side."""
    wide = np.zeros((8, 2, 32), np.float32)
    wide[..., ::2] = _scales(4)
    _check(wide[..., ::2], _scales(5))


def _check_nan() -> None:
    scale = _scales(4)
    scale[7, :, 4:], scale[0] = np.nan, np.nan
    _check(scale, scale)


def _check_page_of_nan() -> None:
    """The first one, of no sequence."""
    x = inputs.values("normal", (3, 1, 16, 16), dtypes.float8_e4m3fn, 1)
    x[0] = np.nan
    q, cu = inputs.values("normal", (20, 1, 16), dtypes.float16, 2), np.array([0, 20], np.int32)
    call = {"max_seqlen_q": 20, "block_table": np.array([[2, 1]]), "seq_lens_k": np.array([20])}
    assert np.isfinite(attention_varlen(q, x, x, cu, **call)).all()


CHECKS = {
    "growing scales": _check_growing_scales,
    "a row of v's scales": _check_rows_of_v,
    "numbers": lambda: _check(0.5, 2.0),
    "a page of NaN": _check_page_of_nan,
    "NaN in scales past the end": _check_nan,
}

test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS, _problems, CHECKS
)
