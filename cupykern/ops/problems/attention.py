"""Problems of attention, and what attention_varlen and decode_attention share with it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ... import dtypes, inputs
from ...attention import attention_hopper, attention_plan
from ...attention.attention_plan import AttentionConfig
from ...attention.attention_task import (
    BLOCK_MASK,
    NO_MASK,
    MaskType,
    ScoreOptions,
    Scores,
    SequencesType,
    prescales,
)
from ...attention.block_mask import CAUSAL, FULL, MASKED, PARTIAL, BlockMask
from ...attention.formulas import Formulas, Ranges
from ...kernels import Variant
from ...op import Call, Draw, Work
from ...targets.limits import multiprocessors
from ...typing import Array, Namespace
from ..checks.attention import ALIGNMENTS
from ..checks.attention_formulas import check_formulas, read_formulas

DTYPES = ("float16", "bfloat16")
KINDS = ("normal", "uniform", "same_sign", "exact", "subnormal", "peaked", "special")


MASKS = (None, "bool", "bias", "block")  # indices are the mask kinds of attention_task


FORMULAS = (
    ("s - slope[h] * abs(i - j)", "(j <= i) & (i - j < 40)"),
    ("s * w if j % 3 == 0 else s + table[b, minimum(abs(i - j), 20)]", None),
    (None, "(doc[minimum(i, 99) // 10] == doc[minimum(j, 99) // 10]) | (j // 16 == i // 16 + b)"),
    ("w * tanh(s / w) + 0.01 * (hkv - h)", "(j < 7) | ((i - j) * w < 60.5) & (j % 2 == h % 2)"),
)
"""Pairs of a score and a mask formula."""

BIAS_BY_DISTANCE = "s + bias[h, minimum(abs(i - j), 127)]"
"""A score for benchmarks: a learned bias by head and clipped relative position."""


@dataclass(frozen=True)
class ScoreChoice:
    """Score options of a call.

    slopes: dims of alibi_slopes, "h" or "bh"; or "geometric", the slopes of the ALiBi paper,
        2^(-8 / H), 2^(-16 / H), ... (Press et al., arXiv:2108.12409).  score, mask: formulas.
    """

    window: tuple[int, int] | None = None
    softcap: float | None = None
    slopes: str | None = None
    sinks: bool = False
    score: str | None = None
    mask: str | None = None

    def __str__(self) -> str:
        names = {"window": self.window, "softcap": self.softcap, "slopes": self.slopes,
                 "score": self.score, "mask": self.mask}  # fmt: skip
        said = "".join(f" {name} {value}" for name, value in names.items() if value is not None)
        return said + " sinks" * self.sinks

    @property
    def changes_scores(self) -> bool:
        options = self.softcap, self.slopes, self.score, self.mask
        return self.sinks or any(x is not None for x in options)

    def operands(self, batch: int, heads: int, seed: int, xp: Namespace) -> dict[str, Any]:
        """The operands that score and mask (of FORMULAS or BIAS_BY_DISTANCE) name."""
        rng = np.random.default_rng(seed)
        all_of_them = {
            "slope": xp.asarray(rng.uniform(0.01, 0.4, heads).astype(np.float32)),
            "table": xp.asarray(rng.normal(0, 1, (batch, 21)).astype(np.float16)),
            "doc": xp.asarray(np.sort(rng.integers(0, 3, 10)).astype(np.int32)),
            "w": float(rng.choice((1.5, 4.0))),
            "bias": xp.asarray(rng.normal(0, 1, (heads, 128)).astype(np.float32)),
        }
        text = f"{self.score} {self.mask}"
        return {k: x for k, x in all_of_them.items() if re.search(rf"\b{k}\b", text)}

    def formulas(self, batch: int, heads: int, kv_heads: int) -> Formulas | None:
        """The Formulas of a task, or None."""
        q = np.zeros(1, np.float16)
        if self.score is None and self.mask is None:
            return None
        given = read_formulas(self.score, self.mask, self.operands(batch, heads, 0, np), q)
        slopes = None if self.slopes is None else (0, 1)
        options = ScoreOptions(softcap=self.softcap or 0.0, slopes=slopes)
        return check_formulas(given, q, Ranges(batch, heads, kv_heads, 1, 1), options)[0]

    def arguments(self, batch: int, heads: int, seed: int, xp: Namespace) -> dict[str, Any]:
        """The call's keyword arguments.  Drawn slopes have both signs; sinks are below, among and
        above the scores."""
        rng = np.random.default_rng(seed)
        found: dict[str, Any] = {}
        if self.window is not None:
            found["window"] = self.window
        if self.softcap is not None:
            found["softcap"] = self.softcap
        if self.slopes == "geometric":
            powers = -8 * np.arange(1, heads + 1) / heads
            found["alibi_slopes"] = xp.asarray(np.exp2(powers).astype(np.float32))
        elif self.slopes is not None:
            shape = (batch, heads) if self.slopes == "bh" else (heads,)
            slopes = rng.choice((0.0, 0.01, 0.3, 1.0, -0.05), shape) * rng.uniform(0.9, 1.1, shape)
            found["alibi_slopes"] = xp.asarray(slopes.astype(np.float32))
        if self.sinks:
            sinks = rng.normal(0, 1, heads) * rng.choice((0.1, 3.0, 15.0), heads)
            found["sinks"] = xp.asarray(sinks.astype(np.float32))
        if self.score is not None:
            found["score"] = self.score
        if self.mask is not None:
            found["mask"] = self.mask
        operands = self.operands(batch, heads, seed, xp)
        return found | ({"operands": operands} if operands else {})


NO_OPTIONS = ScoreChoice()


def draw_options(draw: Draw) -> ScoreChoice:
    """Draw score options; most problems get none."""
    if draw.choice((True, True, False)):
        return NO_OPTIONS
    windows = (None, None, (0, 0), (0, -1), (-1, 0), (-1, 5), (7, 0), (40, 3), (64, 64), (20, -1))
    return ScoreChoice(
        draw.choice(windows),
        draw.choice((None, None, 0.5, 2.0, 30.0)),
        draw.choice((None, None, "h", "bh")),
        draw.choice((False, False, True)),
        *draw.choice((*[(None, None)] * len(FORMULAS), *FORMULAS)),
    )


@dataclass(frozen=True)
class AttentionProblem:
    """One call, without data.

    mask: None, "bool", "bias" or "block"; mask_dims: which of (B, H, Sq, Sk) the mask has; others
        are 1.
    pattern: of a block mask, one of _PATTERNS; None: random blocks of every type.
    view: memory layout of q, k and v: one of inputs.LAYOUTS, or "padded", slices of longer rows.
    """

    b: int
    h: int
    h_kv: int
    sq: int
    sk: int
    d: int
    dv: int
    dtype: str = "float16"
    causal: bool = False
    causal_align: str | None = None
    input_pos: int | None = None
    scale: float | None = None
    mask: str | None = None
    mask_dims: tuple[bool, ...] = (True, True, True, True)
    blocks: tuple[int, int] = (64, 64)
    pattern: str | None = None
    layout: str = "bhsd"
    view: str = "C"
    qk_accumulate: str = "float32"
    algorithm: str = "flash"
    lse: bool = False
    row_stats: bool = False
    kind: str = "normal"
    options: ScoreChoice = NO_OPTIONS
    lens: tuple[int, ...] | None = None

    def __str__(self) -> str:
        shape = f"{self.b}x{self.h}x{self.sq}x{self.d}"
        blocks = f" {self.pattern} blocks" if self.pattern else ""
        return f"{shape}{' causal' if self.causal else ''}{blocks}{self.options} {self.dtype}"

    @property
    def scores(self) -> Scores:
        half = self.qk_accumulate == "float16"
        return Scores.of(self.general, MASKS.index(self.mask), self.scale, half)

    @property
    def position(self) -> int:
        """The position of the first query among the keys."""
        last = self.causal_align == "bottom_right"
        return (self.input_pos or 0) + last * (self.sk - self.sq)

    @property
    def general(self) -> bool:
        """Whether the call needs a general variant.  A window that hides no key does not."""
        left = -1 if self.options.window is None else self.options.window[0]
        cuts = 0 <= left < self.sq - 1 + self.position
        return self.lens is not None or self.options.changes_scores or cuts


def draw_problem(draw: Draw) -> AttentionProblem:
    """Draw a problem.  To compile few variants, bfloat16 and FP16 accumulators use small heads;
    other tests cover the largest heads."""
    dtype = draw.choice(("float16", "float16", "bfloat16"))
    wide = dtype == "float16" and draw.choice((False, False, True))
    dims = (72, 80, 128, 125) if wide else (8, 24, 40, 64, 33)
    h, h_kv = draw.choice(((1, 1), (2, 1), (4, 2), (3, 3)))
    d, dv = draw.choice((*dims, 192) if wide else dims), draw.choice(dims)
    half_accumulators = dtype == "float16" and not wide and draw.choice((False, False, False, True))
    mask = draw.choice((None, None, None, "bool", "bias", "block"))
    options = draw_options(draw)
    mask = mask if options.mask is None else None
    sq = draw.choice((0, 1, 2, 16, 33, 64, 65, 100, 130))
    sk = draw.choice((sq, 0, 1, 7, 31, 32, 33, 64, 65, 100, 130, 200))
    batch = draw.choice((1, 1, 2))
    lens = None
    if draw.choice((False, False, False, True)):
        lens = tuple(draw.choice((sk, 0, draw.integer(0, sk))) for _ in range(batch))
    align, input_pos = draw.choice(
        (
            *((None, None),) * (sq == sk),
            *((None, n) for n in (0, 1, 20, 1000)),
            *((align, n) for align in ALIGNMENTS for n in (None, None, 0, 1, 20, 1000)),
        )
    )
    return AttentionProblem(
        batch, h, h_kv, sq, sk, d, dv, dtype,
        causal=draw.choice((False, True)),
        causal_align=align,
        input_pos=input_pos,
        scale=draw.choice((None, None, None, 1.0, 0.05, -0.3, 0.0)),
        mask=mask,
        mask_dims=tuple(draw.choice((True, True, False)) for _ in range(4)),
        blocks=draw.choice(((64, 64), (64, 128), (128, 64), (128, 128))),
        layout=draw.choice(("bhsd", "bhsd", "bshd")),
        view=draw.choice(("C", "C", "padded", *inputs.LAYOUTS)),
        qk_accumulate="float16" if half_accumulators else "float32",
        algorithm="flash" if half_accumulators else draw.choice(("flash",) * 7 + ("naive",)),
        lse=draw.choice((False, True)),
        row_stats=draw.choice((False, True)),
        kind=draw.choice(KINDS),
        options=options,
        lens=lens,
    )  # fmt: skip


# Blocks of 128: causal, documents of an eighth of the length, every fourth block of a row.
_PATTERNS = ("causal", "document", "interleaved")


def bench_sizes(
    shape: tuple[int, ...], dtype: str, masks: int = 1
) -> tuple[int, int, int, int, int, int]:
    """(B, H, Hkv, S, D, mask) from a shape (B, H, S, D[, mask[, Hkv]]); mask is 0 to `masks`."""
    if not 4 <= len(shape) <= 6 or (len(shape) > 4 and not 0 <= shape[4] <= masks):
        raise ValueError(
            f"attention needs a shape (B, H, S, D), (B, H, S, D, causal) or (B, H, S, D, causal, "
            f"Hkv), causal 0 to {masks}; got {shape}"
        )
    dtypes.resolve(dtype, "dtype", attention_plan.DTYPES)
    b, h, s, d, mask, h_kv = (*shape, *(0, shape[1])[len(shape) - 4 :])
    return b, h, h_kv, s, d, mask


_BENCH_OPTIONS = {
    1: NO_OPTIONS,
    5: ScoreChoice(softcap=50.0),
    6: ScoreChoice(slopes="geometric"),
    7: ScoreChoice(sinks=True),
    8: ScoreChoice(score=BIAS_BY_DISTANCE),
    9: ScoreChoice(window=(4095, 0), sinks=True),
}
"""Options of causal calls by the fifth number of a shape, named in tools/shape_names.py."""

_LEAST_WINDOW = 16


def bench_problem(shape: tuple[int, ...], dtype: str) -> AttentionProblem:
    """The fifth number of a shape selects: 0 (default) no mask; 2 to 4 a block mask of _PATTERNS;
    others of _BENCH_OPTIONS, causal; from 16 on causal with a window of that many keys."""
    b, h, h_kv, s, d, number = bench_sizes(shape, dtype, 2**28)
    problem = AttentionProblem(b, h, h_kv, s, s, d, d, dtype, kind="bench")
    if number == 0:
        return problem
    if 2 <= number < 2 + len(_PATTERNS):
        return replace(
            problem, mask="block", mask_dims=(False, False, True, True), blocks=(128, 128),
            pattern=_PATTERNS[number - 2],
        )  # fmt: skip
    options = _BENCH_OPTIONS.get(number)
    if number >= _LEAST_WINDOW:
        options = ScoreChoice(window=(number - 1, 0))
    if options is None:
        raise ValueError(
            f"the fifth number of a shape must be 0 to {max(_BENCH_OPTIONS)}, or a window's keys, "
            f"at least {_LEAST_WINDOW}; got {number}"
        )
    return replace(problem, causal=True, options=options)


def bench_shapes(target: str) -> tuple[tuple[int, ...], ...]:
    if target == "host":
        return ((1, 4, 256, 64), (1, 4, 256, 64, 1))
    sizes = ((16, 16, 1024, 128), (4, 16, 4096, 128), (1, 16, 16384, 128))
    more = ((1, 32, 16384, 64), (4, 8, 4096, 256), (1, 8, 16384, 256))
    both = tuple((*size, *causal) for size in (*sizes, *more) for causal in ((), (1,)))
    masks = tuple((1, 16, 16384, 128, 2 + i) for i in range(len(_PATTERNS)))
    options = tuple((1, 16, 16384, 128, n) for n in (5, 6, 7, 8, 9, 1024, 4096))
    # 4096 is left out: a window of 4096 hides none of 4096 keys.
    shorter = tuple((4, 16, 4096, 128, n) for n in (5, 6, 7, 8, 1024))
    return (*both, (2, 32, 8192, 128, 1, 8), *masks, *options, *shorter)


def values(kind: str, shape: tuple[int, ...], dtype: np.dtype, seed: int, name: str) -> np.ndarray:
    """Values of q, k or v.  "peaked": a few scores far above the others.  "subnormal": q and v
    are subnormal, k is normal.  "special": NaN and infinities in a few rows of q and k."""
    if kind == "peaked":
        x = inputs.values("normal", shape, dtype, seed)
        if name != "v" and shape[2]:
            x[:, :, seed % shape[2]] *= np.asarray(8, dtype)
        return x
    if kind == "subnormal" and name == "k":  # keep scores normal
        size = 2.0**110 if dtype == dtypes.bfloat16 else 1.0
        return inputs.values("normal", shape, dtype, seed) * np.asarray(size, dtype)
    if kind != "special":
        return inputs.values(kind, shape, dtype, seed)
    x = inputs.values("normal", shape, dtype, seed)
    if name != "v" and shape[2]:
        rng = np.random.default_rng(seed)
        for value in (np.nan, np.inf, -np.inf):
            x[(*(rng.integers(n) for n in shape),)] = value
    return x


def in_memory(x: np.ndarray, layout: str, view: str, xp: Namespace) -> Any:
    """x (B, H, S, D) in the call's layout, with the memory layout `view`."""
    if layout == "bshd":
        x = x.transpose(0, 2, 1, 3)
    if view != "padded":
        return inputs.with_layout(np.ascontiguousarray(x), view, xp)
    large = np.full((*x.shape[:3], x.shape[3] + 8), np.nan, x.dtype)
    large[..., : x.shape[3]] = x
    return xp.asarray(large)[..., : x.shape[3]]


