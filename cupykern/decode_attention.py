"""decode_attention: a few new queries against caches of keys and values, contiguous or paged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from . import arguments, decode, dtypes, inputs, reference
from .decode import MAX_DIM, MAX_KEYS, MAX_QUERIES, DecodeCall, DecodeConfig, DecodePlan, DecodeTask
from .op import Call, Draw, Op, Work
from .rows import operand
from .targets import Target, is_cupy

DTYPES = (dtypes.float16, dtypes.bfloat16)


def decode_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    seq_lens: Any = None,
    block_table: Any = None,
    causal: bool = True,
    scale: Any = None,
    return_lse: bool = False,
    out: Any = None,
    config: DecodeConfig | None = None,
) -> Any:
    """softmax(scale * q @ k^T) @ v of the newest queries of each sequence against its cache.

    q: (B, H, Sq, D) of float16 or bfloat16, any strides.  Sq at most 16, D a multiple of 8 up to 256.
    k_cache: (B, Hkv, Sk, D) of q's dtype, v_cache: (B, Hkv, Sk, Dv).  H is a multiple of Hkv: query
        heads g * H / Hkv up to (g + 1) * H / Hkv share KV head g.  Dv as D, and may differ.
    seq_lens: int32 (B,), how many keys each sequence has; None: Sk.  Keys behind them are not read.
    block_table: int32 (B, max_pages) for paged caches: k_cache is (num_pages, Hkv, page, D), v_cache
        likewise, and key j of sequence b is key j % page of page block_table[b, j // page]; then Sk is
        max_pages * page.  Any size of page.
    causal: the queries are the last Sq of the sequence's positions: query i sees the keys
        j <= seq_len - Sq + i; otherwise each sees all.
    scale: a finite real number; None: 1 / sqrt(D).
    return_lse: also log(sum(exp(scores))), FP32 (B, H, Sq), of the natural logarithm.
    out: array to write into, (B, H, Sq, Dv) of q's dtype, apart from all inputs.
    config: a DecodeConfig; None: the default one.

    Returns out, or (out, lse).  A query that sees no key gives zeros, and lse -inf.

    A sequence's result depends on its own queries, keys, length and the config's chunk: bit for bit the
    same alone and in any batch, contiguous or paged.  seq_lens and block_table in numpy arrays are
    checked (the table where it is used, if the lengths are known) and copied to the GPU; on the GPU they
    are never read back: the kernel clamps them to [0, Sk] and to the pages that there are.
    Caches whose rows are not contiguous, or do not begin at multiples of 16 bytes, are copied.

    Raises TypeError (types, dtypes), ValueError (shapes, values, overlap, config, devices).  Error bound:
    `reference.decode_attention_bound`.
    """
    target = arguments.target_of("q", q)
    shape, max_keys = _check_arrays(q, k_cache, v_cache, block_table)
    paged = block_table is not None
    seq_lens = _check_lens(seq_lens, q, max_keys)
    if paged:
        block_table = _check_table(block_table, seq_lens, q, k_cache.shape[0], k_cache.shape[2])
    for name, flag in (("causal", causal), ("return_lse", return_lse)):
        if not isinstance(flag, (bool, np.bool_)):
            raise TypeError(f"{name} must be a bool; got {type(flag).__name__}")
    scale = arguments.finite_float("scale", scale, 1.0 / math.sqrt(shape[3]))
    if abs(scale) * math.log2(math.e) > float(np.finfo(np.float32).max):
        raise ValueError(f"scale * log2(e) must be finite in FP32; got scale {scale}")
    out_shape = (*shape[:3], v_cache.shape[3])
    if out is not None:
        others = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
        for name, x in (("seq_lens", seq_lens), ("block_table", block_table)):
            if x is not None and is_cupy(x) == is_cupy(out):
                others[name] = x
        arguments.check_new_out(out, out_shape, q.dtype, others)
    with arguments.on_device(target):
        y = target.xp.empty(out_shape, q.dtype) if out is None else out
        lse = target.xp.empty(shape[:3], np.float32) if return_lse else None
        if y.size:
            steering = _steering(target, seq_lens), _steering(target, block_table)
            run(target, (q, k_cache, v_cache), steering, y, lse, max_keys, causal, scale, config)
    return (y, lse) if return_lse else y


def run(
    target: Target,
    arrays: tuple[Any, Any, Any],
    steering: tuple[Any, Any],
    y: Any,
    lse: Any,
    max_keys: int,
    causal: bool,
    scale: float,
    config: DecodeConfig | None,
) -> None:
    """Launch a call whose arguments are checked.  arrays: q, k, v; steering: lengths and block table of
    the target, which the kernel clamps."""
    q, k, v = arrays
    lens, table = steering
    places = [operand(x) for x in (q, k, v, y)]
    for i, x in ((1, k), (2, v)):
        if x.size and not decode.has_vectors(places[i], x.shape):
            copied = target.xp.array(x, order="C")
            k, v = (copied, v) if i == 1 else (k, copied)
            places[i] = operand(copied)
    table_stride = None
    if table is not None:
        if table.strides[1] != 4 or table.strides[0] % 4:
            table = target.xp.array(table, order="C")
        table_stride = table.strides[0] // 4
    call = DecodeCall(
        *(q.dtype, q.shape, k.shape, v.shape[3], max_keys, *places),
        *(table_stride, bool(causal), scale),
    )
    _plan(target, call, config).launch(target, q, k, v, lens, table, y, lse)


@lru_cache(maxsize=4096)
def _plan(target: Target, call: DecodeCall, config: DecodeConfig | None) -> DecodePlan:
    return decode.make_plan(target, call, config)


# --- arguments -----------------------------------------------------------------------------------


def _check_arrays(q: Any, k: Any, v: Any, table: Any) -> tuple[tuple[int, ...], int]:
    """(q's shape, keys of a sequence at most).  Raises TypeError and ValueError."""
    dtypes.resolve(q.dtype, "q's dtype", DTYPES)
    for name, x in (("k_cache", k), ("v_cache", v)):
        arguments.same_place(name, x, q, "q")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}; got {x.dtype}")
    for name, x in (("q", q), ("k_cache", k), ("v_cache", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must have 4 dims; got shape {x.shape}")
        if not (8 <= x.shape[3] <= MAX_DIM and x.shape[3] % 8 == 0):
            raise ValueError(
                f"{name}'s last dim must be a multiple of 8 from 8 to {MAX_DIM}; got {x.shape[3]}"
            )
    if q.shape[2] > MAX_QUERIES:
        raise ValueError(f"q must have at most {MAX_QUERIES} queries; got shape {q.shape}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k_cache and v_cache differ beside their last dims: {k.shape}, {v.shape}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k_cache's last dim must be q's, {q.shape[3]}; got {k.shape[3]}")
    if q.shape[1] and (not k.shape[1] or q.shape[1] % k.shape[1]):
        raise ValueError(
            f"q's heads must be a multiple of the caches'; got {q.shape[1]} and {k.shape[1]}"
        )
    if table is None:
        if k.shape[0] != q.shape[0]:
            raise ValueError(f"caches and q differ in the batch: {k.shape[0]} and {q.shape[0]}")
        max_keys = k.shape[2]
    else:
        _check_integers("block_table", table, q)
        if table.ndim != 2 or table.shape[0] != q.shape[0]:
            raise ValueError(
                f"block_table must have shape ({q.shape[0]}, max_pages); got {table.shape}"
            )
        max_keys = table.shape[1] * k.shape[2]
    if max_keys > MAX_KEYS:
        raise ValueError(f"sequences may have at most {MAX_KEYS} keys; got {max_keys}")
    return q.shape, max_keys if k.shape[0] else 0


def _check_integers(name: str, x: Any, q: Any) -> None:
    """int32 where q is, or a numpy array of integers.  Raises TypeError and ValueError."""
    arguments.target_of(name, x)
    if is_cupy(x):
        arguments.same_place(name, x, q, "q")
        allowed = x.dtype == np.int32
    else:
        allowed = x.dtype.kind in "iu" and x.dtype.itemsize >= 4
    if not allowed:
        raise TypeError(f"{name} must have dtype int32 (in numpy also wider); got {x.dtype}")


def _check_lens(seq_lens: Any, q: Any, max_keys: int) -> Any:
    if seq_lens is None:
        return None
    _check_integers("seq_lens", seq_lens, q)
    if seq_lens.shape != q.shape[:1]:
        raise ValueError(f"seq_lens must have shape {q.shape[:1]}; got {seq_lens.shape}")
    if not is_cupy(seq_lens) and seq_lens.size:
        low, high = int(seq_lens.min()), int(seq_lens.max())
        if low < 0 or high > max_keys:
            raise ValueError(
                f"seq_lens must be from 0 to the caches' {max_keys} keys; got {low} to {high}"
            )
    return seq_lens


def _check_table(table: Any, seq_lens: Any, q: Any, num_pages: int, page_size: int) -> Any:
    """Raises ValueError where a numpy table is used and names no page."""
    if is_cupy(table) or is_cupy(seq_lens):
        return table
    used = np.ones(table.shape, bool)
    if seq_lens is not None:
        pages = -(-seq_lens.astype(np.int64) // max(page_size, 1))
        used = np.arange(table.shape[1]) < pages[:, None]
    wrong = table[used & ((table < 0) | (table >= num_pages))]
    if wrong.size:
        raise ValueError(
            f"block_table must hold pages from 0 to {num_pages - 1} where it is used; got {wrong[0]}"
        )
    return table


def _steering(target: Target, x: Any) -> Any:
    """Lengths or a block table as int32 on `target`, lengths contiguous."""
    if x is None:
        return None
    if not is_cupy(x):
        # What is not used may be anything.
        info = np.iinfo(np.int32)
        x = target.xp.asarray(np.clip(x, info.min, info.max).astype(np.int32))
    return target.xp.ascontiguousarray(x) if x.ndim == 1 else x


# --- the op's record -----------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodeProblem:
    """One call, without its numbers.

    dim_v None: dim.  lens: of each sequence, or None; NaN lies behind them.  page: None where the caches
    are contiguous.  layout: of q and the caches: "bshd" are views of (B, S, H, D), the rows of "padded"
    lie 8 elements further apart, "offset" is not aligned.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int
    dim_v: int | None = None
    dtype: str = "float16"
    lens: tuple[int, ...] | None = None
    page: int | None = None
    causal: bool = True
    scale: float | None = None
    return_lse: bool = False
    layout: str = "C"
    kind: str = "normal"

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads}"
        return f"{self.batch}x{heads}x{self.queries}x{self.keys}x{self.dim} {self.dtype}"


LAYOUTS = ("C", "bshd", "padded", "offset")


def _draw_problem(draw: Draw) -> DecodeProblem:
    batch, kv_heads = draw.choice((0, 1, 1, 2, 3)), draw.choice((1, 1, 2, 3))
    group = draw.choice((1, 2, 4, 5, 17))
    keys = draw.choice((0, 1, 15, 16, 33, 64, 129, 256, 257, 520, 700))
    lens = None
    if draw.choice((False, True, True)):
        lens = tuple(draw.choice((0, keys, draw.integer(0, keys))) for _ in range(batch))
    dim = draw.choice((8, 64, 64, 72, 128, 128, 192, 256))
    return DecodeProblem(
        *(batch, group * kv_heads, kv_heads, draw.choice((0, 1, 1, 1, 2, 4, 16)), keys, dim),
        dim_v=draw.choice((None, None, None, 8, 64, 128, 248)),
        dtype=draw.choice(OP.dtypes),
        lens=lens,
        page=draw.choice((None, None, 1, 16, 24, 64, 256)),
        causal=draw.choice((True, True, False)),
        scale=draw.choice((None, None, 0.0, 0.25, -0.1)),
        return_lse=draw.choice((False, True)),
        layout=draw.choice(("C", *LAYOUTS)),
        kind=draw.choice(("normal", "uniform", "same_sign", "exact")),
    )


def _bench_problem(shape: tuple[int, ...], dtype: str) -> DecodeProblem:
    if len(shape) != 5:
        raise ValueError(f"decode_attention needs a shape (B, H, Hkv, Sk, D); got {shape}")
    dtypes.resolve(dtype, "dtype", DTYPES)
    batch, heads, kv_heads, keys, dim = shape
    return DecodeProblem(batch, heads, kv_heads, 1, keys, dim, dtype=dtype, kind="bench")


def _bench_shapes(target: str) -> tuple[tuple[int, ...], ...]:
    if target == "host":
        return ((1, 8, 2, 1024, 128),)
    return (
        (1, 32, 8, 8192, 128),
        (1, 32, 8, 131072, 128),
        (16, 32, 8, 8192, 128),
        (64, 32, 8, 4096, 128),
        (64, 32, 32, 4096, 128),
    )


def _with_layout(x: np.ndarray, layout: str, xp: Any) -> Any:
    if layout == "bshd":
        return xp.swapaxes(xp.ascontiguousarray(xp.swapaxes(xp.asarray(x), 1, 2)), 1, 2)
    if layout == "padded":
        wide = xp.asarray(np.pad(x, ((0, 0),) * 3 + ((0, 8),), constant_values=np.nan))
        return wide[..., : x.shape[3]]
    return inputs.with_layout(x, layout, xp)


def _paged(caches: tuple[np.ndarray, ...], problem: DecodeProblem, rng: Any) -> tuple[Any, Any]:
    """(caches as pages in random order, some of them in no use, the block table)."""
    page, batch = problem.page, problem.batch
    per_sequence = -(-problem.keys // page)
    places = rng.permutation(batch * per_sequence + 2)
    table = places[: batch * per_sequence].reshape(batch, per_sequence).astype(np.int32)
    pages = []
    for x in caches:
        whole = np.full((*x.shape[:2], per_sequence * page, x.shape[3]), np.nan, x.dtype)
        whole[:, :, : problem.keys] = x
        split = whole.reshape(batch, x.shape[1], per_sequence, page, x.shape[3])
        split = np.moveaxis(split, 2, 1).reshape(-1, x.shape[1], page, x.shape[3])
        pages.append(np.full((len(places), *split.shape[1:]), np.nan, x.dtype))
        pages[-1][table.reshape(-1)] = split
    lens = np.asarray(problem.lens or [problem.keys] * batch)
    unused = np.arange(per_sequence) >= -(-lens // page)[:, None]
    table[unused] = rng.choice((-1, 2**31 - 1))
    return pages, table


def _inputs(problem: DecodeProblem, seed: int, xp: Any) -> Call:
    p, dtype = problem, dtypes.NAMES[problem.dtype]
    shapes = (
        (p.batch, p.heads, p.queries, p.dim),
        (p.batch, p.kv_heads, p.keys, p.dim),
        (p.batch, p.kv_heads, p.keys, p.dim_v or p.dim),
    )
    if p.kind == "bench":
        arrays = (inputs.bench_values(shape, dtype, seed + i, xp) for i, shape in enumerate(shapes))
        return Call(tuple(arrays))
    rng = np.random.default_rng(seed + 3)
    q, *caches = (inputs.values(p.kind, shape, dtype, seed + i) for i, shape in enumerate(shapes))
    for cache in caches:
        for b, length in enumerate(p.lens or ()):
            cache[b, :, length:] = np.nan
    kwargs: dict[str, Any] = {}
    lens = p.lens
    if p.page is not None:
        caches, table = _paged(caches, p, rng)
        kwargs["block_table"] = xp.asarray(table)
        if p.keys % p.page:
            lens = lens or (p.keys,) * p.batch
    if lens is not None:
        kwargs["seq_lens"] = xp.asarray(np.array(lens, np.int32))
    for name, value, default in (
        *(("causal", p.causal, True), ("scale", p.scale, None)),
        ("return_lse", p.return_lse, False),
    ):
        if value != default:
            kwargs[name] = value
    return Call(tuple(_with_layout(x, p.layout, xp) for x in (q, *caches)), kwargs)


def _work(problem: DecodeProblem) -> Work:
    p = problem
    keys = sum(p.lens) if p.lens is not None else p.batch * p.keys
    dim_v, queries = p.dim_v or p.dim, p.batch * p.heads * p.queries
    read = 2 * (keys * p.kv_heads * (p.dim + dim_v) + queries * p.dim)
    flops = 2 * keys * p.heads * p.queries * (p.dim + dim_v)
    return Work(read, queries * (2 * dim_v + 4 * p.return_lse), flops)


def _task(problem: DecodeProblem) -> DecodeTask:
    p = problem
    rows = p.heads // p.kv_heads * p.queries
    dtype, dim_v = dtypes.NAMES[p.dtype], p.dim_v or p.dim
    keys = p.keys if p.page is None else -(-p.keys // p.page) * p.page
    return DecodeTask(dtype, p.batch, p.kv_heads, rows, p.dim, dim_v, keys)


def _sample(
    call: Call, outputs: tuple[Any, ...], max_elements: int, seed: int
) -> tuple[Call, tuple[Any, ...]]:
    """The first and last KV head of the first and last sequence, of large contiguous caches."""
    q, k, v = call.args
    if k.size <= 4 * max_elements or "block_table" in call.kwargs:
        return call, outputs
    group = q.shape[1] // k.shape[1]
    batches, heads = (sorted({0, n - 1}) for n in k.shape[:2])
    q_heads = [head * group + i for head in heads for i in range(group)]
    kwargs = {name: x[batches] if name == "seq_lens" else x for name, x in call.kwargs.items()}
    caches = (x[batches][:, heads] for x in (k, v))
    part = Call((q[batches][:, q_heads], *caches), kwargs)
    return part, tuple(y[batches][:, q_heads] for y in outputs)


OP = Op(
    name="decode_attention",
    run=decode_attention,
    reference=reference.decode_attention,
    bound=reference.decode_attention_bound,
    draw_problem=_draw_problem,
    bench_problem=_bench_problem,
    bench_shapes=_bench_shapes,
    inputs=_inputs,
    work=_work,
    variants=decode.variants,
    configs=lambda problem, arch: decode.configs(_task(problem), arch),
    variant=lambda problem, config: decode.variant(
        dtypes.NAMES[problem.dtype], _task(problem).padded_dim, config
    ),
    sample=_sample,
    dtypes=("float16", "bfloat16"),
)
