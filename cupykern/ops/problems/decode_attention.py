"""Problems of decode_attention: queries, contiguous and paged caches, lengths and block tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ... import dtypes, inputs
from ...arrays import take
from ...attention import decode_config
from ...attention.decode_config import CACHE_DTYPES, DTYPES, LAYOUTS, DecodeConfig, DecodeTask
from ...kernels import Variant
from ...op import Call, Draw, Work
from ...typing import Array, Namespace
from ..checks.attention import padded_size
from .attention import FORMULAS, NO_OPTIONS, ScoreChoice, draw_options

_DTYPES = tuple(str(dtype) for dtype in DTYPES)
CACHES = tuple(str(dtype) for dtype in CACHE_DTYPES)
SCALES = (None, "number", "tensor", "heads", "tokens")


@dataclass(frozen=True)
class DecodeProblem:
    """Shapes and options of a call.

    dim_v: None: dim.  lens: keys of each sequence, None: all; beyond them caches hold `nothing`.
    page: keys per page, None: contiguous caches.  layout: order of the caches' dims, one of
    LAYOUTS.  view: storage of q and caches, one of VIEWS: "swapped" is contiguous with dims 1 and 2
    exchanged, "padded" has 8 more elements between rows, "offset" starts one element off alignment.
    cache_dtype: of an 8-bit cache, None: dtype.  scales: of 8-bit caches, one of SCALES.
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
    layout: str = "hnd"
    view: str = "C"
    kind: str = "normal"
    options: ScoreChoice = NO_OPTIONS
    cache_dtype: str | None = None
    scales: str | None = None

    def __str__(self) -> str:
        shape = f"{self.batch}x{self.heads}/{self.kv_heads}x{self.queries}x{self.keys}x{self.dim}"
        cache = "" if self.cache_dtype is None else f", {self.cache_dtype} cache"
        return f"{shape}{self.options} {self.dtype}{cache}"


VIEWS = ("C", "swapped", "padded", "offset")


def draw_problem(draw: Draw) -> DecodeProblem:
    batch, kv_heads = draw.choice((0, 1, 1, 2, 3)), draw.choice((1, 1, 2, 3))
    group = draw.choice((1, 2, 4, 5, 17))
    keys = draw.choice((0, 1, 15, 16, 33, 64, 129, 256, 257, 520, 700))
    lens = None
    if draw.choice((False, True, True)):
        lens = tuple(draw.choice((0, keys, draw.integer(0, keys))) for _ in range(batch))
    cache_dtype = draw.choice((None, None, *CACHES))
    dim = draw.choice((8, 64, 64, 72, 128, 128, 192, 256, 33))
    return DecodeProblem(
        *(batch, group * kv_heads, kv_heads),
        *(draw.choice((0, 1, 1, 1, 2, 4, 16, 33, 64)), keys, dim),
        dim_v=draw.choice((None, None, None, 8, 64, 128, 248, 61)),
        dtype=draw.choice(_DTYPES),
        lens=lens,
        page=draw.choice((None, None, 1, 16, 24, 64, 256)),
        causal=draw.choice((True, True, False)),
        scale=draw.choice((None, None, 0.0, 0.25, -0.1)),
        return_lse=draw.choice((False, True)),
        layout=draw.choice(LAYOUTS),
        view=draw.choice(("C", *VIEWS)),
        kind=draw.choice(("normal", "uniform", "same_sign", "exact", "subnormal")),
        options=draw_options(draw),
        cache_dtype=cache_dtype,
        scales=draw.choice(SCALES) if cache_dtype else None,
    )


