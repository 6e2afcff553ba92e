"""attention and scaled_dot_product_attention: fused attention kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from .. import arguments, reference
from ..arrays import assign, in_elements, maker, packed
from ..attention import attention_plan
from ..attention.attention_hopper import AttentionHopperConfig
from ..attention.attention_plan import AttentionConfig
from ..attention.attention_task import AttentionTask, ScoreOptions
from ..attention.block_mask import BlockMask
from ..attention.formulas import Ranges
from ..op import Op
from ..runtime import plans
from ..targets import is_cupy
from ..typing import Array, Factor, FormulaLike, Namespace, Operands, Results
from .checks.attention import (
    arrays_of,
    block_arrays,
    check_accumulate,
    check_array_mask,
    check_block_mask,
    check_offset,
    check_operands,
    check_scale,
    check_shapes,
    mask_arrays,
    padded_size,
    readable,
    starts_at,
    steps,
    walks,
)
from .checks.attention_formulas import (
    NONE,
    check_formulas,
    is_formula,
    read_formulas,
)
from .checks.score_options import (
    as_int32,
    check_lens,
    check_options,
    check_positions,
    check_window,
)
from .problems import attention as problems


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    causal_align: Literal["top_left", "bottom_right"] | None = None,
    mask: Array | BlockMask | FormulaLike | None = None,
    seq_lens: Array | None = None,
    input_pos: int | None = None,
    scale: Factor | None = None,
    window: tuple[int, int] | None = None,
    softcap: Factor | None = None,
    score: FormulaLike | None = None,
    operands: Operands | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    layout: Literal["bhsd", "bshd"] = "bhsd",
    qk_accumulate: Literal["float32", "float16"] = "float32",
    return_lse: bool = False,
    return_row_stats: bool = False,
    algorithm: Literal["flash", "naive"] = "flash",
    out: Array | None = None,
    config: AttentionConfig | AttentionHopperConfig | None = None,
) -> Results:
    """Scaled dot-product attention, softmax(scale * q k^T) v, in one kernel.

    >>> q = np.ones((1, 8, 128, 64), np.float16)  # numpy: on the CPU; cupy: on the GPU
    >>> k = v = np.ones((1, 2, 128, 64), np.float16)  # 4 query heads share a KV head
    >>> cupykern.attention(q, k, v, causal=True).shape
    (1, 8, 128, 64)
    >>> cupykern.attention(q, k, v, causal=True, window=(63, 0), softcap=30.0).shape
    (1, 8, 128, 64)
    >>> slope = np.full(8, 0.1, np.float32)
    >>> cupykern.attention(
    ...     q, k, v, score="s - slope[h] * abs(i - j)", mask="(j <= i) & (i - j < 64)",
    ...     operands={"slope": slope},
    ... ).shape
    (1, 8, 128, 64)

    Arguments:

    q: (B, H, Sq, D), float16 or bfloat16.
    k, v: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv), of q's dtype.  H must be a multiple of Hkv; query
        head h uses KV head h // (H // Hkv) (grouped-query attention).  D and Dv are 1 to 256;
        arrays whose D or Dv is not a multiple of 8 are copied and zero-padded to one.
    causal: True: query i sees keys j <= i + offset.  False: every query sees all keys.
    causal_align, input_pos: the offset.  causal_align="top_left": 0; "bottom_right": Sk - Sq, so
        that the last query sees all keys.  input_pos, an integer >= 0, is the number of keys before
        query 0 and is added to the offset.  If Sq == Sk both may be None (offset 0).  If Sq != Sk,
        causal, window, alibi_slopes and formulas of i require one of them.
    scale: finite real factor of the scores; None: 1 / sqrt(D).
    mask: combined with causal.  One of:
        a bool array that broadcasts to (B, H, Sq, Sk), True = keep;
        a float16, bfloat16 or float32 bias that broadcasts to (B, H, Sq, Sk) and is added to the
        scaled scores; -inf masks the key;
        a `BlockMask` for Sq queries and Sk keys, whose masked blocks are skipped;
        a formula, e.g. "(j <= i) & (i - j < 64)": see `expression`, kind "mask".  b is the batch
        element, h the query head, i the query's position (query index + offset), j the key.  Tiles
        that interval arithmetic proves fully masked are skipped.
    seq_lens: int32 (numpy: also int64) (B,), the number of keys of each sequence of a padded batch.
        Elements of k and v beyond that length never reach a result.  The "bottom_right" offset is
        then the sequence's length minus Sq.
    window: (left, right): query i sees keys i + offset - left <= j <= i + offset + right; -1 means
        unlimited.  Combined with causal.  Key tiles outside the window are skipped.
    softcap: a positive number c up to 2^64: scaled scores s become c tanh(s / c).
    score: a formula for the new score: see `expression`, kind "score".  s is the scaled and capped
        score; b, h, i and j are as in a mask formula; hkv is the KV head.
    operands: named operands of both formulas, at most 8: numbers, or float16, bfloat16, float32,
        FP8, int8, int32, int64 or bool arrays, converted to FP32.  An array has one dim per index;
        queries before the first key (i < 0) read the nearest element.
    alibi_slopes: float32 (H,) or (B, H): slope * |i + offset - j| is subtracted from each score.
    sinks: float32 (H,), finite (contents are not checked).  An extra key with score sinks[h] and
        value 0 joins the softmax of every row of head h; log-sum-exp, row_max and row_sum include
        it.  A magnitude above scale * 3.4e38 counts as that.
    layout: "bhsd", the shapes above, or "bshd": q (B, Sq, H, D), k and v (B, Sk, Hkv, ...), result
        (B, Sq, H, Dv).
    return_lse: also return the log-sum-exp (natural log) of the scaled and biased scores of the
        keys that a query sees.
    return_row_stats: also return row_max, the largest of these scores (NaN ignored), and row_sum,
        the sum of exp(score - row_max); lse = row_max + log(row_sum).
    out: array of the result's shape and dtype to write into; must not overlap an input.
    qk_accumulate: "float16" accumulates q k^T in FP16, for float16 on NVIDIA GPUs and the CPU.
        Less accurate; unscaled scores beyond 65504 overflow.
    algorithm: "flash", or "naive": three kernels that store all scores, for comparison.
    config: AttentionConfig or AttentionHopperConfig; None: chosen for the shape.  Must be None for
        algorithm="naive".

    Returns out, (B, H, Sq, Dv) of q's dtype, or a tuple: out, lse if return_lse, then row_max and
    row_sum if return_row_stats.  Statistics are float32 (B, H, Sq) in both layouts.

    Each score is scaled and capped; then `score`, ALiBi, bias, masks and sinks apply in this order.
    Scores, softmax and accumulators are FP32; probabilities are rounded to q's dtype before the
    product with v.  The output of a query that sees no key is 0; without sinks its lse and row_max
    are -inf and its row_sum is 0.

    NaN and infinities in k reach only queries that see the key.  In v they can also turn other
    queries of the same computed tile into NaN (0 * NaN), but never from a skipped block.

    Arrays may have any strides.  Arrays whose rows are not contiguous or not 16-byte aligned are
    copied first.

    Raises TypeError (wrong kind of argument or dtype), ValueError (shape, value, overlap, device,
    config; causal, window, alibi_slopes or formulas of i with Sq != Sk and no alignment; an index
    outside its operand), SyntaxError and NameError (formulas), and NotImplementedError (float32
    inputs, qk_accumulate="float16" where it is not supported).

    Formula: Vaswani et al., Attention Is All You Need, arXiv:1706.03762.  Algorithm: Dao,
    FlashAttention-2, arXiv:2307.08691.  Error bound: `reference.attention_bound`.
    """
    arrays: tuple[Any, ...]
    if window is not None:  # checked before the key is built: (3, 0) == (3.0, False)
        window = check_window(window, False)
    formulas = NONE
    if score is not None or operands is not None or (mask is not None and is_formula(mask)):
        own = mask if is_formula(mask) else None
        formulas = read_formulas(score, own, operands, q)
        mask = mask if own is None else None
    array_mask, arrays, sizes = mask, (q, k, v, mask), None
    if isinstance(mask, BlockMask):
        array_mask, sizes = None, mask.sizes
        arrays = q, k, v, mask.block_mask_types, mask.partial_tiles
    call = ("attention", causal, causal_align, input_pos, scale, layout, qk_accumulate, return_lse,
            return_row_stats, algorithm, config, sizes, window, softcap, *formulas.key)  # fmt: skip
    with_arrays = not (seq_lens is None and alibi_slopes is None and sinks is None)
    if with_arrays or formulas is not NONE:
        options = seq_lens, alibi_slopes, sinks, *formulas.arrays
        arrays = (*arrays, None)[:5] + (None, *options)
    key, known, places = plans.find(call, out, *arrays)
    if known is not None:
        # The key covers all that the checks depend on: one look-up replaces them.
        target, out_shape, stats_shape, plan, more, placed = known
        y = maker(target.xp)(out_shape, q.dtype) if out is None else out
        if not (return_lse or return_row_stats or sizes or more):
            if mask is None:
                plan.launch(target.xp, (q, k, v, y), (*places, y.data.ptr))
            else:
                nothing = None, None, None, array_mask, None, None, None, None, None, None
                plan.launch(target.xp, (q, k, v, y, *nothing))
            return y
        stats = _empty_stats(target.xp, stats_shape, return_lse, return_row_stats)
        arrays = (array_mask, None, None, None, None) if sizes is None else block_arrays(mask)
        rest: tuple[Any, ...]
        rest = (None, seq_lens, alibi_slopes, sinks) if more else (None, None)
        rest += placed.pointers(formulas.arrays) if placed else ()
        plan.launch(target.xp, (q, k, v, y, *stats, *arrays, *rest))
        return _results(y, stats)
    target = arguments.target_of("q", q)
    check_operands(q, k, v, 4)
    arguments.check_choice("layout", layout, ("bhsd", "bshd"))
    arguments.check_choice("algorithm", algorithm, ("flash", "naive"))
    if algorithm == "naive" and (config is not None or qk_accumulate == "float16"):
        raise ValueError("the naive algorithm has no config and accumulates in FP32")
    places = (0, 2, 1, 3) if layout == "bshd" else (0, 1, 2, 3)
    heads_first = tuple(x.transpose(places) for x in (q, k, v))
    batch, heads, sq, dim, kv_heads, sk, dim_v = check_shapes(*heads_first)
    arguments.check_flags(causal=causal, return_lse=return_lse, return_row_stats=return_row_stats)
    scale = check_scale(scale, dim)
    options, slopes, rows_sinks = check_options(
        q, batch, heads, causal, scale, window, softcap, alibi_slopes, sinks
    )
    lens = check_lens(seq_lens, q, q.shape[0], sk, "k's")
    bounded = (options.left, options.right) != (-1, -1)
    needed_by = "causal=True" if causal else "window" if bounded else None
    if needed_by is None and slopes is not None:
        needed_by = "alibi_slopes"
    placed, given, by_name = None, (), {}
    if formulas is not NONE:
        needed_by = needed_by or formulas.needs_positions
        by_name = formulas.by_name
    offset = check_offset(causal_align, input_pos, sq, sk, needed_by)
    if formulas is not NONE:
        ranges = Ranges(batch, heads, kv_heads, sq + max(offset or 0, 0), sk)
        placed, given = check_formulas(formulas, q, ranges, options)
    as_is = lens is not None or placed is not None
    options, offset = _simplified(options, offset, as_is, sq, sk)
    half_scores = check_accumulate(qk_accumulate, q.dtype, target)
    shape = (batch, heads, sq, dim_v)
    if mask is not None and not isinstance(mask, BlockMask):
        mask = check_array_mask(mask, q, (batch, heads, sq, sk))
    elif mask is not None:
        check_block_mask(mask, q, (batch, heads, sq, sk))
    others = {"seq_lens": lens, "alibi_slopes": slopes, "sinks": rows_sinks, **by_name}
    out_shape = tuple(shape[i] for i in places)
    if out is not None:
        there = {name: x for name, x in others.items() if is_cupy(x) == is_cupy(out)}
        arguments.check_new_out(out, out_shape, q.dtype, {**arrays_of(q, k, v, mask), **there})
    with arguments.on_device(target):
        xp = target.xp
        y = maker(xp)(out_shape, q.dtype) if out is None else out
        stats = _empty_stats(xp, shape[:3], return_lse, return_row_stats)
        if 0 not in shape:
            q, k, v = (readable(x) for x in heads_first)
            into = y.transpose(places)
            padded = *shape[:3], padded_size(dim_v)
            place = into if walks(into) else maker(xp)(padded, q.dtype)
            arrays, mask_place = mask_arrays(mask)
            task = AttentionTask(
                *(q.dtype, batch, heads, kv_heads, sq, sk, padded_size(dim), padded_size(dim_v)),
                *(steps(q), steps(k), steps(v), steps(place), scale, offset, mask_place),
                half_scores=half_scores, naive=algorithm == "naive", options=options,
                lengths=lens is not None, formulas=placed,
                bottom_right=lens is not None and causal_align == "bottom_right",
            )  # fmt: skip
            lens = as_int32(target, lens)
            if lens is not None and not (lens.flags.c_contiguous and in_elements(lens)):
                lens = packed(lens)
            arrays += (None, lens, slopes, rows_sinks) if task.general else (None, None)
            arrays += placed.pointers(given) if placed else ()
            plan = attention_plan.attention_plan(target, task, config)
            plan.launch(xp, (q, k, v, place, *stats, *arrays))
            as_given = *heads_first, seq_lens, alibi_slopes, sinks, *formulas.arrays
            used = q, k, v, lens, slopes, rows_sinks, *given
            copied = any(x is not y for x, y in zip(used, as_given, strict=True))
            if place is not into:
                assign(into, place[..., :dim_v])
            elif not copied and (array_mask is None or starts_at(mask, array_mask)):
                plans.remember(key, (target, out_shape, shape[:3], plan, task.general, placed))
    return _results(y, stats)


def cached_attention(
    q: Array, k: Array, v: Array, *, scale: Factor | None = None, softcap: Factor | None = None
) -> Callable[..., None] | None:
    """A function launch(places, q, k, v, out, lse) that repeats the cached call of `attention` with
    these arguments and return_lse=True; None if no such call is cached.

    places: a hashable key; equal keys mean equal addresses of all arrays.
    """
    call = ("attention", False, None, None, scale, "bhsd", "float32", True, False, "flash", None,
            None, None, softcap)  # fmt: skip
    known = plans.find(call, None, q, k, v, None)[1]
    if known is None:
        return None
    target, _, _, plan, general, _ = known
    absent = (None,) * (11 if general else 9)

    def arrays(*given: Any) -> tuple[Any, ...]:
        return (*given, *absent)

    launch: Callable[..., None] = plan.launcher(target.xp, arrays)
    return launch


def _simplified(
    options: ScoreOptions, offset: int | None, general: bool, sq: int, sk: int
) -> tuple[ScoreOptions, int | None]:
    """Return (options, offset) for the fastest variant that computes the window.

    A window that amounts to causal or full attention becomes no options, with the causal offset, or
    None for full attention.  general: the call needs a general variant in any case.
    """
    position = offset or 0
    if options.left >= sq - 1 + position:  # the last query sees the first key
        options = options._replace(left=-1)
    right = options.right
    if general or options._replace(right=-1) != ScoreOptions():
        check_positions(options, sq, sk, position)
        return options, position
    if right < 0:
        return ScoreOptions(), None
    return ScoreOptions(), min(max(position + right, -sq), sk)  # at the limits: no key, all keys


def scaled_dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Factor | None = None,
    enable_gqa: bool = False,
) -> Array:
    """`attention` with the signature of torch.nn.functional.scaled_dot_product_attention.

    >>> q = np.ones((1, 2, 16, 64), np.float16)
    >>> cupykern.scaled_dot_product_attention(q, q, q, is_causal=True).shape
    (1, 2, 16, 64)

    query: (B, H, Sq, D), float16 or bfloat16.
    key, value: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv), of query's dtype; Hkv = H without enable_gqa.
    attn_mask: a bool array (True = keep), or a float16, bfloat16 or float32 bias that is added to
        the scaled scores; broadcasts to (B, H, Sq, Sk).  Must be None if is_causal.
    dropout_p: must be 0.
    is_causal: query i sees keys j <= i, as in torch also if Sq != Sk ("top_left").
    scale: factor of the scores; None: 1 / sqrt(D).

    Returns (B, H, Sq, Dv) of query's dtype.

    Raises NotImplementedError if dropout_p is not 0, ValueError for unequal numbers of heads
    without enable_gqa and for attn_mask with is_causal, and the errors of `attention`.
    """
    if dropout_p != 0:
        raise NotImplementedError(f"there is no dropout; got dropout_p = {dropout_p}")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask must be None where is_causal is set")
    arguments.check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    shapes: list[Any] = [getattr(x, "shape", ()) for x in (query, key)]
    if not enable_gqa and all(len(shape) == 4 for shape in shapes) and shapes[0][1] != shapes[1][1]:
        raise ValueError(
            "query and key must have as many heads unless enable_gqa is set; got "
            f"{shapes[0][1]} and {shapes[1][1]}"
        )
    out: Any = attention(
        query, key, value, causal=is_causal, causal_align="top_left", mask=attn_mask, scale=scale
    )
    return out


_NO_STATS = None, None, None


def _empty_stats(
    xp: Namespace, shape: tuple[int, ...], lse: bool, row_stats: bool
) -> tuple[Array | None, ...]:
    """(lse, row_max, row_sum), None for those not requested."""
    if not lse and not row_stats:
        return _NO_STATS
    wanted = lse, row_stats, row_stats
    return tuple(maker(xp)(shape, np.float32) if one else None for one in wanted)


def _results(y: Array, stats: tuple[Array | None, ...]) -> Results:
    if stats is _NO_STATS:
        return y
    results = (y, *(x for x in stats if x is not None))
    return results if len(results) > 1 else y


# --- the op's record -----------------------------------------------------------------------------


OP = Op(
    name="attention",
    run=attention,
    reference=reference.attention,
    bound=reference.attention_bound,
    draw_problem=problems.draw_problem,
    bench_problem=problems.bench_problem,
    bench_shapes=problems.bench_shapes,
    inputs=problems.make_inputs,
    work=problems.work,
    variants=problems.variants,
    configs=problems.configs,
    variant=problems.variant,
    sample=problems.sample,
    dtypes=problems.DTYPES,
)
