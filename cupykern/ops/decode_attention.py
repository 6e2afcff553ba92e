"""decode_attention: the newest queries of each sequence against a contiguous or paged KV cache."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from .. import arguments, reference
from ..arrays import assign, in_elements, maker
from ..attention import decode_config, decode_plan
from ..attention.attention_task import ScoreOptions
from ..attention.decode_config import MAX_QUERIES, DecodeConfig
from ..attention.decode_plan import DecodePlan
from ..attention.formulas import Ranges
from ..op import Op
from ..runtime import plans
from ..targets import is_cupy
from ..typing import Array, Factor, FormulaLike, Operands, Results
from .checks.attention import padded_size, padded_to
from .checks.attention_formulas import NONE, check_formulas, read_formulas
from .checks.cache_scales import as_hnd, check_scales, numbers_and_arrays
from .checks.caches import check_caches, check_keys, check_pages, check_table
from .checks.score_options import (
    CAUSAL,
    as_int32,
    check_lens,
    check_options,
    check_positions,
    check_window,
)
from .problems import decode_attention as problems
from .problems.decode_attention import task_of


def decode_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    seq_lens: Array | None = None,
    block_table: Array | None = None,
    layout: Literal["hnd", "nhd"] = "hnd",
    k_scale: Factor | None = None,
    v_scale: Factor | None = None,
    causal: bool = True,
    scale: Factor | None = None,
    window: tuple[int, int] | None = None,
    softcap: Factor | None = None,
    score: FormulaLike | None = None,
    mask: FormulaLike | None = None,
    operands: Operands | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    config: DecodeConfig | None = None,
) -> Results:
    """Attention of the newest queries of each sequence against its cache of keys and values.

    >>> q = np.ones((2, 8, 1, 64), np.float16)  # one new token for each of 2 sequences
    >>> k = v = np.ones((2, 2, 512, 64), np.float16)  # room for 512 keys of 2 KV heads
    >>> lens = np.array([100, 512], np.int32)
    >>> cupykern.decode_attention(q, k, v, seq_lens=lens).shape
    (2, 8, 1, 64)
    >>> cupykern.decode_attention(q, k, v, seq_lens=lens, window=(127, 0)).shape
    (2, 8, 1, 64)

    Arguments:

    q: (B, H, Sq, D), float16 or bfloat16, Sq at most 64; the new tokens' keys are in the cache
        already.
    k_cache, v_cache: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv) of q's dtype, float8_e4m3fn or int8.  H
        must be a multiple of Hkv; query head h uses KV head h // (H // Hkv).  D and Dv are 1 to
        256; caches whose D or Dv is not a multiple of 8 (8-bit caches: of 16) are copied.
    seq_lens: int32 (numpy: also int64) (B,), the number of valid keys of each sequence; None: Sk.
        Cache contents beyond it never reach a result.
    block_table: int32 (numpy: also int64) (B, max_pages), for paged caches of shape
        (num_pages, Hkv, page, D): key j of sequence b is key j % page of page
        block_table[b, j // page].  Sk is max_pages * page; any page size.
    layout: order of the caches' dims.  "hnd": as above.  "nhd": (B, Sk, Hkv, D), paged
        (num_pages, page, Hkv, D), as vLLM and FlashInfer store them.  Neither is copied.
    k_scale, v_scale: factors of 8-bit caches: numbers (None: 1), or float32 arrays of shape (),
        (Hkv,), or, one scale per token and head, of the cache's shape without D, as
        `rope_and_cache` fills them.
    causal: True: the queries are the last Sq tokens of the sequence, and query i sees keys
        j <= seq_len - Sq + i.  False: each query sees all keys.
    scale: finite real factor of the scores; None: 1 / sqrt(D).
    window, softcap, score, operands, alibi_slopes, sinks: as for `attention`; query i is at
        position seq_len - Sq + i.  Keys before the window are not read.
    mask: a formula, as for `attention`, where i is the query's position.  Tiles that it masks
        fully are not read.
    return_lse: also return the log-sum-exp of the scores (natural log), float32 (B, H, Sq).
    out: (B, H, Sq, Dv) array of q's dtype to write into; must not overlap an input.
    config: DecodeConfig; None: chosen for the shape.

    Returns out, (B, H, Sq, Dv) of q's dtype, or (out, lse).

    The result of a sequence depends only on its own queries, keys and length.  It is bitwise the
    same in any batch, in contiguous and paged caches, and in a cache of any size.

    seq_lens and block_table in numpy arrays are checked (the table up to each length) and copied to
    the GPU.  GPU arrays are not read on the host: the kernel clamps lengths to [0, Sk] and page
    numbers to [0, num_pages).

    A query that sees no key gives zeros and lse -inf.  NaN and infinities in k_cache reach only
    queries that see the key.  In v_cache they can also turn earlier queries of the same sequence
    into NaN (0 * NaN) and, at keys masked by a formula, all its queries.  q and caches may have any
    strides; those whose rows are not contiguous or not 16-byte aligned are copied first.

    Raises TypeError (wrong kind of argument or dtype), NotImplementedError (float32, float64),
    ValueError (shape, layout, value, overlap, device, config), and SyntaxError and NameError
    (formulas).

    Formula: Vaswani et al., arXiv:1706.03762.  Keys are split over blocks as in Flash-Decoding;
    paged caches follow PagedAttention (Kwon et al., arXiv:2309.06180).  Error bound:
    `reference.decode_attention_bound`.
    """
    if window is not None:  # checked before the key is built: (3, 0) == (3.0, False)
        window = check_window(window, False)
    arrays = (q, k_cache, v_cache, seq_lens, block_table)
    call: tuple[Any, ...] = (
        "decode_attention",
        layout,
        causal,
        scale,
        return_lse,
        config,
        window,
        softcap,
    )
    more: tuple[Any, ...] = (alibi_slopes, sinks)
    formulas, scales = NONE, (None, None)
    if k_scale is not None or v_scale is not None:
        numbers, scales = numbers_and_arrays(q, k_scale, v_scale)
        call, more = (*call, *numbers), (*more, *scales)
    if score is not None or mask is not None or operands is not None:
        formulas = read_formulas(score, mask, operands, q)
        call, more = (*call, formulas.key), (*more, *formulas.arrays)
    if len(more) == 2 and alibi_slopes is None and sinks is None and formulas is NONE:
        key, known, places = plans.find(call, out, *arrays)
    else:
        key, known, places = plans.find(call, out, *arrays, *more)
    if known is not None:
        # Equal keys pass the same checks.  numpy arrays, whose contents are checked, have no key.
        make, plan = known
        y = make(plan.shape, q.dtype) if out is None else out
        lse = make(plan.shape[:3], np.float32) if return_lse else None
        places = (*places, y.data.ptr, None if lse is None else lse.data.ptr)
        plan.launch(places, *arrays, y, lse, alibi_slopes, sinks, *scales, formulas.arrays)
        return y if lse is None else (y, lse)
    target = arguments.target_of("q", q)
    k, v, max_keys = _check_arrays(q, k_cache, v_cache, block_table, layout)
    shape = q.shape
    seq_lens = check_lens(seq_lens, q, shape[0], max_keys, "the caches'")
    if block_table is not None:
        check_pages(block_table, seq_lens, k.shape[0], k.shape[2])
    arguments.check_flags(causal=causal, return_lse=return_lse)
    scale = arguments.finite_float("scale", scale, 1.0 / math.sqrt(shape[3]))
    if abs(scale) * math.log2(math.e) > float(np.finfo(np.float32).max):
        raise ValueError(f"scale * log2(e) must be finite in FP32; got scale {scale}")
    options = check_options(
        q, shape[0], shape[1], causal, scale, window, softcap, alibi_slopes, sinks
    )
    ranges = Ranges(shape[0], shape[1], k.shape[1], max(max_keys, shape[2]), max_keys)
    placed, given = check_formulas(formulas, q, ranges, options[0])
    general = options[0] not in (ScoreOptions(), CAUSAL) or placed is not None
    if general:
        check_positions(options[0], max_keys)
    scale_arrays, scale_numbers = check_scales(
        q, k_cache, k.shape[1], k_scale, v_scale, "of tokens"
    )
    kv_scales: Any = None
    if k.dtype != q.dtype:
        kv_scales = as_hnd(scale_arrays, scale_numbers, layout)
    out_shape = (*shape[:3], v_cache.shape[3])
    if out is not None:
        others = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
        for name, x in (
            *(("seq_lens", seq_lens), ("block_table", block_table)),
            *(("alibi_slopes", options[1]), ("sinks", options[2])),
            *zip(("k_scale", "v_scale"), scale_arrays, strict=True),
            *formulas.by_name.items(),
        ):
            if x is not None and is_cupy(x) == is_cupy(out):
                others[name] = x
        arguments.check_new_out(out, out_shape, q.dtype, others)
    with arguments.on_device(target):
        make = maker(target.xp)
        y = make(out_shape, q.dtype) if out is None else out
        lse = make(shape[:3], np.float32) if return_lse else None
        if y.size:
            lens, table = as_int32(target, seq_lens), as_int32(target, block_table)
            step = 16 // k.itemsize  # elements per 16-byte vector
            padded = any(x.shape[3] % step for x in (q, v))
            into = y if in_elements(y) and not padded else None
            if into is None:
                size = padded_size(out_shape[3], step)
                into = make((*shape[:3], size), q.dtype)
            if padded:
                q, k, v = (padded_to(x, step) for x in (q, k, v))
            arrays = q, k, v, lens, table
            plan = decode_plan.run(
                *(target, arrays, into, lse, max_keys, scale, config, options),
                *(placed, given, kv_scales),
            )
            if into is not y:
                assign(y, into[..., : out_shape[3]])
            elif plan is not None and all(
                x is y
                for x, y in zip(
                    (*options[1:], *given), (alibi_slopes, sinks, *formulas.arrays), strict=True
                )
            ):
                plans.remember(key, (make, plan))
    return y if lse is None else (y, lse)


def cached_decode(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    seq_lens: Array | None = None,
    block_table: Array | None = None,
    layout: str = "hnd",
    k_scale: Factor | None = None,
    v_scale: Factor | None = None,
    causal: bool = True,
    scale: Factor | None = None,
    softcap: Factor | None = None,
    config: DecodeConfig | None = None,
) -> DecodePlan | None:
    """The cached plan of `decode_attention` with these arguments and return_lse=True, or None."""
    call: tuple[Any, ...]
    call = "decode_attention", layout, causal, scale, True, config, None, softcap
    arrays: tuple[Any, ...] = (q, k_cache, v_cache, seq_lens, block_table)
    if k_scale is not None or v_scale is not None:
        numbers, scales = numbers_and_arrays(q, k_scale, v_scale)
        call, arrays = (*call, *numbers), (*arrays, None, None, *scales)
    known = plans.find(call, None, *arrays)[1]
    return None if known is None else known[1]


def _check_arrays(
    q: Array, k: Array, v: Array, table: Array | None, layout: Any
) -> tuple[Array, Array, int]:
    """(k as "hnd", v as "hnd", most keys per sequence).  Raises TypeError and ValueError."""
    names = "k_cache", "v_cache"
    k, v = check_caches(q, k, v, layout, table is not None, ndim=4, names=names)
    if q.shape[2] > MAX_QUERIES:
        raise ValueError(f"q must have at most {MAX_QUERIES} queries; got shape {q.shape}")
    if table is not None:
        return k, v, check_table(table, q, q.shape[0], k)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"caches and q differ in the batch: {k.shape[0]} and {q.shape[0]}")
    return k, v, check_keys(k.shape[2] if k.shape[0] else 0)


# --- the op's record -----------------------------------------------------------------------------


OP = Op(
    name="decode_attention",
    run=decode_attention,
    reference=reference.decode_attention,
    bound=reference.decode_attention_bound,
    draw_problem=problems.draw_problem,
    bench_problem=problems.bench_problem,
    bench_shapes=problems.bench_shapes,
    inputs=problems.make_inputs,
    work=problems.work,
    variants=problems.variants,
    configs=lambda problem, arch: decode_config.configs(task_of(problem), arch),
    variant=problems.variant,
    sample=problems.sample,
    dtypes=("float16", "bfloat16", "bfloat16:float8_e4m3fn", "bfloat16:int8"),
)