def bench_problem(shape: tuple[int, ...], text: str) -> DecodeProblem:
    """text: a dtype, then after a colon the format of an 8-bit cache, with one scale per head."""
    dtype, options = inputs.bench_options("decode_attention", text, CACHES)
    if len(options) > 1:
        raise ValueError(f"formats of different caches: {', '.join(sorted(options))}")
    cache_dtype = next(iter(options), None)
    if len(shape) != 5:
        raise ValueError(f"decode_attention needs a shape (B, H, Hkv, Sk, D); got {shape}")
    dtypes.resolve(dtype, "dtype", DTYPES)
    batch, heads, kv_heads, keys, dim = shape
    return DecodeProblem(
        *(batch, heads, kv_heads, 1, keys, dim),
        dtype=dtype,
        kind="bench",
        cache_dtype=cache_dtype,
        scales="heads" if cache_dtype else None,
    )


def bench_shapes(target: str) -> tuple[tuple[int, ...], ...]:
    if target == "host":
        return ((1, 8, 2, 1024, 128),)
    return (
        (1, 32, 8, 8192, 128),
        (1, 32, 8, 131072, 128),
        (16, 32, 8, 8192, 128),
        (64, 32, 8, 4096, 128),
        (64, 32, 32, 4096, 128),
    )


def stored(x: np.ndarray, view: str, xp: Namespace) -> Any:
    dtype = x.dtype
    codes = dtype if x.itemsize > 1 else np.dtype(np.uint8)  # CuPy cannot copy FP8
    if view == "swapped":
        made = xp.swapaxes(xp.asarray(x.view(codes)), 1, 2)
        return xp.swapaxes(xp.ascontiguousarray(made), 1, 2).view(dtype)
    if view == "padded":
        wide = np.full((*x.shape[:3], x.shape[3] + 8), nothing(x.dtype), x.dtype)
        wide[..., : x.shape[3]] = x
        return inputs.with_layout(wide.view(codes), "C", xp)[..., : x.shape[3]].view(dtype)
    return inputs.with_layout(x.view(codes), view, xp).view(dtype)


def nothing(dtype: np.dtype) -> float:
    """The value of cache slots without a key: NaN, for int8 its largest number."""
    return 127 if dtype == dtypes.int8 else np.nan


