"""The record of attention_varlen: problems, inputs and work for check, bench and tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kernels_cu import Variant

from .. import dtypes, inputs, reference
from ..op import Call, Draw, Work
from . import attention_plan
from .attention import attention_varlen
from .attention_ops import DTYPES, KINDS, OP, bench_sizes, in_memory, values
from .attention_task import NO_MASK, mask_mode


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

    def __str__(self) -> str:
        rows = sum(length for length, _ in self.lengths)
        return f"{len(self.lengths)} sequences, {rows}x{self.h}x{self.d} {self.dtype}"

    @property
    def mode(self) -> int:
        return mask_mode(NO_MASK, self.scale)


def _draw_varlen(draw: Draw) -> VarlenProblem:
    h, h_kv = draw.choice(((1, 1), (2, 1), (4, 2)))
    count = draw.choice((0, 1, 2, 3, 5))
    sizes = (0, 1, 3, 16, 33, 65, 100)
    return VarlenProblem(
        tuple((draw.choice(sizes), draw.choice(sizes)) for _ in range(count)), h, h_kv,
        draw.choice((8, 40, 64)), draw.choice((16, 64)), draw.choice(DTYPES),
        causal=draw.choice((False, True)),
        causal_align=draw.choice(("top_left", "bottom_right")),
        scale=draw.choice((None, None, 0.3)),
        view=draw.choice(("C", "C", "padded", "offset")),
        lse=draw.choice((False, True)),
        kind=draw.choice(KINDS[:-1]),
    )  # fmt: skip


def _varlen_bench_problem(shape: tuple[int, ...], dtype: str) -> VarlenProblem:
    """Lengths from S / 2 to 3 S / 2, S in the mean."""
    b, h, h_kv, s, d, causal = bench_sizes(shape, dtype)
    causal = bool(causal)
    lengths = [s // 2 + round(s * i / (b - 1)) if b > 1 else s for i in range(b)]
    return VarlenProblem(tuple((n, n) for n in lengths), h, h_kv, d, d, dtype, causal, kind="bench")


def _varlen_bench_shapes(target: str) -> tuple[tuple[int, ...], ...]:
    if target == "host":
        return ((3, 2, 100, 64), (3, 2, 100, 64, 1))
    return ((16, 16, 1024, 128), (16, 16, 1024, 128, 1), (4, 16, 4096, 128, 1))


def _varlen_inputs(problem: VarlenProblem, seed: int, xp: Any) -> Call:
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
    for name, value, default in (
        ("causal", p.causal, False), ("causal_align", p.causal_align, "bottom_right"),
        ("scale", p.scale, None), ("return_lse", p.lse, False),
    ):  # fmt: skip
        if value != default:
            kwargs[name] = value
    return Call((*args, *cu), kwargs)


def _varlen_work(problem: VarlenProblem) -> Work:
    p = problem
    size = dtypes.NAMES[p.dtype].itemsize
    rows, keys = (sum(lengths[i] for lengths in p.lengths) for i in range(2))
    pairs = p.h * sum(q * k for q, k in p.lengths) // (2 if p.causal else 1)
    read = (rows * p.h * p.d + keys * p.h_kv * (p.d + p.dv)) * size
    return Work(read, rows * p.h * p.dv * size, 2 * pairs * (p.d + p.dv))


def _varlen_sample(
    call: Call, outputs: tuple[Any, ...], max_elements: int, seed: int
) -> tuple[Call, tuple[Any, ...]]:
    """One head."""
    q, k, v, *cu = call.args
    if q.size <= max_elements:
        return call, outputs
    head = int(np.random.default_rng(seed).integers(q.shape[1]))
    keys = head // (q.shape[1] // k.shape[1])
    part = (q[:, head : head + 1], *(x[:, keys : keys + 1] for x in (k, v)), *cu)
    cut = tuple(y[head : head + 1] if i else y[:, head : head + 1] for i, y in enumerate(outputs))
    return Call(part, call.kwargs), cut


def _varlen_variants(arch: str) -> tuple[Variant, ...]:
    return tuple(
        v
        for v in attention_plan.variants(arch)
        if v.kernel == "attention"
        or (v.kernel == "attention_hopper" and "Varlen" in dict(v.types)["Traits"])
    )


VARLEN_OP = replace(
    OP,
    name="attention_varlen",
    run=attention_varlen,
    reference=reference.attention_varlen,
    bound=reference.attention_varlen_bound,
    draw_problem=_draw_varlen,
    bench_problem=_varlen_bench_problem,
    bench_shapes=_varlen_bench_shapes,
    inputs=_varlen_inputs,
    work=_varlen_work,
    variants=_varlen_variants,
    sample=_varlen_sample,
)
