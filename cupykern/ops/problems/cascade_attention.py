"""Problems of cascade_attention: those of decode_attention over the own keys, and shared keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ... import dtypes, inputs
from ...arrays import take
from ...attention import attention_plan, decode_config, merge_plan
from ...attention.attention_hopper import Kind
from ...attention.attention_task import HEAD_DIMS, MaskType, Scores
from ...attention.decode_config import DTYPES, LAYOUTS, DecodeConfig
from ...kernels import Variant
from ...op import Call, Draw, Work
from ...typing import Array, Namespace
from . import decode_attention as decode
from .attention import NO_OPTIONS, ScoreChoice
from .decode_attention import CACHES, SCALES, VIEWS, DecodeProblem


@dataclass(frozen=True)
class CascadeProblem:
    """One call, without data.

    own: the call of decode_attention over each sequence's own keys: causal, with no option but a
    softcap.  shared: number of shared keys.
    """

    own: DecodeProblem
    shared: int

    def __str__(self) -> str:
        return f"{self.shared} shared, {self.own}"

    @property
    def dtype(self) -> str:
        return self.own.dtype


def draw_problem(draw: Draw) -> CascadeProblem:
    """Draw a problem.  To compile few variants, bfloat16 uses small heads."""
    batch, kv_heads = draw.choice((0, 1, 2, 3, 3)), draw.choice((1, 1, 2, 3))
    keys = draw.choice((0, 1, 16, 33, 64, 129, 300))
    lens = None
    if draw.choice((False, True, True)):
        lens = tuple(draw.choice((0, keys, draw.integer(0, keys))) for _ in range(batch))
    dtype = draw.choice(("float16", "float16", "bfloat16"))
    wide = dtype == "float16" and draw.choice((False, False, True))
    cache_dtype = draw.choice((None, None, *CACHES))
    own = DecodeProblem(
        *(batch, draw.choice((1, 2, 4, 5)) * kv_heads, kv_heads),
        # 3 x 33 rows: attention reads the shared keys
        *(draw.choice((0, 1, 1, 1, 2, 4, 8, 33, 33)), keys),
        dim=draw.choice((72, 128, 128, 125) if wide else (8, 64, 64, 33)),
        dim_v=draw.choice((None, None, 8, 64, 61)),
        dtype=dtype,
        lens=lens,
        page=draw.choice((None, None, 1, 16, 24)),
        scale=draw.choice((None, None, 0.0, 0.25, -0.1)),
        return_lse=draw.choice((False, True)),
        layout=draw.choice(LAYOUTS),
        view=draw.choice(("C", *VIEWS)),
        kind=draw.choice(("normal", "uniform", "same_sign", "exact", "subnormal")),
        options=draw.choice((NO_OPTIONS, NO_OPTIONS, ScoreChoice(softcap=3.0))),
        cache_dtype=cache_dtype,
        scales=draw.choice(SCALES) if cache_dtype else None,
    )
    return CascadeProblem(own, draw.choice((0, 1, 33, 200, 520)))


def bench_problem(shape: tuple[int, ...], text: str) -> CascadeProblem:
    """text: as for decode_attention, of q, the shared keys and the own caches."""
    if len(shape) != 6:
        raise ValueError(f"cascade_attention needs a shape (B, H, Hkv, S, Sk, D); got {shape}")
    batch, heads, kv_heads, shared, keys, dim = shape
    return CascadeProblem(decode.bench_problem((batch, heads, kv_heads, keys, dim), text), shared)


def bench_shapes(target: str) -> tuple[tuple[int, ...], ...]:
    if target == "host":
        return ((4, 8, 2, 512, 128, 64),)
    return (
        (16, 32, 8, 2048, 256, 128),
        (16, 32, 8, 8192, 1024, 128),
        (64, 32, 8, 2048, 256, 128),
        (64, 32, 8, 8192, 1024, 128),
        (128, 32, 8, 8192, 512, 128),  # rows enough for attention
    )


def make_inputs(problem: CascadeProblem, seed: int, xp: Namespace) -> Call:
    p, dtype = problem.own, dtypes.NAMES[problem.own.dtype]
    call = decode.make_inputs(p, seed, xp)
    q, *caches = call.args
    shared = []
    for i, dim in enumerate((p.dim, p.dim_v or p.dim)):
        shape = 1, p.kv_heads, problem.shared, dim
        if p.kind == "bench":
            shared.append(inputs.bench_values(shape, dtype, seed + 10 + i, xp))
            continue
        x = inputs.values(p.kind, shape, dtype, seed + 10 + i)
        if p.layout == "nhd":
            x = np.ascontiguousarray(x.swapaxes(1, 2))
        shared.append(decode.stored(x, p.view, xp))
    return Call((q, *shared, *caches), call.kwargs)


def work(problem: CascadeProblem) -> Work:
    """Bytes: the shared keys once, the own keys, q and the results."""
    p, own = problem.own, decode.work(problem.own)
    keys = problem.shared if own.bytes_written else 0
    read = keys * p.kv_heads * (p.dim + (p.dim_v or p.dim)) * dtypes.NAMES[p.dtype].itemsize
    return own._replace(bytes_read=own.bytes_read + read)


def configs(problem: CascadeProblem, arch: str) -> tuple[DecodeConfig, ...]:
    """The configs of the call over the own keys."""
    return decode_config.configs(decode.task_of(problem.own), arch)


def variant(problem: CascadeProblem, config: DecodeConfig) -> Variant:
    """The variant that reads the own keys, which is launched first."""
    return decode.variant(problem.own, config)


def variants(arch: str) -> tuple[Variant, ...]:
    """The variants of the three calls.  Negative scales need attention's variants for masks."""
    kinds = (
        (Scores.PLAIN, Kind()),
        (Scores.MASKED, Kind(MaskType.ARRAY)),
        (Scores.GENERAL, Kind(general=True)),
    )
    of_attention = (
        attention_plan.flash_variant(dtype, (dim, dim), scores, False, config, kind)
        for dtype in DTYPES
        for dim in HEAD_DIMS
        for scores, kind in kinds
        for config in attention_plan.configs((dim, dim), scores, arch, hopper=kind)
    )
    of_merge = (v for v in merge_plan.variants(arch) if v.types[0][1] != "float")
    return tuple(dict.fromkeys((*decode_config.variants(arch), *of_attention, *of_merge)))