def codes(kind: str, shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    """Values of an 8-bit cache that cover all magnitudes of its format."""
    if dtype == dtypes.int8:
        kind, most = "exact" if kind == "exact" else "uniform", 127 / 10
        x = inputs.values(kind, shape, dtypes.float32, seed)
        return np.rint(x * (1 if kind == "exact" else most)).astype(dtype)
    return inputs.values(kind, shape, dtype, seed)


def scale_values(p: Any, shape: tuple[int, ...], rng: Any) -> np.ndarray:
    """Scales for a cache of p.cache_dtype: most codes decode to magnitudes near 1."""
    size = 0.02 if p.cache_dtype == "int8" and p.kind != "exact" else 1.0
    if p.kind == "exact":  # powers of two
        found = np.exp2(rng.integers(-2, 3, shape))
    else:
        found = size * np.exp2(rng.uniform(-2, 1, shape)) * rng.choice((1.0, 1.0, 1.0, -1.0), shape)
    return np.asarray(found, np.float32)


def _scale_shape(p: DecodeProblem) -> tuple[int, ...]:
    shapes = {"heads": (p.kv_heads,), "tokens": (p.batch, p.kv_heads, p.keys)}
    return shapes.get(p.scales or "", ())


def _paged(
    caches: Sequence[np.ndarray], problem: DecodeProblem, page: int, rng: Any
) -> tuple[Any, Any]:
    """(the caches as pages in random order, two of them unused; the block table)."""
    batch = problem.batch
    per_sequence = -(-problem.keys // page)
    order = rng.permutation(batch * per_sequence + 2)
    table = order[: batch * per_sequence].reshape(batch, per_sequence).astype(np.int32)
    pages = []
    for x in caches:
        unused = nothing(x.dtype)
        padded = np.full((*x.shape[:2], per_sequence * page, x.shape[3]), unused, x.dtype)
        padded[:, :, : problem.keys] = x
        split = padded.reshape(batch, x.shape[1], per_sequence, page, x.shape[3])
        split = np.moveaxis(split, 2, 1).reshape(-1, x.shape[1], page, x.shape[3])
        pages.append(np.full((len(order), *split.shape[1:]), unused, x.dtype))
        pages[-1][table.reshape(-1)] = split
    lens = np.asarray(problem.lens or [problem.keys] * batch)
    beyond = np.arange(per_sequence) >= -(-lens // page)[:, None]
    table[beyond] = rng.choice((-1, 2**31 - 1))
    return pages, table


def make_inputs(problem: DecodeProblem, seed: int, xp: Namespace) -> Call:
    p, dtype = problem, dtypes.NAMES[problem.dtype]
    shapes = (
        (p.batch, p.heads, p.queries, p.dim),
        (p.batch, p.kv_heads, p.keys, p.dim),
        (p.batch, p.kv_heads, p.keys, p.dim_v or p.dim),
    )
    if p.kind == "bench":
        kinds = [dtype, *[dtypes.NAMES[p.cache_dtype or p.dtype]] * 2]
        arrays = tuple(
            inputs.bench_values(shape, kind, seed + i, xp)
            for i, (shape, kind) in enumerate(zip(shapes, kinds, strict=True))
        )
        if not p.cache_dtype:
            return Call(arrays)
        scale = 1 / 32 if p.cache_dtype == "int8" else 1.0
        heads = xp.asarray(np.full(p.kv_heads, scale, np.float32))
        return Call(arrays, {"k_scale": heads, "v_scale": heads})
    rng = np.random.default_rng(seed + 3)
    q = inputs.values(p.kind, shapes[0], dtype, seed)
    cached, is_codes = dtypes.NAMES[p.cache_dtype or p.dtype], p.cache_dtype is not None
    make = codes if is_codes else inputs.values
    caches = [make(p.kind, shape, cached, seed + i + 1) for i, shape in enumerate(shapes[1:])]
    scales = [scale_values(p, _scale_shape(p), rng) for _ in "kv"] if is_codes and p.scales else []
    by_token = p.scales == "tokens"
    caches += [x[..., None] for x in scales if by_token]
    if p.kind == "subnormal":  # keep scores normal
        q = inputs.values("normal", shapes[0], dtype, seed)
        q = q * np.asarray(
            2.0**110 if dtype == dtypes.bfloat16 and not p.cache_dtype else 1.0, dtype
        )
    for cache in caches:
        for b, length in enumerate(p.lens or ()):
            cache[b, :, length:] = nothing(cache.dtype)
    kwargs: dict[str, Any] = {}
    lens = p.lens
    if p.page is not None:
        caches, table = _paged(caches, p, p.page, rng)
        kwargs["block_table"] = xp.asarray(table)
        if p.keys % p.page:
            lens = lens or (p.keys,) * p.batch
    if lens is not None:
        kwargs["seq_lens"] = xp.asarray(np.array(lens, np.int32))
    if p.layout == "nhd":
        caches = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in caches]
    caches, of_tokens = caches[:2], [xp.asarray(x[..., 0]) for x in caches[2:]]
    given = of_tokens or [xp.asarray(x) if p.scales != "number" else float(x) for x in scales]
    kwargs |= dict(zip(("k_scale", "v_scale"), given, strict=False))
    kwargs |= p.options.arguments(p.batch, p.heads, seed + 4, xp)
    for name, value, default in (
        *(("layout", p.layout, "hnd"), ("causal", p.causal, True), ("scale", p.scale, None)),
        ("return_lse", p.return_lse, False),
    ):
        if value != default:
            kwargs[name] = value
    return Call(tuple(stored(x, p.view, xp) for x in (q, *caches)), kwargs)


def work(problem: DecodeProblem) -> Work:
    p = problem
    keys = sum(p.lens) if p.lens is not None else p.batch * p.keys
    dim_v, queries = p.dim_v or p.dim, p.batch * p.heads * p.queries
    itemsize, per_key = dtypes.NAMES[p.cache_dtype or p.dtype].itemsize, p.dim + dim_v
    scales = 8 if p.scales == "tokens" else 0
    read = keys * p.kv_heads * (itemsize * per_key + scales) + 2 * queries * p.dim
    # Bandwidth-bound: FLOPs are not counted.
    return Work(read, queries * (2 * dim_v + 4 * p.return_lse))


def task_of(problem: DecodeProblem) -> DecodeTask:
    p = problem
    rows = p.heads // p.kv_heads * p.queries
    dtype, dim_v = dtypes.NAMES[p.dtype], p.dim_v or p.dim
    keys = p.keys if p.page is None else -(-p.keys // p.page) * p.page
    left, right = p.options.window or (-1, -1)
    keys = min(keys, left + p.queries) if left >= 0 else keys
    general = p.options.changes_scores or left >= 0 or (right > 0 and not p.causal)
    cache_dtype = dtypes.NAMES[p.cache_dtype] if p.cache_dtype else None
    step = 16 if cache_dtype else 8
    dims = padded_size(p.dim, step), padded_size(dim_v, step)
    formulas = p.options.formulas(p.batch, p.heads, p.kv_heads)
    code = formulas.code if formulas else None
    return DecodeTask(*(dtype, p.batch, p.kv_heads, rows, *dims, keys, general, code, cache_dtype))


def variant(problem: DecodeProblem, config: DecodeConfig) -> Variant:
    task = task_of(problem)
    kind = task.dtype, task.padded_dim, config, task.general, task.formulas
    return decode_config.variant(*kind, cache_dtype=task.cache_dtype)


def variants(arch: str) -> tuple[Variant, ...]:
    """The variants of decode_config, and those of a formula."""
    choice = ScoreChoice(score=FORMULAS[0][0], mask=FORMULAS[0][1])
    plain = DecodeProblem(1, 8, 2, 1, 4096, 128, dtype="bfloat16", options=choice)
    problems = plain, replace(plain, cache_dtype="float8_e4m3fn", scales="tokens")
    of_formulas = tuple(
        variant(problem, decode_config.choose_config(task_of(problem), arch))
        for problem in problems
    )
    return *decode_config.variants(arch), *decode_config.untuned_on_rdna(of_formulas, arch)


def sample(
    call: Call, outputs: tuple[Array, ...], max_elements: int, seed: int
) -> tuple[Call, tuple[Array, ...]]:
    """Sample the first and last KV head of the first and last sequence.  Calls with small or paged
    caches, ALiBi, sinks or formulas are kept whole."""
    q, k, v = call.args
    whole = {"block_table", "alibi_slopes", "sinks", "score", "mask"} & set(call.kwargs)
    if k.size <= 4 * max_elements or whole:
        return call, outputs
    axis = 2 if call.kwargs.get("layout") == "nhd" else 1  # of the caches' heads
    group = q.shape[1] // k.shape[axis]
    batches, heads = (sorted({0, n - 1}) for n in (k.shape[0], k.shape[axis]))
    q_heads = [head * group + i for head in heads for i in range(group)]
    kwargs = {name: x[batches] if name == "seq_lens" else x for name, x in call.kwargs.items()}
    for name in {"k_scale", "v_scale"} & set(kwargs):
        x = kwargs[name]
        if getattr(x, "ndim", 0) == 3:
            kwargs[name] = x[batches][(slice(None),) * axis + (heads,)]
        elif getattr(x, "ndim", 0) == 1:
            kwargs[name] = x[heads]
    some = (slice(None),) * axis + (heads,)
    caches = (take(take(x, batches), some) for x in (k, v))
    part = Call((q[batches][:, q_heads], *caches), kwargs)
    return part, tuple(y[batches][:, q_heads] for y in outputs)
