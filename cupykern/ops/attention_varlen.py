"""attention_varlen: attention of sequences of different lengths, concatenated without padding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from .. import arguments, dtypes, inputs, reference
from ..arrays import assign, in_elements, maker, packed
from ..attention import attention_plan
from ..attention.attention_hopper import AttentionHopperConfig
from ..attention.attention_plan import AttentionConfig
from ..attention.attention_task import (
    GENERAL_MODE,
    NO_MASK,
    AttentionTask,
    ScoreOptions,
    mask_mode,
)
from ..attention.formulas import Formulas, Ranges
from ..kernels import Variant
from ..numerics import namespace
from ..op import Call, Draw, Work
from ..runtime import plans
from ..targets import is_cupy
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
    steps,
    walkable,
    walks,
)
from .checks.attention_formulas import NONE, check_formulas, read_formulas
from .checks.score_options import CAUSAL, check_options, check_positions
from .problems.attention import (
    DTYPES,
    KINDS,
    NO_OPTIONS,
    ScoreChoice,
    bench_sizes,
    draw_options,
    in_memory,
    values,
)
from .problems.attention import variants as problem_variants


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    causal_align: str = "bottom_right",
    scale: Any = None,
    window: tuple[int, int] | None = None,
    softcap: Any = None,
    score: Any = None,
    mask: Any = None,
    operands: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    return_lse: bool = False,
    out: Any = None,
    config: AttentionConfig | AttentionHopperConfig | None = None,
) -> Any:
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

    Arguments:

    q: (total_q, H, D), float16 or bfloat16.  k, v: (total_k, Hkv, D) and (total_k, Hkv, Dv) of q's
        dtype.  H, Hkv, D and Dv as for `attention`.
    cu_seqlens_q, cu_seqlens_k: int32 (B + 1,), the first row of each sequence, and at the end the
        number of rows: sequence i has rows cu_seqlens[i]:cu_seqlens[i + 1].
    max_seqlen_q, max_seqlen_k: integers, upper limits of the sequences' lengths.
    causal: query i of a sequence sees its keys j <= i + offset.  causal_align="bottom_right":
        offset is the sequence's keys minus its queries; "top_left": 0.
    scale, window, softcap, score, operands, alibi_slopes, sinks, out, config: as for `attention`,
        the window and the distance of ALiBi from query i's position i + offset; alibi_slopes is
        (H,) or (B, H).
    mask: a formula, as for `attention`; b is the sequence, i and j count from its beginning.
    return_lse: also return the log-sum-exp, float32 (H, total_q).

    Returns out, (total_q, H, Dv) of q's dtype, or (out, lse).

    Offsets in numpy arrays are checked: they must rise from 0 to the number of rows, with no
    sequence longer than its limit.  Offsets in cupy arrays are not read on the host: the kernel
    clamps them to the rows there are and lengths to the limits.  Rows that belong to no sequence
    are not written.  Accuracy, masked keys and strides as for `attention`.

    Raises TypeError, ValueError and NotImplementedError as `attention`, and ValueError for offsets
    that fail the checks.  Error bound: `reference.attention_varlen_bound`.
    """
    call: tuple[Any, ...]
    call = ("attention_varlen", max_seqlen_q, max_seqlen_k, causal, causal_align, scale, return_lse,
            config, window, softcap)  # fmt: skip
    arrays: tuple[Any, ...] = q, k, v, cu_seqlens_q, cu_seqlens_k
    formulas = NONE
    if score is not None or mask is not None or operands is not None:
        formulas = read_formulas(score, mask, operands, q)
        call = (*call, formulas.key)
    if alibi_slopes is not None or sinks is not None or formulas is not NONE:
        arrays = (*arrays, alibi_slopes, sinks, *formulas.arrays)
    key, known, places = plans.find(call, out, *arrays)
    if known is not None:
        make, out_shape, launch = known
        y = make(out_shape, q.dtype) if out is None else out
        lse = make(out_shape[1::-1], np.float32) if return_lse else None
        places = (*places, y.data.ptr, lse.data.ptr if lse is not None else None)
        launch(places, q, k, v, y, lse, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks,
               *formulas.arrays)  # fmt: skip
        return (y, lse) if return_lse else y
    target = arguments.target_of("q", q)
    check_operands(q, k, v, 3)
    heads_first = tuple(x[None].transpose(0, 2, 1, 3) for x in (q, k, v))
    _, heads, rows, dim, kv_heads, key_rows, dim_v = check_shapes(*heads_first)
    check_causal_align(causal_align, *ALIGNMENTS)
    arguments.check_flags(causal=causal, return_lse=return_lse)
    scale = check_scale(scale, dim)
    batch = cu_seqlens_q.shape[0] - 1 if getattr(cu_seqlens_q, "shape", ()) else 0
    options, slopes, head_sinks = check_options(
        q, batch, heads, causal, scale, window, softcap, alibi_slopes, sinks
    )
    longest_q = check_length("max_seqlen_q", max_seqlen_q)
    longest_k = check_length("max_seqlen_k", max_seqlen_k)
    # Queries of the kernel are at positions up to the longest sequence's last key, or query.
    ranges = Ranges(batch, heads, kv_heads, max(longest_q, longest_k), longest_k)
    placed, given = check_formulas(formulas, q, ranges)
    cu_q = check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q, rows, longest_q)
    cu_k = check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q, key_rows, longest_k)
    if cu_q.shape != cu_k.shape:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must have one shape; got {cu_q.shape}, {cu_k.shape}"
        )
    if out is not None:
        steering = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "alibi_slopes": slopes,
                    "sinks": head_sinks, **formulas.by_name}  # fmt: skip
        there = {name: x for name, x in steering.items() if is_cupy(x) == is_cupy(out)}
        others = {"q": q, "k": k, "v": v, **there}
        arguments.check_new_out(out, (rows, heads, dim_v), q.dtype, others)
    with arguments.on_device(target):
        xp = target.xp
        out_shape = rows, heads, dim_v
        y = maker(xp)(out_shape, q.dtype) if out is None else out
        lse = maker(xp)((heads, rows), np.float32) if return_lse else None
        if y.size and batch and longest_q:
            q, k, v = (walkable(x) for x in heads_first)
            into = y[None].transpose(0, 2, 1, 3)
            padded = *into.shape[:3], padded_size(dim_v)
            place = into if walks(into) else maker(xp)(padded, q.dtype)
            sizes = min(longest_q, rows), min(longest_k, key_rows)
            if placed is None and options in (CAUSAL, ScoreOptions()):
                options, offset = ScoreOptions(), 0 if causal or options == CAUSAL else None
            else:
                check_positions(options, *sizes)
                offset = 0
            task = AttentionTask(
                *(q.dtype, batch, heads, kv_heads, *sizes),
                *(padded_size(dim), padded_size(dim_v), steps(q), steps(k), steps(v), steps(place)),
                *(scale, offset), totals=(rows, key_rows),
                bottom_right=causal_align == "bottom_right", options=options, formulas=placed,
            )  # fmt: skip
            cu_q, cu_k = (
                x
                if namespace(x) is xp and x.flags.c_contiguous and in_elements(x)
                else packed(xp.asarray(x))
                for x in (cu_q, cu_k)
            )
            plan = attention_plan.attention_plan(target, task, config)
            pack = _packed_general if task.general else _packed
            if placed is not None:
                pack = partial(_packed_formulas, placed)
            plan.launch(xp, pack(q, k, v, place, lse, cu_q, cu_k, slopes, head_sinks, *given))
            here = (*heads_first, into, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks,
                    *formulas.arrays)  # fmt: skip
            used = q, k, v, place, cu_q, cu_k, slopes, head_sinks, *given
            if place is not into:
                assign(into, place[..., :dim_v])
            elif all(a is b for a, b in zip(used, here, strict=True)):
                launch = plan.launcher(target.xp, pack)
                plans.remember(key, (maker(target.xp), out_shape, launch))
    return (y, lse) if return_lse else y