def sample(
    call: Call, outputs: tuple[Array, ...], max_elements: int, seed: int
) -> tuple[Call, tuple[Array, ...]]:
    """Sample the first, the last and a random sequence, and two KV heads.  Small calls are kept
    whole."""
    q, shared_k, shared_v, k, v = call.args
    if shared_k.size + k.size <= 4 * max_elements:
        return call, outputs
    axis = 2 if call.kwargs.get("layout") == "nhd" else 1  # of the caches' heads
    paged = call.kwargs.get("block_table") is not None
    group, rng = q.shape[1] // k.shape[axis], np.random.default_rng(seed)
    batches, heads = (
        sorted({0, n - 1, int(rng.integers(n))} if n else ()) for n in (len(q), k.shape[axis])
    )
    del heads[1:-1]
    q_heads = [head * group + i for head in heads for i in range(group)]
    of_heads = (slice(None),) * axis + (heads,)

    def own(x: Array) -> Array:
        """Of a cache or the scales of its tokens; of pages all are kept."""
        return take(x if paged else take(x, batches), of_heads)

    kwargs = dict(call.kwargs)
    for name in {"seq_lens", "block_table"} & kwargs.keys():
        kwargs[name] = kwargs[name][batches]
    for name in {"k_scale", "v_scale"} & kwargs.keys():
        x = kwargs[name]
        dims = getattr(x, "ndim", 0)
        kwargs[name] = own(x) if dims == 3 else x[heads] if dims == 1 else x
    shared = (take(x, of_heads) for x in (shared_k, shared_v))
    part = Call((q[batches][:, q_heads], *shared, own(k), own(v)), kwargs)
    return part, tuple(y[batches][:, q_heads] for y in outputs)
