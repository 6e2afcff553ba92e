"""Problems of rope_and_cache: heads of one QKV array, positions, contiguous and paged caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import dtypes, inputs
from ...attention.rope_config import DTYPES, LAYOUTS, RopeConfig, RopeTask, configs, takes_vectors
from ...numerics import namespace, to_numpy
from ...op import Call, Draw, Work
from ...targets import limits
from ...typing import Array, Namespace

_DTYPES = tuple(str(dtype) for dtype in DTYPES)
VIEWS = ("packed", "C", "swapped", "padded", "sliced", "offset")
SCALES = (None, "number", "tensor", "heads", "outputs")
_OPTIONS = ("nocache", "paged", "nhd", "norm", "interleaved", "float8_e4m3fn", "int8")
_BENCH_PAGE = 64


@dataclass(frozen=True)
class RopeProblem:
    """Shapes and options of a call.

    half: rotated pairs, None: all.  slots: of a sequence in the cache, None: no cache.  cache_dtype
    None: dtype.  page: slots per page, None: contiguous.  first: position of the first token of the
    first sequence.  strays: one token in eight gets position -1 or one beyond the cache.
    rows: rows of cos_sin, None: inv_freq.
    weight_dtype: of the norms' weights, None: no norms.  scales: one of SCALES.  view: storage of
    q, k and v: "packed": slices of one array, "swapped": contiguous with heads before tokens,
    "padded": 8 more elements between heads, others as in inputs.LAYOUTS.  one_row: positions are
    (S,).  layout: order of the caches' dims.
    """

    batch: int
    seq_len: int
    heads: int
    kv_heads: int
    dim: int
    half: int | None = None
    dtype: str = "float16"
    slots: int | None = None
    cache_dtype: str | None = None
    page: int | None = None
    first: int = 0
    strays: bool = False
    interleaved: bool = False
    attention_factor: float | None = None
    rows: int | None = None
    weight_dtype: str | None = None
    eps: float | None = None
    scales: str | None = None
    layout: str = "hnd"
    view: str = "packed"
    cache_view: str = "C"
    one_row: bool = False
    kind: str = "normal"

    @property
    def pairs(self) -> int:
        return self.dim // 2 if self.half is None else self.half

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads}"
        cache = "" if self.slots is None else f", {self.cache_dtype or self.dtype} cache"
        paged = "" if self.page is None else f" of pages of {self.page}"
        return f"{self.batch}x{self.seq_len}x{heads}x{self.dim} {self.dtype}{cache}{paged}"


def draw_problem(draw: Draw) -> RopeProblem:
    dim = draw.choice((2, 5, 16, 32, 64, 64, 80, 128, 128, 192, 256, 512))
    half = draw.choice((None, None, None, 1, dim // 4, dim // 2 // 8 * 8))
    seq_len, slots = draw.choice((0, 1, 1, 2, 5, 17)), draw.choice((None, 1, 7, 24, 40, 64))
    cache_dtype = draw.choice((None, None, "float8_e4m3fn", "int8")) if slots else None
    weight_dtype = draw.choice((None, None, *_DTYPES))
    # Norms get only values whose squares FP32 can represent.
    kinds = ("normal", "uniform", "same_sign", "exact", "subnormal")
    first = draw.choice((0, 0, 1, slots - seq_len if slots and slots > seq_len else 5))
    return RopeProblem(
        *(draw.choice((0, 1, 1, 2, 3)), seq_len, draw.choice((0, 1, 2, 4, 6, 33))),
        *(draw.choice((1, 1, 2, 3)), dim, max(half, 1) if half is not None else None),
        dtype=draw.choice(_DTYPES),
        slots=slots,
        cache_dtype=cache_dtype,
        page=draw.choice((None, None, 1, 4, 12, 16)) if slots else None,
        first=first if slots else draw.choice((first, 131_072, 2**24 + 1)),
        strays=draw.choice((False, True)),
        interleaved=draw.choice((False, True)),
        attention_factor=draw.choice((None, None, 1.2079, -0.5)),
        rows=draw.choice((None, None, 1, 24)),
        weight_dtype=weight_dtype,
        eps=draw.choice((None, 0.0625)) if weight_dtype else None,
        scales=draw.choice(SCALES) if cache_dtype else None,
        layout=draw.choice(LAYOUTS),
        view=draw.choice(("packed", *VIEWS)),
        cache_view=draw.choice(("C", "C", "sliced", "offset")),
        one_row=draw.choice((False, True)),
        kind=draw.choice(kinds if weight_dtype else inputs.KINDS),
    )


def bench_problem(shape: tuple[int, ...], text: str) -> RopeProblem:
    """text: a dtype, then after a colon options joined by "+": "nocache", "paged", "nhd", "norm",
    "interleaved", and the format of an 8-bit cache."""
    dtype, options = inputs.bench_options("rope_and_cache", text, _OPTIONS)
    dtypes.resolve(dtype, "dtype", DTYPES)
    if len(shape) != 5:
        raise ValueError(f"rope_and_cache needs a shape (B, S, H, Hkv, D); got {shape}")
    if shape[4] % 2:
        raise ValueError(f"rope_and_cache rotates an even D; got {shape[4]}")
    formats = options & {"float8_e4m3fn", "int8"}
    if len(formats) > 1 or ("nocache" in options and options & {"paged", "nhd", *formats}):
        raise ValueError(f"options of different caches: {', '.join(sorted(options))}")
    return RopeProblem(
        *shape,
        dtype=dtype,
        slots=None if "nocache" in options else max(1, shape[1]),
        cache_dtype=next(iter(formats), None),
        page=_BENCH_PAGE if "paged" in options else None,
        interleaved="interleaved" in options,
        weight_dtype=dtype if "norm" in options else None,
        layout="nhd" if "nhd" in options else "hnd",
        one_row=True,
        kind="bench",
    )


def bench_shapes(target: str) -> tuple[tuple[int, ...], ...]:
    if target == "host":
        return ((1, 64, 8, 2, 128),)
    return ((1, 4096, 32, 8, 128), (4, 4096, 32, 8, 128), (64, 1, 32, 8, 128))


def make_inputs(problem: RopeProblem, seed: int, xp: Namespace) -> Call:
    p, rng = problem, np.random.default_rng(seed + 7)
    kwargs: dict[str, Any] = {"inv_freq": xp.asarray(_frequencies(p.pairs))}
    if p.rows is not None:
        table = rng.uniform(-1.5, 1.5, (p.rows, 2 * p.pairs + 1)).astype(np.float32)
        kwargs = {"cos_sin": xp.asarray(table)[:, 1:]}
    positions, caches = _positions(p, rng), ()
    if p.slots is not None:
        caches, kwargs_of_cache = _caches(p, rng, seed, xp)
        kwargs |= kwargs_of_cache
    if p.weight_dtype is not None:
        dtype = dtypes.NAMES[p.weight_dtype]
        for i, name in enumerate(("q_weight", "k_weight")):
            if seed % 3 != 2 * i or p.kind == "bench":  # both, or one of them
                x = inputs.values("same_sign", (p.dim,), dtype, seed + 2 + i)
                kwargs[name] = xp.asarray(x)
    for name, default in (("interleaved", False), ("attention_factor", None), ("eps", None)):
        if getattr(p, name) != default:
            kwargs[name] = getattr(p, name)
    return Call((*_heads(p, seed, xp), xp.asarray(positions), *caches), kwargs)


def _frequencies(half: int) -> np.ndarray:
    return (10_000.0 ** (-np.arange(half) / half)).astype(np.float32)


def _heads(p: RopeProblem, seed: int, xp: Namespace) -> list[Any]:
    """q, k and v."""
    counts, dtype = (p.heads, p.kv_heads, p.kv_heads), dtypes.NAMES[p.dtype]
    shape = p.batch, p.seq_len, sum(counts), p.dim
    if p.kind == "bench":
        whole = inputs.bench_values(shape, dtype, seed, xp)
    else:
        whole = inputs.values(p.kind, shape, dtype, seed)
        if p.view == "packed":
            whole = xp.asarray(whole)
    ends = np.cumsum(counts).tolist()
    parts = [whole[:, :, end - n : end] for n, end in zip(counts, ends, strict=True)]
    if p.view == "packed":
        return parts
    return [_in_memory(np.ascontiguousarray(x), p.view, xp) for x in parts]


def _in_memory(x: np.ndarray, view: str, xp: Namespace) -> Any:
    if view == "swapped":
        return xp.swapaxes(xp.asarray(np.ascontiguousarray(np.swapaxes(x, 1, 2))), 1, 2)
    if view == "padded":
        return xp.asarray(np.pad(x, ((0, 0),) * 3 + ((0, 8),)))[..., : x.shape[3]]
    return inputs.with_layout(x, view, xp)


def _positions(p: RopeProblem, rng: Any) -> np.ndarray:
    """Consecutive positions from `first` on, shifted by 0 to 7 per sequence unless one_row."""
    first = p.first + (0 if p.one_row else rng.integers(0, 8, (p.batch, 1)))
    positions = np.broadcast_to(first + np.arange(p.seq_len), (p.batch, p.seq_len)).astype(np.int32)
    if p.strays:
        room = (p.slots or 9) if p.page is None else -(-(p.slots or 9) // p.page) * p.page
        stray = rng.choice((-1, room, -(2**31), 2**31 - 1), positions.shape)
        positions = np.where(rng.random(positions.shape) < 1 / 8, stray, positions).astype(np.int32)
    return np.array(positions[0] if p.one_row and p.batch else positions)


def _caches(
    p: RopeProblem, rng: Any, seed: int, xp: Namespace
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(k_cache, v_cache), filled with random values, and the arguments that go with them."""
    kwargs: dict[str, Any] = {}
    assert p.slots is not None
    count, slots = p.batch, p.slots
    if p.page is not None:
        pages = -(-p.slots // p.page)
        table = rng.permutation(p.batch * pages + 2)[: p.batch * pages].astype(np.int32)
        table = table.reshape(p.batch, pages)
        count, slots = p.batch * pages + 2, p.page
        if p.strays:
            table[rng.random(table.shape) < 1 / 8] = rng.choice((-1, count))
        kwargs["block_table"] = xp.asarray(table)
    rows = (p.kv_heads, slots) if p.layout == "hnd" else (slots, p.kv_heads)
    shape, dtype = (count, *rows, p.dim), dtypes.NAMES[p.cache_dtype or p.dtype]
    if p.layout != "hnd":
        kwargs["layout"] = p.layout
    if p.scales is not None:
        kwargs |= _scales(p, shape[:3], rng, xp)
    if p.kind == "bench":
        caches = (inputs.bench_values(shape, dtype, seed + i, xp) for i in (4, 5))
    else:
        numbers = (rng.integers(-8, 9, shape).astype(dtype) for _ in range(2))
        bits = (x.view(np.uint8) if x.itemsize == 1 else x for x in numbers)  # CuPy cannot copy FP8
        caches = (inputs.with_layout(x, p.cache_view, xp).view(dtype) for x in bits)
    return tuple(caches), kwargs


def _scales(p: RopeProblem, shape: tuple[int, ...], rng: Any, xp: Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("k_scale", "v_scale"):
        sizes = {"tensor": (), "heads": (p.kv_heads,), "outputs": shape}.get(p.scales or "")
        if sizes is None:
            found[name] = float(rng.uniform(0.01, 0.1))
        else:
            found[name] = xp.asarray(rng.uniform(0.01, 0.1, sizes).astype(np.float32))
    return found


def work(problem: RopeProblem) -> Work:
    p = problem
    itemsize = dtypes.NAMES[p.dtype].itemsize
    cached = dtypes.NAMES[p.cache_dtype or p.dtype].itemsize
    tokens = p.batch * p.seq_len
    q, kv = tokens * p.heads * p.dim, tokens * p.kv_heads * p.dim
    if p.slots is None:
        return Work(itemsize * (q + kv), itemsize * (q + kv))
    scales = 8 * tokens * p.kv_heads if p.scales == "outputs" else 0
    return Work(itemsize * (q + 2 * kv), itemsize * q + 2 * cached * kv + scales)


def task_of(problem: RopeProblem) -> RopeTask:
    """The task, assuming the memory layouts of bench problems."""
    p, dtype = problem, dtypes.NAMES[problem.dtype]
    num_heads = p.heads + p.kv_heads * (1 if p.slots is None else 2)
    by_vectors = takes_vectors(dtype, p.dim, p.pairs) and p.view not in ("sliced", "offset")
    by_vectors = by_vectors and (p.slots is None or p.cache_view == "C")
    return RopeTask(
        *(dtype, p.batch * p.seq_len, max(1, num_heads), p.dim, p.pairs),
        *(p.weight_dtype is not None, by_vectors),
    )


def configs_of(problem: RopeProblem, arch: str) -> tuple[RopeConfig, ...]:
    return configs(task_of(problem), limits.device(arch))


def sample(
    call: Call, outputs: tuple[Array, ...], max_elements: int, seed: int
) -> tuple[Call, tuple[Array, ...]]:
    """Sample tokens of the first and the last sequence; their slots become pages of one slot.
    Small or paged calls are kept whole.

    The reference starts from the cache after the call.
    """
    q, k, v, positions, *caches = call.args
    if q.size <= max_elements or "block_table" in call.kwargs:
        return call, outputs
    xp, batches = namespace(q), np.unique([0, q.shape[0] - 1])
    keep = max(2, max_elements // (len(batches) * q.shape[2] * q.shape[3]))
    rng = np.random.default_rng(seed)
    tokens = np.sort(rng.choice(q.shape[1], min(keep, q.shape[1]), replace=False))
    tokens[[0, -1]] = 0, q.shape[1] - 1

    def some(x: Any) -> Any:
        return x[batches][:, tokens]

    rows = np.broadcast_to(to_numpy(positions), q.shape[:2])[batches][:, tokens]
    heads = tuple(map(some, (q, k, v)))
    kwargs = dict(call.kwargs)
    if not caches:
        return Call((*heads, xp.asarray(rows)), kwargs), tuple(map(some, outputs))
    by_head = kwargs.get("layout", "hnd") == "hnd"
    slots = caches[0].shape[2 if by_head else 1]
    batch, token = np.nonzero((rows >= 0) & (rows < slots))
    places = batches[batch], rows[batch, token]
    table = np.full((len(batches), slots), -1, np.int32)
    table[batch, rows[batch, token]] = np.arange(len(batch))

    def pages(x: Any) -> Any:
        bits = x.view(f"u{x.itemsize}")  # CuPy cannot index FP8
        found = (bits.swapaxes(1, 2) if by_head else bits)[places]
        return (found[:, :, None] if by_head else found[:, None]).view(x.dtype)

    kwargs |= {n: pages(x) for n, x in kwargs.items() if getattr(x, "ndim", 0) == 3}
    kwargs["block_table"] = xp.asarray(table)
    part = Call((*heads, xp.asarray(rows), *map(pages, caches)), kwargs)
    return part, (*map(some, outputs[:1]), *map(pages, outputs[1:]))