def _packed_general(
    q: Any, k: Any, v: Any, y: Any, lse: Any, cu_q: Any, cu_k: Any, slopes: Any, sinks: Any
) -> tuple[Any, ...]:
    """As AttentionPlan.launch takes them: without statistics of rows, or a mask's arrays."""
    return (q, k, v, y, lse, *(None,) * 7, cu_q, cu_k, slopes, sinks)


def _packed_formulas(placed: Formulas, *given: Any) -> tuple[Any, ...]:
    return *_packed_general(*given[:9]), *placed.pointers(given[9:])


def _packed(*given: Any) -> tuple[Any, ...]:
    return _packed_general(*given)[:14]


# --- the op's record -----------------------------------------------------------------------------


@dataclass(frozen=True)
class VarlenProblem:
    """One call, without its numbers.  lengths: of queries and keys, of each sequence."""

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

    def __str__(self) -> str:
        rows = sum(length for length, _ in self.lengths)
        shape = f"{rows}x{self.h}x{self.d}{self.options}"
        return f"{len(self.lengths)} sequences, {shape} {self.dtype}"

    @property
    def mode(self) -> int:
        return GENERAL_MODE if self.general else mask_mode(NO_MASK, self.scale)

    @property
    def general(self) -> bool:
        left, right = self.options.window or (-1, -1)
        return self.options.changes_scores or left >= 0 or (right > 0 and not self.causal)


