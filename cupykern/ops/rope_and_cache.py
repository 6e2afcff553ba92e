"""rope_and_cache: per-head RMS norm, rotary embedding and KV-cache writes in one launch."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

from .. import arguments, dtypes, reference
from ..arrays import assign, in_elements, maker, packed, steps_of
from ..attention import rope_plan
from ..attention.rope_config import RopeConfig, variant_of, variants
from ..attention.rope_plan import RopeCall
from ..op import Op
from ..rows.row_layout import operand
from ..runtime import plans
from ..typing import Array, Factor, Results
from .checks.cache_scales import numbers_and_arrays
from .checks.rope import check_arrays, check_eps, check_scales
from .problems import rope as problems


def rope_and_cache(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    k_cache: Array | None = None,
    v_cache: Array | None = None,
    *,
    inv_freq: Array | None = None,
    cos_sin: Array | None = None,
    interleaved: bool = False,
    attention_factor: Factor | None = 1.0,
    q_weight: Array | None = None,
    k_weight: Array | None = None,
    eps: Factor | None = 1e-6,
    block_table: Array | None = None,
    layout: Literal["hnd", "nhd"] = "hnd",
    k_scale: Factor | None = None,
    v_scale: Factor | None = None,
    out: Array | None = None,
    config: RopeConfig | None = None,
) -> Results:
    """Apply rotary embedding to q and k and write k and v to the KV cache, in one launch.

    >>> qkv = np.ones((2, 5, 8 + 2 + 2, 64), np.float16)  # of one product: 8 heads, 2 KV heads
    >>> q, k, v = qkv[:, :, :8], qkv[:, :, 8:10], qkv[:, :, 10:]
    >>> inv_freq, _ = cupykern.rope_inv_freq(64, 10000.0, target="host")
    >>> positions = np.arange(5, dtype=np.int32)
    >>> k_cache, v_cache = np.zeros((2, 2, 2, 100, 64), np.float16)  # room for 100 tokens
    >>> q = cupykern.rope_and_cache(q, k, v, positions, k_cache, v_cache, inv_freq=inv_freq)
    >>> q.shape
    (2, 5, 8, 64)

    Arguments:

    q: (B, S, H, D), float16, bfloat16 or float32, D up to 512.
    k, v: (B, S, Hkv, D) of q's dtype.  Without a cache v is not used.
    positions: int32 (B, S) or (S,): each token's position for the rotation and its slot in the
        cache.  A token with a negative position, or one beyond the cache, is not written; its q is
        still rotated.
    k_cache, v_cache: (B, Hkv, Smax, D) of q's dtype, float8_e4m3fn or int8; both or neither.
        Other slots are not changed.  The caches must not overlap each other (raises ValueError) nor
        other arguments (not checked).
    inv_freq: float32 (R,), 2 R <= D: the angle of pair i is position * inv_freq[i] (see
        `rope_inv_freq`).  The first 2 R elements of a head are rotated, the others copied.
    cos_sin: in place of inv_freq, float32 (P, 2 R): row p holds the R cosines, then the R sines of
        position p (the cos_sin_cache of vLLM and FlashInfer).  Positions are clamped to [0, P - 1].
    interleaved: True: pairs are elements 2 i and 2 i + 1 (GPT-J); False: i and i + R (NeoX, Llama).
    attention_factor: finite factor of cosines and sines (as in YaRN).
    q_weight, k_weight: (D,), float16, bfloat16 or float32, weights of a per-head RMS norm before
        the rotation: x / sqrt(mean(x^2) + eps) * weight (Qwen 3, Gemma 3).  None: no norm.
    eps: a finite number of at least 0.
    block_table: int32 (B, max_pages), for paged caches of shape (num_pages, Hkv, page, D): position
        i of sequence b is slot i % page of page block_table[b, i // page].  Tokens whose page does
        not exist (e.g. -1) are not written.
    layout: order of the caches' dims.  "hnd": as above.  "nhd": (B, Smax, Hkv, D), paged
        (num_pages, page, Hkv, D), as vLLM and FlashInfer store them.
    k_scale, v_scale: divisors for 8-bit caches: numbers (None: 1) or float32 arrays of shape () or
        (Hkv,).  Or both are outputs, float32 arrays of the cache's shape without D: each written
        slot receives the head vector's largest magnitude over the format's largest number (1 where
        that is below 2^-126, NaN for a vector with a NaN or an infinity).
    out: array for the rotated q, of q's shape and dtype.  May be q itself; must not overlap an
        argument otherwise.
    config: RopeConfig; None: chosen for the shape.

    Returns the rotated q, of q's shape and dtype; without a cache (q, k), both rotated.

    Arithmetic is FP32 with one rounding at the end; angles from inv_freq are FP64, exact at any
    position.  8-bit codes saturate.  Heads are read and written in vectors if their elements are
    contiguous and 16-byte aligned (8-bit caches: 8-byte), and R and D / 2 are multiples of 8
    (float32: of 4).  Other strides in whole elements also need no copy, but are slower.

    Raises TypeError (types, dtypes), NotImplementedError (float64) and ValueError (shapes, layout,
    overlap, scales, config, devices).  Formula: Su et al., arXiv:2104.09864.  Error bound:
    `reference.rope_and_cache_bound`.
    """
    k_number = v_number = k_scales = v_scales = apart = scales_apart = None
    if k_scale is not None or v_scale is not None:
        (k_number, v_number), (k_scales, v_scales) = numbers_and_arrays(q, k_scale, v_scale)
        if getattr(k_scales, "ndim", 0) == 3:  # outputs
            scales_apart = plans.distance(k_scales, v_scales)
    if k_cache is not None:
        apart = plans.distance(k_cache, v_cache)
    arrays: tuple[Any, ...] = q, k, v, positions, k_cache, v_cache, inv_freq
    if not (cos_sin is q_weight is k_weight is block_table is k_scales is v_scales is None):
        arrays = (*arrays, cos_sin, q_weight, k_weight, block_table, k_scales, v_scales)
    key, known, places = plans.find(
        ("rope_and_cache", interleaved, attention_factor, eps, layout, k_number, v_number, config,
         apart, scales_apart),
        out, *arrays,
    )  # fmt: skip
    if known is not None:
        make, shape, dtype, launch = known
        y = make(shape, dtype) if out is None else out
        k_out = make(k.shape, dtype) if k_cache is None else k_cache
        launch.launch_at(
            (places, y.data.ptr, k_out.data.ptr),
            (q, k, v, positions, inv_freq if cos_sin is None else cos_sin, q_weight, k_weight,
             block_table, y, k_out, v_cache, k_scales, v_scales),
        )  # fmt: skip
        return (y, k_out) if k_cache is None else y
    target = arguments.target_of("q", q)
    given = {
        "q": q, "k": k, "v": v, "positions": positions, "inv_freq": inv_freq,
        "cos_sin": cos_sin,
        "q_weight": q_weight, "k_weight": k_weight, "block_table": block_table,
        "k_cache": k_cache, "v_cache": v_cache,
    }  # fmt: skip
    check_arrays(given, layout)
    arguments.check_flags(interleaved=interleaved)
    options = (
        bool(interleaved),
        check_eps(eps),
        arguments.finite_float("attention_factor", attention_factor, 1.0),
    )
    scale_arrays, scale_numbers = check_scales(given, k_scale, v_scale)
    given |= dict(zip(("k_scale", "v_scale"), scale_arrays, strict=True))
    if out is not None:
        others = {name: x for name, x in given.items() if name != "q"}
        arguments.check_out(out, q, q.shape, q.dtype, others, "q")
    with arguments.on_device(target):
        make = maker(target.xp)
        y = make(q.shape, q.dtype) if out is None else out
        k_out = make(k.shape, k.dtype) if k_cache is None else k_cache
        arrays = _Arrays(
            *(q, k, v, positions, inv_freq if cos_sin is None else cos_sin),
            *(q_weight, k_weight, block_table),
            *(y, k_out, v_cache, *scale_arrays),
        )
        if q.size or k.size:
            copies = _Arrays(*(x if x is None or in_elements(x) else packed(x) for x in arrays))
            call = _call(copies, layout, scale_numbers, *options)
            plan = rope_plan.plan(target, call, config)
            plan.launch_at(None, copies)
            for x, copy in zip(arrays[_WRITTEN:], copies[_WRITTEN:], strict=True):
                if x is not copy:
                    assign(x, copy)
            if all(x is copy for x, copy in zip(arrays, copies, strict=True)):
                plans.remember(key, (make, q.shape, q.dtype, plan))
    return (y, k_out) if k_cache is None else y


@functools.wraps(rope_and_cache, assigned=())
def rope_and_cache_arrays(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    k_cache: Array | None = None,
    v_cache: Array | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """rope_and_cache with every written array returned: (q, k), or (q, k_cache, v_cache) followed
    by output scales."""
    y: Any = rope_and_cache(q, k, v, positions, k_cache, v_cache, **options)
    if k_cache is None:
        return y
    k_scale = options.get("k_scale")
    if getattr(k_scale, "ndim", 0) == 3:
        return y, k_cache, v_cache, k_scale, options["v_scale"]
    return y, k_cache, v_cache


class _Arrays(NamedTuple):
    """The kernel's arrays, in the order of its arguments; those it writes begin at out."""

    q: Any
    k: Any
    v: Any
    positions: Any
    rotation: Any
    q_weight: Any
    k_weight: Any
    block_table: Any
    out: Any
    k_out: Any
    v_out: Any
    k_scale: Any
    v_scale: Any


_WRITTEN = _Arrays._fields.index("out")  # the first array that the kernel writes


def _call(
    arrays: _Arrays,
    layout: str,
    numbers: tuple[float, float],
    interleaved: bool,
    eps: float,
    attention_factor: float,
) -> RopeCall:
    a, has_cache = arrays, arrays.v_out is not None
    k_out, v_out, scales = a.k_out, a.v_out, (a.k_scale, a.v_scale)
    per_token = any(x is not None and x.ndim == 3 for x in scales)
    if layout == "hnd" and has_cache:
        k_out, v_out = k_out.swapaxes(1, 2), v_out.swapaxes(1, 2)
        scales = tuple(x.swapaxes(1, 2) if per_token else x for x in scales)
    page = k_out.shape[1] if a.block_table is not None else 0
    batch, seq_len = a.q.shape[:2]
    slots = k_out.shape[1] if a.block_table is None else page * a.block_table.shape[1]
    positions = operand(a.positions)
    if a.positions.ndim == 1:
        positions = positions._replace(strides=(0, *positions.strides))
    return RopeCall(
        dtype=a.q.dtype,
        cache_dtype=k_out.dtype,
        q_shape=a.q.shape,
        kv_heads=a.k.shape[2],
        half=a.rotation.shape[-1] // a.rotation.ndim,  # cos_sin: half cosines, half sines
        q=operand(a.q),
        k=operand(a.k),
        v=operand(a.v) if has_cache else None,
        out=operand(a.out),
        k_out=operand(k_out),
        v_out=operand(v_out) if has_cache else None,
        positions=positions,
        block_table=None if a.block_table is None else operand(a.block_table),
        rotation=operand(a.rotation),
        num_rows=a.rotation.shape[0] if a.rotation.ndim == 2 else 0,
        page_size=page,
        num_pages=k_out.shape[0] if page else 0,
        num_slots=min(slots, 2**31 - 1) if has_cache else 0,
        weights=tuple(
            None if x is None else (x.dtype, steps_of(x)[0] // x.itemsize)
            for x in (a.q_weight, a.k_weight)
        ),
        scales=(_scale_strides(scales[0]), _scale_strides(scales[1])),
        scales_per_token=per_token,
        numbers=numbers,
        interleaved=interleaved,
        eps=eps,
        attention_factor=attention_factor,
    )


def _scale_strides(scale: Array | None) -> tuple[int, ...]:
    """The strides of page, slot and head, in elements."""
    if scale is None:
        return (0, 0, 0)
    steps = tuple(step // 4 for step in steps_of(scale))
    return steps if len(steps) == 3 else (0, 0, *(steps or (0,)))


# --- the op's record -----------------------------------------------------------------------------

OP = Op(
    name="rope_and_cache",
    run=rope_and_cache_arrays,
    reference=reference.rope_and_cache,
    bound=reference.rope_and_cache_bound,
    draw_problem=problems.draw_problem,
    bench_problem=problems.bench_problem,
    bench_shapes=problems.bench_shapes,
    inputs=problems.make_inputs,
    work=problems.work,
    variants=variants,
    configs=problems.configs_of,
    variant=lambda problem, config: variant_of(
        dtypes.NAMES[problem.dtype], problems.task_of(problem).by_vectors, config
    ),
    sample=problems.sample,
)
