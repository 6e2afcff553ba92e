"""Problems of attention_varlen: sequences of different lengths, concatenated or paged keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ... import dtypes, inputs
from ...attention import attention_plan
from ...attention.attention_task import NO_MASK, Scores, prescales
from ...attention.decode_config import LAYOUTS
from ...kernels import Variant
from ...op import Call, Draw, Work
from ...typing import Array, Namespace
from .attention import (
    DTYPES,
    FORMULAS,
    KINDS,
    NO_OPTIONS,
    ScoreChoice,
    bench_sizes,
    configs,
    draw_options,
    in_memory,
    values,
)
from .attention import variant as problem_variant
from .attention import variants as problem_variants
from .decode_attention import CACHES, SCALES, codes, nothing, scale_values, stored


@dataclass(frozen=True)
class VarlenProblem:
    """One call, without data.

    lengths: (queries, keys) of each sequence.  page: keys per page; None: concatenated keys.
    layout: order of the pages' dims, one of LAYOUTS.  cache_dtype: of 8-bit pages, whose scales are
    one of SCALES.
    """

    lengths: tuple[tuple[int, int], ...]
    h: int
    h_kv: int
    d: int
    dv: int
    dtype: str = "float16"
    causal: bool = False
    causal_align: str = "bottom_right"
    scale: float | None = None
    view: str = "C"
    lse: bool = False
    kind: str = "normal"
    qk_accumulate: str = "float32"
    algorithm: str = "flash"
    options: ScoreChoice = NO_OPTIONS
    page: int | None = None
    layout: str = "hnd"
    cache_dtype: str | None = None
    scales: str | None = None

    def __str__(self) -> str:
        rows = sum(length for length, _ in self.lengths)
        shape = f"{rows}x{self.h}x{self.d}{self.options}"
        pages = "" if self.page is None else f", pages of {self.page} keys"
        pages += f" in {self.cache_dtype}" if self.cache_dtype else ""
        return f"{len(self.lengths)} sequences, {shape} {self.dtype}{pages}"

    @property
    def scores(self) -> Scores:
        return Scores.of(self.general, NO_MASK, self.scale, self.qk_accumulate == "float16")

    @property
    def general(self) -> bool:
        left, right = self.options.window or (-1, -1)
        scales = self.page is not None and prescales(NO_MASK, self.scale)
        windowed = left >= 0 or (right > 0 and not self.causal)
        scales = scales or self.cache_dtype is not None
        return self.options.changes_scores or windowed or scales


def draw_problem(draw: Draw) -> VarlenProblem:
    h, h_kv = draw.choice(((1, 1), (2, 1), (4, 2)))
    count = draw.choice((0, 1, 2, 3, 5))
    sizes = (0, 1, 3, 16, 33, 65, 100)
    page = draw.choice((None, None, None, 1, 16, 24, 64, 256))
    cache_dtype = draw.choice((None, *CACHES)) if page is not None else None
    return VarlenProblem(
        tuple((draw.choice(sizes), draw.choice(sizes)) for _ in range(count)), h, h_kv,
        draw.choice((8, 40, 64, 33)), draw.choice((16, 64, 5)), draw.choice(DTYPES),
        causal=draw.choice((False, True)),
        causal_align=draw.choice(("top_left", "bottom_right")),
        scale=draw.choice((None, None, 0.3)) if page is None else draw.choice((None, 0.3, -0.2)),
        view=draw.choice(("C", "C", "padded", "offset")),
        lse=draw.choice((False, True)),
        kind=draw.choice(KINDS[:-1]),
        options=draw_options(draw),
        page=page,
        layout=draw.choice(LAYOUTS) if page is not None else "hnd",
        cache_dtype=cache_dtype,
        scales=draw.choice(SCALES) if cache_dtype else None,
    )  # fmt: skip


def bench_problem(shape: tuple[int, ...], dtype: str) -> VarlenProblem:
    """Lengths are spread from S / 2 to 3 S / 2, with mean S.  A seventh number of a shape, after
    Hkv, is the page size in keys."""
    page = shape[6] if len(shape) == 7 else None
    b, h, h_kv, s, d, causal = bench_sizes(shape[:6] if page is not None else shape, dtype)
    if page is not None and page < 1:
        raise ValueError(f"a page has at least one key; got {page}")
    lengths = [s // 2 + round(s * i / (b - 1)) if b > 1 else s for i in range(b)]
    pairs = tuple((n, n) for n in lengths)
    return VarlenProblem(
        *(pairs, h, h_kv, d, d, dtype, bool(causal)), kind="bench", page=page, layout="nhd"
    )


def bench_shapes(target: str) -> tuple[tuple[int, ...], ...]:
    if target == "host":
        return ((3, 2, 100, 64), (3, 2, 100, 64, 1))
    return ((16, 16, 1024, 128), (16, 16, 1024, 128, 1), (4, 16, 4096, 128, 1))


def make_inputs(problem: VarlenProblem, seed: int, xp: Namespace) -> Call:
    p = problem
    dtype = dtypes.NAMES[p.dtype]
    q_lengths, k_lengths = zip(*p.lengths, strict=True) if p.lengths else ((), ())
    rows, keys = sum(q_lengths), sum(k_lengths)
    shapes = (rows, p.h, p.d), (keys, p.h_kv, p.d), (keys, p.h_kv, p.dv)
    index_arrays: dict[str, Any] = {}
    if p.page is not None:
        args, index_arrays = _paged(p, shapes[0], seed, xp)
    elif p.kind == "bench":
        args = tuple(inputs.bench_values(x, dtype, seed + i, xp) for i, x in enumerate(shapes))
    else:
        args = tuple(
            in_memory(values(p.kind, (1, *shape), dtype, seed + i, name), "bhsd", p.view, xp)[0]
            for i, (name, shape) in enumerate(zip("qkv", shapes, strict=True))
        )
    lengths = (q_lengths, k_lengths) if p.page is None else (q_lengths,)
    cu = [np.cumsum((0, *each), dtype=np.int32) for each in lengths]
    if seed % 2 or p.kind == "bench":  # else numpy arrays, whose contents are checked
        cu = [xp.asarray(x) for x in cu]
        index_arrays = {
            name: x if isinstance(x, float) else xp.asarray(x) for name, x in index_arrays.items()
        }
    kwargs: dict[str, Any] = {"max_seqlen_q": max(q_lengths, default=0)}
    if p.page is None or seed % 3 == 0:
        kwargs["max_seqlen_k"] = max(k_lengths, default=0)
    kwargs |= index_arrays | p.options.arguments(len(p.lengths), p.h, seed + 4, xp)
    for name, value, default in (
        ("causal", p.causal, False), ("causal_align", p.causal_align, "bottom_right"),
        ("scale", p.scale, None), ("return_lse", p.lse, False),
    ):  # fmt: skip
        if value != default:
            kwargs[name] = value
    if p.page is not None and p.layout != "hnd":
        kwargs["layout"] = p.layout
    return Call((*args, *cu), kwargs)


def _paged(
    problem: VarlenProblem, q_shape: tuple[int, ...], seed: int, xp: Namespace
) -> tuple[tuple[Any, ...], dict[str, np.ndarray]]:
    """((q, k, v), {lengths, block table, scales}).  Pages are in random order; two are unused.

    Slots without a key hold `nothing`; table entries after a sequence's last page are invalid.
    """
    p, rng = problem, np.random.default_rng(seed + 5)
    assert p.page is not None
    dtype, page = dtypes.NAMES[p.dtype], p.page
    cached = dtypes.NAMES[p.cache_dtype or p.dtype]
    lens = np.array([keys for _, keys in p.lengths], np.int32)
    pages_of = -(-lens // page)
    room = max([*pages_of, 1]) + seed % 2  # columns of the table
    order = rng.permutation(int(pages_of.sum()) + 2)
    table = np.full((len(lens), room), -1 if seed % 3 else 2**31 - 1, np.int32)
    numbers = iter(order)
    for own, count in zip(table, pages_of, strict=True):
        own[:count] = [next(numbers) for _ in range(count)]
    index_arrays: dict[str, Any] = {"seq_lens_k": lens, "block_table": table}
    shapes = [(len(order), p.h_kv, page, dim) for dim in (p.d, p.dv)]
    if p.kind == "bench":
        swapped = [(n, size, heads, dim) for n, heads, size, dim in shapes]
        found = swapped if p.layout == "nhd" else shapes
        kinds = zip((q_shape, *found), (dtype, cached, cached), strict=True)
        if p.cache_dtype:
            scale = np.full(p.h_kv, 1 / 32 if p.cache_dtype == "int8" else 1.0, np.float32)
            index_arrays |= {"k_scale": scale, "v_scale": scale}
        return tuple(
            inputs.bench_values(*x, seed + i, xp) for i, x in enumerate(kinds)
        ), index_arrays
    q = in_memory(values(p.kind, (1, *q_shape), dtype, seed, "q"), "bhsd", p.view, xp)[0]
    order_of_dims = "bshd" if p.layout == "nhd" else "bhsd"
    caches = []
    for i, (name, shape) in enumerate(zip("kv", shapes, strict=True)):
        x = values(p.kind, shape, dtype, seed + i + 1, name)
        if p.cache_dtype:
            x = codes("normal" if p.kind == "peaked" else p.kind, shape, cached, seed + i + 1)
        used = np.zeros(shape[:1] + shape[2:3], bool)
        for own, length in zip(table, lens, strict=True):
            for j in range(length):
                used[own[j // page], j % page] = True
        unused = ~np.broadcast_to(used[:, None], shape[:3])
        x[unused] = nothing(cached)
        if p.cache_dtype:
            x = np.ascontiguousarray(x.swapaxes(1, 2)) if p.layout == "nhd" else x
            caches.append(stored(x, p.view, xp))
        else:
            caches.append(in_memory(x, order_of_dims, p.view, xp))
        if p.scales is None:
            continue
        scale = scale_values(p, {"heads": (p.h_kv,), "tokens": shape[:3]}.get(p.scales, ()), rng)
        if p.scales == "tokens":
            scale[unused] = np.nan
            if p.layout == "nhd":
                scale = np.ascontiguousarray(scale.swapaxes(1, 2))
        name += "_scale"
        index_arrays[name] = float(scale) if p.scales == "number" else xp.asarray(scale)
    return (q, *caches), index_arrays


def work(problem: VarlenProblem) -> Work:
    p = problem
    size = dtypes.NAMES[p.dtype].itemsize
    cached = dtypes.NAMES[p.cache_dtype or p.dtype].itemsize
    rows, keys = (sum(lengths[i] for lengths in p.lengths) for i in range(2))
    pairs = p.h * sum(q * k for q, k in p.lengths) // (2 if p.causal else 1)
    per_token = 8 if p.scales == "tokens" else 0
    read = rows * p.h * p.d * size + keys * p.h_kv * ((p.d + p.dv) * cached + per_token)
    return Work(read, rows * p.h * p.dv * size, 2 * pairs * (p.d + p.dv))


def sample(
    call: Call, outputs: tuple[Array, ...], max_elements: int, seed: int
) -> tuple[Call, tuple[Array, ...]]:
    """Sample one head."""
    q, k, v, *cu = call.args
    if q.size <= max_elements or {"alibi_slopes", "sinks", "score", "mask"} & set(call.kwargs):
        return call, outputs
    # The head dim of k and v.
    axis = 1 if "block_table" not in call.kwargs or call.kwargs.get("layout") != "nhd" else 2
    head = int(np.random.default_rng(seed).integers(q.shape[1]))
    keys = head // (q.shape[1] // k.shape[axis])
    some = (slice(None),) * axis + (slice(keys, keys + 1),)
    part = (q[:, head : head + 1], *(x[some] for x in (k, v)), *cu)
    kwargs = dict(call.kwargs)
    for name in {"k_scale", "v_scale"} & set(kwargs):
        x = kwargs[name]
        if getattr(x, "ndim", 0):
            kwargs[name] = x[some] if x.ndim == 3 else x[keys : keys + 1]
    cut = tuple(y[head : head + 1] if i else y[:, head : head + 1] for i, y in enumerate(outputs))
    return Call(part, kwargs), cut


_KERNELS = (
    "attention",
    "attention_general",
    "attention_formula",
    "attention_paged",
    "attention_paged_8bit",
)


def variants(arch: str) -> tuple[Variant, ...]:
    """The variants of attention for varlen sequences, and those of a formula over 16-bit and 8-bit
    pages, with BF16 operands."""
    choice = ScoreChoice(score=FORMULAS[0][0], mask=FORMULAS[0][1])
    paged = VarlenProblem(((512, 512),), 4, 2, 128, 128, "bfloat16", options=choice, page=64)
    plain = dict.fromkeys((*problem_variants(arch), *attention_plan.variants(arch)))
    return (
        *(
            v
            for v in plain
            if v.kernel in _KERNELS
            or (v.kernel.startswith("attention_hopper") and is_varlen(dict(v.types)["Traits"]))
        ),
        *(
            problem_variant(problem, config)
            for problem in (paged, replace(paged, cache_dtype="float8_e4m3fn", scales="tokens"))
            for config in configs(problem, arch)
        ),
    )


def is_varlen(traits: str) -> bool:
    """Whether a TraitsSm90 is for varlen or paged sequences."""
    return "Varlen" in traits or "Paged" in traits