def _draw_problem(draw: Draw) -> VarlenProblem:
    h, h_kv = draw.choice(((1, 1), (2, 1), (4, 2)))
    count = draw.choice((0, 1, 2, 3, 5))
    sizes = (0, 1, 3, 16, 33, 65, 100)
    return VarlenProblem(
        tuple((draw.choice(sizes), draw.choice(sizes)) for _ in range(count)), h, h_kv,
        draw.choice((8, 40, 64, 33)), draw.choice((16, 64, 5)), draw.choice(DTYPES),
        causal=draw.choice((False, True)),
        causal_align=draw.choice(("top_left", "bottom_right")),
        scale=draw.choice((None, None, 0.3)),
        view=draw.choice(("C", "C", "padded", "offset")),
        lse=draw.choice((False, True)),
        kind=draw.choice(KINDS[:-1]),
        options=draw_options(draw),
    )  # fmt: skip


def _bench_problem(shape: tuple[int, ...], dtype: str) -> VarlenProblem:
    """Lengths from S / 2 to 3 S / 2, S in the mean."""
    b, h, h_kv, s, d, causal = bench_sizes(shape, dtype)
    causal = bool(causal)
    lengths = [s // 2 + round(s * i / (b - 1)) if b > 1 else s for i in range(b)]
    return VarlenProblem(tuple((n, n) for n in lengths), h, h_kv, d, d, dtype, causal, kind="bench")


def _bench_shapes(target: str) -> tuple[tuple[int, ...], ...]:
    if target == "host":
        return ((3, 2, 100, 64), (3, 2, 100, 64, 1))
    return ((16, 16, 1024, 128), (16, 16, 1024, 128, 1), (4, 16, 4096, 128, 1))


def _inputs(problem: VarlenProblem, seed: int, xp: Any) -> Call:
    p = problem
    dtype = dtypes.NAMES[p.dtype]
    q_lengths, k_lengths = zip(*p.lengths, strict=True) if p.lengths else ((), ())
    rows, keys = sum(q_lengths), sum(k_lengths)
    shapes = (rows, p.h, p.d), (keys, p.h_kv, p.d), (keys, p.h_kv, p.dv)
    if p.kind == "bench":
        args = tuple(inputs.bench_values(x, dtype, seed + i, xp) for i, x in enumerate(shapes))
    else:
        args = tuple(
            in_memory(values(p.kind, (1, *shape), dtype, seed + i, name), "bhsd", p.view, xp)[0]
            for i, (name, shape) in enumerate(zip("qkv", shapes, strict=True))
        )
    cu = [np.cumsum((0, *lengths), dtype=np.int32) for lengths in (q_lengths, k_lengths)]
    if seed % 2 or p.kind == "bench":  # else numpy's, which are checked
        cu = [xp.asarray(x) for x in cu]
    kwargs: dict[str, Any] = {
        "max_seqlen_q": max(q_lengths, default=0),
        "max_seqlen_k": max(k_lengths, default=0),
    }
    kwargs |= p.options.arguments(len(p.lengths), p.h, seed + 4, xp)
    for name, value, default in (
        ("causal", p.causal, False), ("causal_align", p.causal_align, "bottom_right"),
        ("scale", p.scale, None), ("return_lse", p.lse, False),
    ):  # fmt: skip
        if value != default:
            kwargs[name] = value
    return Call((*args, *cu), kwargs)


def _work(problem: VarlenProblem) -> Work:
    p = problem
    size = dtypes.NAMES[p.dtype].itemsize
    rows, keys = (sum(lengths[i] for lengths in p.lengths) for i in range(2))
    pairs = p.h * sum(q * k for q, k in p.lengths) // (2 if p.causal else 1)
    read = (rows * p.h * p.d + keys * p.h_kv * (p.d + p.dv)) * size
    return Work(read, rows * p.h * p.dv * size, 2 * pairs * (p.d + p.dv))


def _sample(
    call: Call, outputs: tuple[Any, ...], max_elements: int, seed: int
) -> tuple[Call, tuple[Any, ...]]:
    """One head."""
    q, k, v, *cu = call.args
    if q.size <= max_elements or {"alibi_slopes", "sinks", "score", "mask"} & set(call.kwargs):
        return call, outputs
    head = int(np.random.default_rng(seed).integers(q.shape[1]))
    keys = head // (q.shape[1] // k.shape[1])
    part = (q[:, head : head + 1], *(x[:, keys : keys + 1] for x in (k, v)), *cu)
    cut = tuple(y[head : head + 1] if i else y[:, head : head + 1] for i, y in enumerate(outputs))
    return Call(part, call.kwargs), cut


def _variants(arch: str) -> tuple[Variant, ...]:
    return tuple(
        v
        for v in problem_variants(arch)
        if v.kernel in ("attention", "attention_general", "attention_formula")
        or (v.kernel.startswith("attention_hopper") and "Varlen" in dict(v.types)["Traits"])
    )


OP = replace(
    ATTENTION_OP,
    name="attention_varlen",
    run=attention_varlen,
    reference=reference.attention_varlen,
    bound=reference.attention_varlen_bound,
    draw_problem=_draw_problem,
    bench_problem=_bench_problem,
    bench_shapes=_bench_shapes,
    inputs=_inputs,
    work=_work,
    variants=_variants,
    sample=_sample,
)