_PATTERN_MASKS = {
    "causal": lambda s: BlockMask.causal(s, s, target="host"),
    "document": lambda s: BlockMask.document(np.arange(s) // max(1, s // 8)),
    "interleaved": lambda s: BlockMask.interleaved(s, s, 4, target="host"),
}


def _block_mask(problem: AttentionProblem, seed: int, xp: Namespace) -> BlockMask:
    """A block mask with random blocks of every type, or with the problem's pattern."""
    p = problem
    if p.pattern is not None:
        made = _PATTERN_MASKS[p.pattern](p.sq)
        arrays = made.block_mask_types, made.partial_indices, made.partial_tiles
        types, numbers, tiles = (xp.asarray(x) for x in arrays)
        return BlockMask(types, numbers, tiles, p.sq, p.sk, *p.blocks)
    rng = np.random.default_rng(seed)
    shape = (
        p.b if p.mask_dims[0] else 1, p.h if p.mask_dims[1] else 1,
        -(-p.sq // p.blocks[0]), -(-p.sk // p.blocks[1]),
    )  # fmt: skip
    types = rng.choice((MASKED, CAUSAL, FULL, PARTIAL), shape).astype(np.uint8)
    count = int((types == PARTIAL).sum())
    numbers = np.full(shape, -1, np.int32)
    numbers[types == PARTIAL] = rng.permutation(count)
    tiles = rng.random((count, *p.blocks)) < rng.choice((0.1, 0.5), (count, 1, 1))
    types, numbers, tiles = (xp.asarray(x) for x in (types, numbers, tiles))
    offset = int(rng.integers(-70, 70))
    return BlockMask(types, numbers, tiles, p.sq, p.sk, *p.blocks, causal_offset=offset)


def _mask(problem: AttentionProblem, seed: int, xp: Namespace) -> Any:
    p = problem
    if p.mask == "block":
        return _block_mask(p, seed, xp)
    rng = np.random.default_rng(seed)
    sizes = zip((p.b, p.h, p.sq, p.sk), p.mask_dims, strict=True)
    shape = tuple(size if there else 1 for size, there in sizes)
    if p.mask == "bool":
        return xp.asarray(rng.random(shape) < rng.choice((0.05, 0.5, 0.95)))
    bias = rng.standard_normal(shape)
    bias = np.where(rng.random(shape) < 0.2, -np.inf, bias)
    name = ("float16", "bfloat16", "float32")[seed % 3]
    return xp.asarray(bias.astype(dtypes.NAMES[name]))


def _padded(problem: AttentionProblem, name: str, x: np.ndarray) -> np.ndarray:
    """Set keys and values beyond the lengths of a padded batch to NaN."""
    if problem.lens is not None and name != "q":
        for b, length in enumerate(problem.lens):
            # A broadcast batch stores one element for all sequences: keep the longest.
            x[b, :, max(problem.lens) if problem.view == "broadcast" else length :] = np.nan
    return x


def make_inputs(problem: AttentionProblem, seed: int, xp: Namespace) -> Call:
    p = problem
    dtype = dtypes.NAMES[p.dtype]
    shapes = (p.b, p.h, p.sq, p.d), (p.b, p.h_kv, p.sk, p.d), (p.b, p.h_kv, p.sk, p.dv)
    if p.kind == "bench":
        args = tuple(inputs.bench_values(x, dtype, seed + i, xp) for i, x in enumerate(shapes))
    else:
        args = tuple(
            in_memory(
                _padded(p, name, values(p.kind, shape, dtype, seed + i, name)), p.layout, p.view, xp
            )
            for i, (name, shape) in enumerate(zip("qkv", shapes, strict=True))
        )
    kwargs: dict[str, Any] = {} if p.mask is None else {"mask": _mask(p, seed + 3, xp)}
    kwargs |= p.options.arguments(p.b, p.h, seed + 4, xp)
    if p.lens is not None:
        lens = np.array(p.lens, np.int32)
        kwargs["seq_lens"] = lens.astype(np.int64) if seed % 3 == 0 else xp.asarray(lens)
    for name, value, default in (
        ("causal", p.causal, False), ("causal_align", p.causal_align, None),
        ("input_pos", p.input_pos, None), ("scale", p.scale, None), ("layout", p.layout, "bhsd"),
        ("qk_accumulate", p.qk_accumulate, "float32"), ("algorithm", p.algorithm, "flash"),
        ("return_lse", p.lse, False), ("return_row_stats", p.row_stats, False),
    ):  # fmt: skip
        if value != default:
            kwargs[name] = value
    return Call(args, kwargs)


def work(problem: AttentionProblem) -> Work:
    """Bytes and FLOP.  Causal attention counts half of all query-key pairs, a block mask the pairs
    of computed blocks."""
    p = problem
    size = dtypes.NAMES[p.dtype].itemsize
    read = p.b * (p.h * p.sq * p.d + p.h_kv * p.sk * (p.d + p.dv)) * size
    pairs = p.b * p.h * p.sq * p.sk
    if p.mask == "block":
        mask = _block_mask(p, 3, np)
        share = p.b * p.h // math.prod(mask.batch_shape)
        pairs = mask.num_blocks * math.prod(p.blocks) * share
    elif p.causal:
        pairs //= 2
    if p.options.window is not None:
        pairs = p.b * p.h * pairs_in_window(p.sq, p.sk, p.causal, p.options.window)
    return Work(read, p.b * p.h * p.sq * p.dv * size, 2 * pairs * (p.d + p.dv))


def pairs_in_window(sq: int, sk: int, causal: bool, window: tuple[int, int]) -> int:
    """Query-key pairs in a window; the queries are at the last sq positions of the keys."""
    left, right = window
    right = 0 if causal else right
    positions = np.arange(sq) + sk - sq
    first = np.clip(positions - left, 0, sk) if left >= 0 else 0
    end = np.clip(positions + right + 1, 0, sk) if right >= 0 else sk
    return int(np.maximum(end - first, 0).sum() if sq else 0)


def configs(problem: Any, arch: str) -> tuple[Any, ...]:
    p = problem
    if hasattr(p, "lengths"):
        longest = tuple(max(sizes) for sizes in zip(*p.lengths, strict=True)) or (0, 0)
        calls = len(p.lengths) * p.h, *longest
    else:
        calls = p.b * p.h, p.sq, p.sk, p.position if p.causal else None
    queries = attention_hopper.Queries(multiprocessors(arch), *calls)
    scores = p.scores if getattr(p, "page", None) is None else Scores.GENERAL
    scaled = getattr(p, "cache_dtype", None) is not None
    kind = None if scaled else hopper_kind(p)
    return attention_plan.configs((p.d, p.dv), scores, arch, queries, kind, scaled)


def hopper_kind(problem: Any) -> attention_hopper.Kind | None:
    """The kind of attention_hopper.cu for the problem; None where it does not apply."""
    p = problem
    varlen = hasattr(p, "lengths")
    fits = (p.algorithm, p.qk_accumulate) == ("flash", "float32") and p.view in ("C", "padded")
    general = p.general
    formulas = formulas_of(p)
    code = formulas.code if formulas else None
    of_mask = formulas is not None and formulas.mask
    if varlen:
        packs = tuple(zip(*p.lengths, strict=True))
        if p.page is not None:  # caches are never empty: only queries count
            fits, packs = fits and p.page % 16 == 0, packs[:1]
        fits = fits and all(map(sum, packs))
        fits = fits and 0 < len(p.lengths) <= attention_hopper.MOST_SEQUENCES
        fits = fits and (general or not prescales(NO_MASK, p.scale))
        mask = MaskType.FORMULA if of_mask else MaskType.NONE
        sequences = SequencesType.VARLEN if p.page is None else SequencesType.PAGED
        return attention_hopper.Kind(mask, sequences, general, code) if fits else None
    mask = MaskType.of(MASKS.index(p.mask), None if general else p.scale, p.blocks)
    fits = fits and (general or not (mask.has_blocks and prescales(BLOCK_MASK, p.scale)))
    if p.lens is not None:  # the batch must merge into rows
        whole = p.b == 1 or (min(p.sq, p.sk) > 1 and p.view == "C" and p.d == p.dv)
        fits = fits and whole
    mask = MaskType.FORMULA if of_mask else mask
    sequences = SequencesType.BATCHED if p.lens is None else SequencesType.VARLEN
    kind = attention_hopper.Kind(mask, sequences, general, code)
    return kind if fits and p.sq and p.sk else None


def variant(
    problem: Any, config: AttentionConfig | attention_hopper.AttentionHopperConfig
) -> Variant:
    dtype, formulas = dtypes.NAMES[problem.dtype], formulas_of(problem)
    code = formulas.code if formulas else None
    if problem.algorithm == "naive":
        return attention_plan.naive_variant(dtype, problem.general, code)
    half, kind = problem.qk_accumulate == "float16", hopper_kind(problem)
    return attention_plan.flash_variant(
        *(dtype, (problem.d, problem.dv), problem.scores, half, config, kind, code),
        paged=getattr(problem, "page", None) is not None,
        codes=dtypes.NAMES[cache] if (cache := getattr(problem, "cache_dtype", None)) else None,
    )


def formulas_of(problem: Any) -> Formulas | None:
    batch = len(problem.lengths) if hasattr(problem, "lengths") else problem.b
    return problem.options.formulas(batch, problem.h, problem.h_kv)


def variants(arch: str) -> tuple[Variant, ...]:
    """The unpaged variants of attention_plan, and those of a formula with BF16 operands."""
    choice = ScoreChoice(score=FORMULAS[0][0], mask=FORMULAS[0][1])
    problem = AttentionProblem(1, 4, 2, 512, 512, 128, 128, "bfloat16", options=choice)
    naive = replace(problem, algorithm="naive")
    used = configs(problem, arch)
    found = [variant(problem, config) for config in used]
    found += [variant(naive, used[0])] if arch != "sm_90a" else []
    plain = (v for v in attention_plan.variants(arch) if "paged" not in v.kernel)
    return *plain, *found


_SCORES_AN_ELEMENT = 4  # limit of a sample: scores per element of max_elements


def sample(
    call: Call, outputs: tuple[Array, ...], max_elements: int, seed: int
) -> tuple[Call, tuple[Array, ...]]:
    """Sample one head of one batch element, if there is no mask or all heads share it.  Without a
    mask, keep only some of its queries, at their positions: FP64 scores of 20000 queries and keys
    take 3 GB.

    With a score formula keep all heads, whose operands may differ, and fewer queries of each."""
    q, k, v = call.args
    kwargs, sk = call.kwargs, k.shape[2]
    mask, formula = kwargs.get("mask"), kwargs.get("score") is not None
    shared = mask is None or (isinstance(mask, BlockMask) and mask.batch_shape == (1, 1))
    shared = shared and not (formula and mask is not None)
    if not shared or kwargs.keys() & {"seq_lens", "layout"} or q.size <= max_elements:
        return call, outputs
    rows = of_batch = heads = kv_heads = slice(None)
    if not formula:
        batch = int(np.random.default_rng(seed).integers(q.shape[0]))
        head = int(np.random.default_rng(seed + 1).integers(q.shape[1]))
        keys = head // (q.shape[1] // k.shape[1])
        of_batch, heads, kv_heads = (slice(n, n + 1) for n in (batch, head, keys))
        if (slopes := kwargs.get("alibi_slopes")) is not None:
            slopes = slopes if slopes.ndim == 1 else slopes[batch]
            kwargs = {**kwargs, "alibi_slopes": slopes[heads]}
        if (sinks := kwargs.get("sinks")) is not None:
            kwargs = {**kwargs, "sinks": sinks[heads]}
    in_row = sk * math.prod(q[of_batch, heads].shape[:2])
    kept = max(1, _SCORES_AN_ELEMENT * max_elements // max(in_row, 1))
    if mask is None and kept < q.shape[2]:
        first = int(np.random.default_rng(seed + 2).integers(q.shape[2] - kept + 1))
        rows = slice(first, first + kept)
        offset = sk - q.shape[2] if kwargs.get("causal_align") == "bottom_right" else 0
        position = first + offset + kwargs.get("input_pos", 0)
        kwargs = {**kwargs, "causal_align": None, "input_pos": position}
    part = q[of_batch, heads, rows], *(x[of_batch, kv_heads] for x in (k, v))
    return Call(part, kwargs), tuple(y[of_batch, heads, rows] for y in outputs)
