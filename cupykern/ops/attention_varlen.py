"""attention_varlen: attention for concatenated sequences of different lengths, without padding;
keys can be in paged KV caches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from .. import arguments, reference
from ..arrays import assign, in_elements, maker, packed
from ..attention import attention_plan
from ..attention.attention_hopper import AttentionHopperConfig
from ..attention.attention_plan import AttentionConfig
from ..attention.attention_task import NO_MASK, AttentionTask, PagePlace, ScoreOptions, prescales
from ..attention.cache_scales import aligned_scale, array_of, place_of
from ..attention.formulas import Ranges
from ..numerics import namespace
from ..runtime import plans
from ..targets import Target, is_cupy
from ..typing import Array, Factor, FormulaLike, Operands, Results
from .attention import OP as ATTENTION_OP
from .checks.attention import (
    ALIGNMENTS,
    check_causal_align,
    check_cu_seqlens,
    check_length,
    check_operands,
    check_scale,
    check_shapes,
    padded_size,
    readable,
    steps,
    walks,
)
from .checks.attention_formulas import NONE, check_formulas, read_formulas
from .checks.cache_scales import as_hnd, check_scales, numbers_and_arrays
from .checks.caches import check_caches, check_pages, check_table
from .checks.score_options import (
    CAUSAL,
    as_int32,
    check_lens,
    check_options,
    check_positions,
    check_window,
)
from .problems import attention_varlen as problems


def attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None = None,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    block_table: Array | None = None,
    seq_lens_k: Array | None = None,
    layout: Literal["hnd", "nhd"] = "hnd",
    k_scale: Factor | None = None,
    v_scale: Factor | None = None,
    causal: bool = False,
    causal_align: Literal["top_left", "bottom_right"] = "bottom_right",
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
    config: AttentionConfig | AttentionHopperConfig | None = None,
) -> Results:
    """`attention` for a batch of sequences of different lengths, concatenated without padding.

    >>> q = k = v = np.ones((5, 8, 64), np.float16)  # sequences of 2 and 3 tokens
    >>> cu = np.array([0, 2, 5], np.int32)
    >>> cupykern.attention_varlen(q, k, v, cu, cu, max_seqlen_q=3, max_seqlen_k=3).shape
    (5, 8, 64)
    >>> sinks = np.zeros(8, np.float32)
    >>> cupykern.attention_varlen(
    ...     q, k, v, cu, cu, max_seqlen_q=3, max_seqlen_k=3, window=(1, 0), sinks=sinks
    ... ).shape
    (5, 8, 64)

    With keys in pages (chunked prefill, mixed with decoding sequences):

    >>> pages = np.ones((9, 2, 16, 64), np.float16)  # 9 pages of 16 keys of 2 KV heads
    >>> table = np.array([[4, 0, 7], [2, 0, 0]], np.int32)  # the pages of each sequence
    >>> lens = np.array([40, 3], np.int32)  # its keys, those of the new tokens included
    >>> cupykern.attention_varlen(
    ...     q, pages, pages, cu, max_seqlen_q=3, block_table=table, seq_lens_k=lens, causal=True
    ... ).shape
    (5, 8, 64)

    Arguments:

    q: (total_q, H, D), float16 or bfloat16.
    k, v: (total_k, Hkv, D) and (total_k, Hkv, Dv) of q's dtype.  With block_table: paged caches
        (num_pages, Hkv, page, D) and (num_pages, Hkv, page, Dv) of q's dtype, float8_e4m3fn or
        int8.  H, Hkv, D and Dv as for `attention`.
    cu_seqlens_q, cu_seqlens_k: int32 (B + 1,): sequence i has rows
        cu_seqlens[i]:cu_seqlens[i + 1]; the last element is the number of rows.
    max_seqlen_q, max_seqlen_k: integers, upper limits of the sequence lengths.  With block_table
        max_seqlen_k may be None: the capacity of the table.
    block_table: int32 (numpy: also int64) (B, max_pages), for paged caches, in place of
        cu_seqlens_k: key j of sequence b is key j % page of page block_table[b, j // page]; any
        page size.  The keys of the new tokens are in the cache already.
    seq_lens_k: int32 (numpy: also int64) (B,), required with block_table: the number of keys of
        each sequence.  Page contents beyond it never reach a result.
    layout: order of the pages' dims.  "hnd": as above.  "nhd": (num_pages, page, Hkv, D), as vLLM
        and FlashInfer store them.  Neither is copied.
    k_scale, v_scale: factors of 8-bit pages: numbers (None: 1), or float32 arrays of shape (),
        (Hkv,), or, one scale per token and head, of the caches' shape without D, as
        `rope_and_cache` fills them.
    causal: query i of a sequence sees its keys j <= i + offset.  causal_align="bottom_right":
        offset is the sequence's number of keys minus its number of queries; "top_left": 0.
    scale, window, softcap, score, operands, alibi_slopes, sinks, out, config: as for `attention`.
        Windows and ALiBi distances count from query i's position i + offset; alibi_slopes is (H,)
        or (B, H).
    mask: a formula, as for `attention`; b is the sequence, i and j count from its beginning.
    return_lse: also return the log-sum-exp, float32 (H, total_q).

    Returns out, (total_q, H, Dv) of q's dtype, or (out, lse).

    A sequence may have any number of queries and keys, also 0.  With "bottom_right", the first
    queries of a sequence that has more queries than keys see no key and give zeros.

    Offsets, lengths and block tables in numpy arrays are checked: offsets must rise from 0 to the
    number of rows, sequences must not exceed their limits, and a table is checked up to each
    length.  cupy arrays are not read on the host: the kernel clamps offsets to [0, rows], lengths
    to the limits, and page numbers to [0, num_pages).  Rows that no sequence has are not written.
    Accuracy, masked keys and strides as for `attention`.

    Raises the errors of `attention`, and ValueError for offsets, lengths and pages that fail the
    checks.  Error bound: `reference.attention_varlen_bound`.
    """
    if window is not None:  # checked before the key is built: (3, 0) == (3.0, False)
        window = check_window(window, False)
    of_keys: tuple[Any, ...] = (cu_seqlens_k,)
    refused = seq_lens_k is not None
    if block_table is not None:
        of_keys, refused = (seq_lens_k, block_table), cu_seqlens_k is not None
    call: tuple[Any, ...]
    call = ("attention_varlen", max_seqlen_q, max_seqlen_k, causal, causal_align, scale, return_lse,
            config, window, softcap, layout, refused, block_table is not None)  # fmt: skip
    arrays: tuple[Any, ...] = q, k, v, cu_seqlens_q, *of_keys
    more: tuple[Any, ...] = alibi_slopes, sinks
    formulas, scales = NONE, (None, None)
    if k_scale is not None or v_scale is not None:
        numbers, scales = numbers_and_arrays(q, k_scale, v_scale)
        call, more = (*call, *numbers), (*more, *scales)
    if score is not None or mask is not None or operands is not None:
        formulas = read_formulas(score, mask, operands, q)
        call, more = (*call, formulas.key), (*more, *formulas.arrays)
    if len(more) > 2 or alibi_slopes is not None or sinks is not None or formulas is not NONE:
        arrays += more
    key, known, places = plans.find(call, out, *arrays)
    if known is not None:
        make, out_shape, launch = known
        y = make(out_shape, q.dtype) if out is None else out
        lse = make(out_shape[1::-1], np.float32) if return_lse else None
        places = (*places, y.data.ptr, lse.data.ptr if lse is not None else None)
        launch(places, q, k, v, y, lse, cu_seqlens_q, *of_keys, alibi_slopes, sinks, *scales,
               *formulas.arrays)  # fmt: skip
        return y if lse is None else (y, lse)
    target = arguments.target_of("q", q)
    batch = cu_seqlens_q.shape[0] - 1 if getattr(cu_seqlens_q, "shape", ()) else 0
    if block_table is None:
        keys = _contiguous(q, k, v, cu_seqlens_k, max_seqlen_k, seq_lens_k, layout)
    else:
        keys = _paged(q, k, v, cu_seqlens_k, max_seqlen_k, block_table, seq_lens_k, layout, batch)
    keys = keys._replace(scales=_scales(q, k, keys, k_scale, v_scale, layout))
    given_q = q[None].transpose(0, 2, 1, 3)
    (rows, heads, dim), kv_heads, dim_v = q.shape, keys.k.shape[1], keys.v.shape[3]
    check_causal_align(causal_align, *ALIGNMENTS)
    arguments.check_flags(causal=causal, return_lse=return_lse)
    scale = check_scale(scale, dim)
    options, slopes, head_sinks = check_options(
        q, batch, heads, causal, scale, window, softcap, alibi_slopes, sinks
    )
    longest_q, longest_k = check_length("max_seqlen_q", max_seqlen_q), keys.longest
    # The kernel's query positions reach the last key, or the last query, of the longest sequence.
    ranges = Ranges(batch, heads, kv_heads, max(longest_q, longest_k), longest_k)
    placed, given = check_formulas(formulas, q, ranges, options)
    cu_q = check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q, rows, longest_q)
    if cu_seqlens_k is not None and cu_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must have one shape; "
            f"got {cu_q.shape}, {cu_seqlens_k.shape}"
        )
    if out is not None:
        index_arrays = {"cu_seqlens_q": cu_q, **keys.index_arrays, "alibi_slopes": slopes,
                    "sinks": head_sinks, "k_scale": scales[0], "v_scale": scales[1],
                    **formulas.by_name}  # fmt: skip
        there = {name: x for name, x in index_arrays.items() if is_cupy(x) == is_cupy(out)}
        others = {"q": q, "k": k, "v": v, **there}
        arguments.check_new_out(out, (rows, heads, dim_v), q.dtype, others)
    with arguments.on_device(target):
        xp = target.xp
        out_shape = rows, heads, dim_v
        y = maker(xp)(out_shape, q.dtype) if out is None else out
        lse = maker(xp)((heads, rows), np.float32) if return_lse else None
        if y.size and batch and longest_q:
            q, k, v = (readable(x) for x in (given_q, keys.k, keys.v))
            into = y[None].transpose(0, 2, 1, 3)
            padded = *into.shape[:3], padded_size(dim_v)
            place = into if walks(into) else maker(xp)(padded, q.dtype)
            sizes = min(longest_q, rows), min(longest_k, keys.total)
            general = keys.pages is not None and prescales(NO_MASK, scale)
            general = general or keys.scales is not None or placed is not None
            if options in (CAUSAL, ScoreOptions()) and not general:
                options, offset = ScoreOptions(), 0 if causal or options == CAUSAL else None
            else:
                check_positions(options, *sizes)
                offset = 0
            task = AttentionTask(
                *(q.dtype, batch, heads, kv_heads, *sizes),
                *(padded_size(dim), padded_size(dim_v), steps(q), steps(k), steps(v), steps(place)),
                *(scale, offset), totals=(rows, keys.total),
                bottom_right=causal_align == "bottom_right", options=options, formulas=placed,
                pages=keys.pages,
            )  # fmt: skip
            given_scales, of_scales, scale_arrays = keys.scales or (), (), (None, None)
            if keys.scales is not None:
                of_scales = of_k, of_v = tuple(map(aligned_scale, keys.scales))
                task = task._replace(codes=k.dtype, scales=(place_of(of_k), place_of(of_v)))
                scale_arrays = array_of(of_k), array_of(of_v)
            steered = [_as_steering(target, x) for x in (cu_q, *keys.index_arrays.values())]
            plan = attention_plan.attention_plan(target, task, config)
            pack = partial(_packed, task)
            rest = slopes, head_sinks, *scale_arrays, *given
            plan.launch(xp, pack(q, k, v, place, lse, *steered, *rest))
            here = (given_q, keys.k, keys.v, into, cu_seqlens_q, *of_keys, *given_scales,
                    alibi_slopes, sinks, *formulas.arrays)  # fmt: skip
            used = q, k, v, place, *steered, *of_scales, slopes, head_sinks, *given
            if place is not into:
                assign(into, place[..., :dim_v])
            elif all(a is b for a, b in zip(used, here, strict=True)):
                launch = plan.launcher(target.xp, pack)
                plans.remember(key, (maker(target.xp), out_shape, launch))
    return y if lse is None else (y, lse)


class _Keys(NamedTuple):
    """Checked keys and values.

    k, v: (1, Hkv, total_k, D), or pages (num_pages, Hkv, page, D).
    longest: upper limit of a sequence's number of keys.
    total: rows of k; for pages the capacity of a row of the block table.
    index_arrays: the integer arrays by name: offsets, or lengths and block table.
    scales: those of 8-bit pages, as numbers or arrays in "hnd" order.
    """

    k: Array
    v: Array
    longest: int
    total: int
    index_arrays: dict[str, Any]
    pages: PagePlace | None = None
    scales: tuple[Any, Any] | None = None


def _scales(
    q: Array, k: Array, keys: _Keys, k_scale: Factor | None, v_scale: Factor | None, layout: str
) -> tuple[Any, Any] | None:
    """Check the scales and return the value of _Keys.scales.  Raises TypeError and ValueError."""
    cache = None if keys.pages is None else k
    found = check_scales(q, cache, keys.k.shape[1], k_scale, v_scale, "of tokens")
    return None if keys.k.dtype == q.dtype else as_hnd(*found, layout)


def _contiguous(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_k: Array | None,
    longest: Any,
    seq_lens_k: Array | None,
    layout: Any,
) -> _Keys:
    """Check concatenated keys and values.  Raises TypeError and ValueError."""
    if cu_seqlens_k is None or longest is None:
        raise TypeError(
            "attention_varlen needs cu_seqlens_k and max_seqlen_k, or block_table and seq_lens_k "
            "of paged caches"
        )
    if seq_lens_k is not None or layout != "hnd":
        raise ValueError("seq_lens_k and layout are of paged caches, which have a block_table")
    check_operands(q, k, v, 3)
    of_q, k, v = (x[None].transpose(0, 2, 1, 3) for x in (q, k, v))
    total = check_shapes(of_q, k, v)[5]
    longest = check_length("max_seqlen_k", longest)
    cu = check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q, total, longest)
    return _Keys(k, v, longest, total, {"cu_seqlens_k": cu})


def _paged(
    q: Array, k: Array, v: Array, cu_seqlens_k: Array | None, longest: Any, block_table: Array,
    seq_lens_k: Array | None, layout: Any, batch: int,
) -> _Keys:  # fmt: skip
    """Check paged keys and values.  Raises TypeError and ValueError."""
    if seq_lens_k is None:
        raise TypeError("block_table needs seq_lens_k, the number of keys of each sequence")
    if cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_k is of packed keys: with block_table there are seq_lens_k")
    k, v = check_caches(q, k, v, layout, True, ndim=3, names=("k", "v"))
    room = check_table(block_table, q, batch, k)
    longest = room if longest is None else min(check_length("max_seqlen_k", longest), room)
    lens = check_lens(seq_lens_k, q, batch, longest, "the caches'", "seq_lens_k")
    check_pages(block_table, lens, k.shape[0], k.shape[2])
    pages = PagePlace(k.shape[0], k.shape[2], block_table.shape[1])
    return _Keys(k, v, longest, room, {"seq_lens_k": lens, "block_table": block_table}, pages)


def _as_steering(target: Target, x: Array) -> Array:
    """Offsets, lengths or a block table for the kernel: int32, contiguous, on `target`."""
    x, xp = as_int32(target, x), target.xp
    there = namespace(x) is xp and x.flags.c_contiguous and in_elements(x)
    return x if there else packed(xp.asarray(x))


def _packed(task: AttentionTask, *given: Any) -> tuple[Any, ...]:
    """The arguments of AttentionPlan.launch, without row statistics and mask arrays.  given: q, k,
    v, out, lse, the index arrays, slopes, sinks, both scales, and the operands of formulas."""
    last = 10 if task.pages else 9
    scales, operands = given[last : last + 2], given[last + 2 :]
    operands = task.formulas.pointers(operands) if task.formulas else ()
    if task.pages:
        return *given[:last], *(scales if task.codes is not None else ()), *operands
    q, k, v, y, lse, cu_q, cu_k, slopes, sinks = given[:last]
    arrays = (q, k, v, y, lse, *(None,) * 7, cu_q, cu_k)
    return (*arrays, slopes, sinks, *operands) if task.general else arrays


# --- the op's record -----------------------------------------------------------------------------


OP = replace(
    ATTENTION_OP,
    name="attention_varlen",
    run=attention_varlen,
    reference=reference.attention_varlen,
    bound=reference.attention_varlen_bound,
    draw_problem=problems.draw_problem,
    bench_problem=problems.bench_problem,
    bench_shapes=problems.bench_shapes,
    inputs=problems.make_inputs,
    work=problems.work,
    variants=problems.variants,
    sample=problems.sample,
)
