"""Warm calls launch what cold ones do, and only calls that are alike are warm."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from fake_gpu import fake_gpu

import cupykern
from cupykern import arrays as arrays_of_cupykern
from cupykern import dtypes
from cupykern.attention.attention_plan import AttentionConfig
from cupykern.gemm.portable_config import GemmConfig
from cupykern.gemm.sm90_gemm_config import Sm90GemmConfig
from cupykern.gemm.split_plan import SplitKWorkspace
from cupykern.ops.nonfinite_report import nonfinite_arrays
from cupykern.runtime import plans, workspace
from cupykern.tools.bench import tiny_problem

cupy = pytest.importorskip("cupy")


@pytest.fixture
def fake(monkeypatch, no_gpu):
    with fake_gpu(monkeypatch) as made:
        yield made


def arrays(fake):
    x, residual = fake.array((64, 4096), "float16"), fake.array((64, 4096), "float16")
    weight, bias = fake.array((4096,), "float16"), fake.array((4096,), "float32")
    return x, residual, weight, bias


def heads(*xs):
    """(B, H, S, D)"""
    return tuple(x.reshape(2, 8, 64, 256) for x in xs)


def blocks(w, r):
    """A mask of 64 x 64, as its constructor leaves it."""
    mask = cupykern.BlockMask.__new__(cupykern.BlockMask)
    numbers = w.view(np.int32)
    vars(mask).update(
        dict.fromkeys(("seq_len_q", "seq_len_k", "q_block", "kv_block"), 64),
        causal_offset=3,
        block_mask_types=w.view(np.uint8)[:1].reshape(1, 1, 1, 1),
        partial_tiles=r.view(np.bool_)[:1, :4096].reshape(1, 64, 64),
        kv_num_blocks=numbers[16:17].reshape(1, 1, 1),
        kv_indices=numbers[32:33].reshape(1, 1, 1, 1),
        partial_indices=numbers[48:49].reshape(1, 1, 1, 1),
    )
    return mask


def complex64(x):
    """(n, 1024), or (1024,) of w"""
    return x.view(np.complex64)


def packed(w):
    """Offsets of two sequences."""
    return w.view(np.int32)[:3], w.view(np.int32)[16:19]


CALLS = {
    "softmax": lambda x, r, w, b: cupykern.softmax(x),
    "softmax of columns": lambda x, r, w, b: cupykern.softmax(x, axis=0, scale=0.5),
    "log_softmax": lambda x, r, w, b: cupykern.log_softmax(x, dtype="float32"),
    "softmax with a mask": lambda x, r, w, b: cupykern.softmax(x, mask=(r.view(np.bool_)[:, ::2])),
    "softmax in place": lambda x, r, w, b: cupykern.softmax(x, out=x),
    "softmax of a view": lambda x, r, w, b: cupykern.softmax(x[::2], out=r[1::2]),
    "layer_norm": lambda x, r, w, b: cupykern.layer_norm(x, w, b, return_stats=True),
    "rms_norm": lambda x, r, w, b: cupykern.rms_norm(x, w, residual=r),
    "rms_norm quantized": lambda x, r, w, b: cupykern.rms_norm(x, w, quantize="e4m3"),
    "rms_norm into": lambda x, r, w, b: cupykern.rms_norm(x, w, out=r),
    "quantize": lambda x, r, w, b: cupykern.quantize(x, "int8"),
    "quantize blocks": lambda x, r, w, b: cupykern.quantize(x, "e5m2", granularity="block"),
    "matmul": lambda x, r, w, b: cupykern.matmul(x, r.T, bias=b[:64], activation="gelu", alpha=0.5),
    "matmul into": lambda x, r, w, b: cupykern.matmul(
        x[:32, :2048], r[:, :2048].T, out=x[32:, 4032:], residual=x[:32, 2048:2112]
    ),
    "matmul of complex64": lambda x, r, w, b: cupykern.matmul(
        complex64(x), complex64(r).T, bias=complex64(w)[:64], alpha=0.5
    ),
    "matmul of complex64 into": lambda x, r, w, b: cupykern.matmul(
        complex64(x[:32])[:, :40],
        complex64(r)[:, :40].T,
        out=complex64(x[32:])[:, 8:72],
        residual=complex64(r)[:32, :64],
        precision="fma",
    ),
    "scaled_mm": lambda x, r, w, b: cupykern.scaled_mm(
        x, r.view(np.int8)[:, :4096].T, scale_b=w.view(np.float32)[None, :64]
    ),
    "scaled_mm by numbers": lambda x, r, w, b: cupykern.scaled_mm(
        x.view(np.int8), r.view(np.int8).T, 0.5, 2.0
    ),
    "dual_gemm_silu": lambda x, r, w, b: cupykern.dual_gemm_silu(
        x, r.T, x.T, scale_b1=w.view(np.float32)[:1]
    ),
    "dual_gemm_silu of NVFP4": lambda x, r, w, b: cupykern.dual_gemm_silu(
        x[:, :1024], nvfp4(r), nvfp4(r, b[:1])
    ),
    "scaled_mm of NVFP4 twice": lambda x, r, w, b: cupykern.scaled_mm(nvfp4(x, b[:1]), nvfp4(r)),
    "dequant_softmax": lambda x, r, w, b: cupykern.dequant_softmax(
        x, r.view(np.int8)[:, :4096].T, w.view(np.float32)[:64], bias=b[:64]
    ),
    "dequant_softmax into": lambda x, r, w, b: cupykern.dequant_softmax(
        x[:8, :64], r.view(np.int8)[:, :2048], 0.5, dtype="float32", out=x[8:].view(np.float32)[:8]
    ),
    "quantize_nvfp4": lambda x, r, w, b: cupykern.quantize_nvfp4(x, layout="blocked"),
    "nonfinite_arrays": lambda x, r, w, b: nonfinite_arrays(x),
    "attention": lambda x, r, w, b: cupykern.attention(*heads(x, r, r), causal=True),
    "attention's statistics": lambda x, r, w, b: cupykern.attention(
        *heads(x, r, r), return_lse=True, return_row_stats=True
    ),
    "attention with a mask": lambda x, r, w, b: cupykern.attention(
        *heads(x, x, x), mask=w.view(np.bool_)[:4096].reshape(64, 64), out=heads(r)[0]
    ),
    "attention with blocks": lambda x, r, w, b: cupykern.attention(
        *heads(x, r, r), mask=blocks(w, r)
    ),
    "attention_varlen": lambda x, r, w, b: cupykern.attention_varlen(
        *(y[0] for y in heads(x, r, r)), *packed(w), max_seqlen_q=8, max_seqlen_k=8, return_lse=True
    ),
    "attention_varlen into": lambda x, r, w, b: cupykern.attention_varlen(
        *(y[0] for y in heads(x, x, x)),
        *packed(w),
        max_seqlen_q=8,
        max_seqlen_k=8,
        causal=True,
        out=heads(r)[0][0],
    ),
    "decode_attention": lambda x, r, w, b: cupykern.decode_attention(
        heads(x)[0][:, :, :4], *heads(r, r), out=heads(x)[0][:, :, 8:12]
    ),
    "decode_attention with lengths": lambda x, r, w, b: cupykern.decode_attention(
        heads(x)[0][:, :, :1], *heads(r, r), seq_lens=b.view(np.int32)[:2], return_lse=True
    ),
    "decode_attention of nhd pages": lambda x, r, w, b: cupykern.decode_attention(
        heads(x)[0][:, :, :1],
        *(y.swapaxes(1, 2) for y in heads(r, r)),
        layout="nhd",
        block_table=b.view(np.int32)[:6].reshape(2, 3),
    ),
    "cascade_attention": lambda x, r, w, b: cascade(x, r, b),
    "cascade_attention into": lambda x, r, w, b: cascade(
        x, r, b, return_lse=True, out=heads(x)[0][:, :, 8:9]
    ),
    "cascade_attention of copied queries": lambda x, r, w, b: cascade(
        x, r, b, q=heads(x)[0][:, :, :2]
    ),
    "cascade_attention of many queries": lambda x, r, w, b: cascade(
        x, r, b, q=x.reshape(2, 64, 8, 256).swapaxes(1, 2), softcap=3.0
    ),
    "cascade_attention of nhd pages": lambda x, r, w, b: cupykern.cascade_attention(
        heads(x)[0][:, :, :1],
        *(y[:1].swapaxes(1, 2) for y in heads(r, r)),
        *(y.view(np.int8).swapaxes(1, 2) for y in (heads(r)[0][..., :128],) * 2),
        layout="nhd",
        block_table=b.view(np.int32)[:6].reshape(2, 3),
        k_scale=b[:8],
        v_scale=0.5,
    ),
    "rope_and_cache": lambda x, r, w, b: rotated(x, r, w, b),
    "rope_and_cache of a cache": lambda x, r, w, b: rotated(
        x, r, w, b, *r.reshape(2, 2, 2, 128, 256), k_weight=b[:256], out=x.reshape(1, 64, 16, 256)
    ),
    "rms_norm of a long row": lambda x, r, w, b: cupykern.rms_norm(x.reshape(1, -1)),
}


def cascade(x, r, b, q=None, **options):
    """One query of x unless others are given, over r twice."""
    q = heads(x)[0][:, :, :1] if q is None else q
    (k,), lens = heads(r), b.view(np.int32)[:2]
    return cupykern.cascade_attention(q, k[:1], k[:1], k, k, seq_lens=lens, **options)


def rotated(x, r, w, b, *caches, **options):
    """16 heads of q in x, 2 of k and v in r; one row of caches."""
    q, (k, v) = x.reshape(1, 64, 16, 256), r.reshape(2, 64, 8, 256)[:, None, :, :2]
    positions, inv_freq = w.view(np.int32)[:64], b[256:384]
    caches = (cache[:1] for cache in caches)
    return cupykern.rope_and_cache(q, k, v, positions, *caches, inv_freq=inv_freq, **options)


def nvfp4(x, global_scale=1.0):
    """(64, 1024), codes and scales somewhere in x"""
    data, scale = x.view(np.uint8)[:, :512], x[:, 512:544].view(np.uint8).reshape(64, 64)
    return cupykern.NvFp4.unchecked(data, scale.view(dtypes.float8_e4m3fn), "plain", global_scale)


def numbered(fake, launches, place):
    """The launches with each address of an array that was made from `place` on, also inside of a
    struct, replaced by its number in order of appearance: cold calls may make them elsewhere."""
    numbers = {}
    begin, end = fake.begin + place, fake.begin + fake.size

    def number(word):
        return -1 - numbers.setdefault(word, len(numbers)) if begin <= word < end else word

    def of(arg):
        if isinstance(arg, int):
            return number(arg)
        if not isinstance(arg, bytes):
            return arg
        map_text, _, address = arg.rpartition(b" at ")  # fake_gpu's tensor maps
        if map_text:
            return map_text, number(int(address))
        words = np.frombuffer(arg[: len(arg) // 8 * 8], np.uint64)
        return (*map(number, words.tolist()), arg[8 * len(words) :])

    return [launch._replace(args=tuple(map(of, launch.args))) for launch in launches]


def described(outputs):
    if isinstance(outputs, cupykern.NvFp4):
        outputs = outputs.data, outputs.scale, outputs.global_scale
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [(y.shape, y.dtype, y.strides) for y in outputs]


@pytest.mark.parametrize("name", CALLS)
def test_warm_is_cold(fake, name, monkeypatch):
    given = arrays(fake)
    CALLS[name](*given)  # what is kept for a stream (workspace) is there
    plans.clear()
    place = fake.offset
    launches, outputs = [], []
    for _ in range(3):  # cold, warm, and packed
        fake.offset = place  # new arrays at the same addresses
        fake.launches.clear()
        outputs.append(described(CALLS[name](*given)))
        launches.append(list(fake.launches))
        monkeypatch.setattr(cupykern.arguments, "target_of", None)  # what is warm checks nothing
    cold, warm, packed_ones = (numbered(fake, some, place) for some in launches)
    assert cold and cold == warm == packed_ones and launches[1] == launches[2]
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize(
    "operands",
    [
        lambda x, r: (x[:, ::2], r[:, :512].T),
        lambda x, r: (x[:, :8], r.reshape(2, 4, 8, 1024)[:, :3]),
        lambda x, r: (x[:, :512], r[:, :512].T, r[:, ::16]),
    ],
    ids=["a", "b", "residual"],
)
def test_copied_complex_operands_are_copied_again(fake, operands):
    given = operands(*map(complex64, arrays(fake)[:2]))
    a, b, residual = (*given, None)[:3]
    place, launches = fake.offset, []
    for _ in range(3):
        fake.offset = place
        fake.launches.clear()
        cupykern.matmul(a, b, residual=residual)
        launches.append(list(fake.launches))
    assert launches[0] == launches[1] == launches[2]


class Cost(NamedTuple):
    """What a warm call takes, in figures that do not depend on the machine."""

    calls: int  # of Python functions of this package, and from them
    allocations: int
    launches: int


def cost(fake, call) -> Cost:
    """Of a call whose result lies where that of earlier ones did."""
    here = str(Path(cupykern.__file__).parent)
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        if event == "c_call" or event == "call":
            calls += frame.f_code.co_filename.startswith(here)

    place = fake.offset
    for _ in range(3):
        call()
        fake.offset = place
    fake.launches.clear()
    before = fake.num_allocations
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Cost(calls, fake.num_allocations - before, len(fake.launches))


COSTS = {
    "softmax": Cost(10, 1, 1),
    "log_softmax": Cost(10, 1, 1),
    "layer_norm": Cost(11, 1, 1),
    "rms_norm": Cost(11, 1, 1),
    "add_rms_norm": Cost(15, 1, 1),
    "quantize": Cost(18, 1, 1),
    "quantize_nvfp4": Cost(22, 1, 1),
    "matmul": Cost(11, 1, 1),
    "complex_matmul": Cost(20, 2, 2),
    "scaled_mm": Cost(15, 1, 1),
    "dual_gemm_silu": Cost(19, 1, 1),
    "dequant_softmax": Cost(15, 1, 2),
    "decode_attention": Cost(10, 1, 1),
    "cascade_attention": Cost(33, 2, 3),  # the result; what the three calls pass on
    "merge_attention": Cost(9, 2, 1),
    "rope_and_cache": Cost(14, 1, 1),
    "attention": Cost(10, 1, 1),
    "attention_varlen": Cost(12, 1, 1),
    "nonfinite_report": Cost(17, 1, 1),
}
_ANY = Cost(60, 2, 2)  # an op whose calls are not as short as that belongs above


@pytest.mark.parametrize("op", cupykern.OPS, ids=lambda op: op.name)
def test_what_a_warm_call_costs(fake, op):
    """Times vary too much from one machine to the next; these do not.

    Fewer calls than here are welcome.
    """
    made = op.inputs(tiny_problem(op, "cuda"), 1, np)
    args = [fake.asarray(x) if isinstance(x, np.ndarray) else x for x in made.args]
    kwargs = {
        k: fake.asarray(x) if isinstance(x, np.ndarray) else x for k, x in made.kwargs.items()
    }
    found, expected = cost(fake, lambda: op.run(*args, **kwargs)), COSTS.get(op.name, _ANY)
    if expected is not _ANY:
        assert found[1:] == expected[1:]
    assert found.calls <= expected.calls + 2 and found[1:] <= expected[1:], found


CASCADES = {
    "cascade_attention": COSTS["cascade_attention"],
    "cascade_attention into": Cost(33, 2, 3),
    "cascade_attention of copied queries": Cost(52, 3, 3),
    "cascade_attention of many queries": Cost(31, 2, 3),
}


@pytest.mark.parametrize("name", CASCADES)
def test_what_a_warm_cascade_costs(fake, name):
    found = cost(fake, functools.partial(CALLS[name], *arrays(fake)))
    expected = CASCADES[name]
    assert found[1:] == expected[1:]
    assert found.calls <= expected.calls + 2, found


def test_much_scratch_memory_is_not_kept(fake, monkeypatch):
    call = functools.partial(CALLS["dequant_softmax into"], *arrays(fake))
    few = cost(fake, call)
    monkeypatch.setattr(workspace, "MOST_KEPT", 0)
    plans.clear()
    assert cost(fake, call).allocations == few.allocations + 1


def long_heads(x):
    """(B, H, S, D) that Hopper's kernels take."""
    return x.reshape(1, 8, 512, 64)


MAPPED = {
    "matmul": lambda x, r: cupykern.matmul(
        x.reshape(512, 512), r.reshape(512, 512).T, config=Sm90GemmConfig(128, 128, 64, 4)
    ),
    "attention": lambda x, r: cupykern.attention(*map(long_heads, (x, r, r)), causal=True),
    "dual_gemm_silu": lambda x, r: cupykern.dual_gemm_silu(
        x.reshape(512, 512), r.reshape(512, 512).T, x.reshape(512, 512).T
    ),
}


@pytest.mark.parametrize("name", MAPPED)
def test_arrays_that_move_are_warm(fake, name, monkeypatch):
    """Elsewhere in memory a call launches what it would without a plan: tensor maps follow."""
    launches = {}
    for place in ("first", "moved", "cold"):
        if place == "cold":
            plans.clear()
        fake.offset = 0 if place == "first" else 2**22
        x, residual, *_ = arrays(fake)
        fake.launches.clear()
        MAPPED[name](x, residual)
        launches[place] = list(fake.launches)
        assert "hopper" in fake.launches[0].variant.kernel
    assert launches["first"] != launches["moved"] == launches["cold"]


def decode_arrays(fake):
    return {
        "q": fake.array((1, 8, 1, 64), "float16"),
        **{name: fake.array((512, 2, 16, 64), "int8") for name in ("k_cache", "v_cache")},
        "seq_lens": fake.array((1,), "int32"), "block_table": fake.array((1, 512), "int32"),
        **{name: fake.array((2,), "float32") for name in ("k_scale", "v_scale")},
        **{name: fake.array((8,), "float32") for name in ("alibi_slopes", "sinks", "bias")},
    }  # fmt: skip


def decode(bias=None, **arrays):
    if bias is not None:
        arrays |= {"score": "s + bias[h]", "operands": {"bias": bias}}
    cupykern.decode_attention(**arrays, return_lse=True)


def cascade_arrays(fake):
    """Of few keys, so that there is no workspace, which would lie among the results."""
    shapes = {"q": (2, 8, 1, 64), "shared_k": (1, 2, 32, 64), "shared_v": (1, 2, 32, 64)}
    return {
        **{name: fake.array(shape, "float16") for name, shape in shapes.items()},
        **{name: fake.array((8, 2, 16, 64), "int8") for name in ("k_cache", "v_cache")},
        "seq_lens": fake.array((2,), "int32"), "block_table": fake.array((2, 2), "int32"),
        **{name: fake.array((2,), "float32") for name in ("k_scale", "v_scale")},
        "out": fake.array(shapes["q"], "float16"),
    }  # fmt: skip


def rope_arrays(fake):
    heads = {"q": (2, 5, 8, 64), "k": (2, 5, 2, 64), "v": (2, 5, 2, 64)}
    weights = {"q_weight": (64,), "k_weight": (64,)}
    return {
        **{name: fake.array(shape, "float16") for name, shape in (heads | weights).items()},
        **{name: fake.array((2, 2, 16, 64), "int8") for name in ("k_cache", "v_cache")},
        "positions": fake.array((5,), "int32"), "block_table": fake.array((2, 8), "int32"),
        "cos_sin": fake.array((100, 64), "float32"), "inv_freq": fake.array((32,), "float32"),
        **{name: fake.array((2,), "float32") for name in ("k_scale", "v_scale")},
    }  # fmt: skip


def operands(fake, m=64, n=256, k=4096):
    return {"a": fake.array((m, k), "float16"), "b": fake.array((k, n), "float16")}


def product(config, **options):
    return lambda **given: cupykern.matmul(**given, config=config, **options)


def two_nvfp4(a, b):
    cupykern.scaled_mm(nvfp4(a), nvfp4(b), out_dtype="float32")


def queries(fake):
    return {name: fake.array((1, 8, 64, 64), "float16") for name in "qkv"}


def packed_queries(fake):
    rows = {name: fake.array((96, 8, 64), "float16") for name in "qkv"}
    return rows | {f"cu_seqlens_{x}": fake.array((3,), "int32") for x in "qk"}


TILE = AttentionConfig(64, 64, 4)
_OF_DECODE = "k_scale", "v_scale", "alibi_slopes", "sinks", "bias"
_OF_ROPE = "cos_sin", "q_weight", "k_weight", "block_table", "k_scale", "v_scale"
PACKED = {  # a call, its arrays, and those that it is not given
    "decode_attention": (decode, decode_arrays, ()),
    "decode_attention without options": (decode, decode_arrays, _OF_DECODE),
    "cascade_attention": (cupykern.cascade_attention, cascade_arrays, ()),
    "cascade_attention without options": (
        cupykern.cascade_attention,
        cascade_arrays,
        ("k_scale", "v_scale", "out"),
    ),
    "cascade_attention's statistics": (
        functools.partial(cupykern.cascade_attention, return_lse=True),
        cascade_arrays,
        ("out",),
    ),
    "rope_and_cache": (cupykern.rope_and_cache, rope_arrays, ("inv_freq",)),
    "rope_and_cache without options": (cupykern.rope_and_cache, rope_arrays, _OF_ROPE),
    "rope_and_cache without caches": (
        cupykern.rope_and_cache,
        rope_arrays,
        ("k_cache", "v_cache", *_OF_ROPE),
    ),
    "matmul, split-K": (product(GemmConfig(64, 64, 64, 2, 2, splits=4)), operands, ()),
    "matmul, split-K with a workspace": (
        product(SplitKWorkspace(Sm90GemmConfig(128, 128, 64, 4), 4)),
        operands,
        (),
    ),
    "matmul, a formula of float32": (
        lambda a, b: cupykern.matmul(
            a.view(np.float32), b.view(np.float32)[:2048], epilogue="acc * acc"
        ),
        operands,
        (),
    ),
    "scaled_mm of NVFP4 twice": (
        two_nvfp4,
        lambda fake: {name: fake.array((64, 4096), "float16") for name in "ab"},
        (),
    ),
    "softmax of a long row": (
        cupykern.softmax,
        lambda fake: {"x": fake.array((1, 2**20), "float32")},
        (),
    ),
    "attention, portable": (functools.partial(cupykern.attention, config=TILE), queries, ()),
    "attention's statistics, portable": (
        functools.partial(cupykern.attention, config=TILE, return_lse=True),
        queries,
        (),
    ),
    "attention, naive": (
        functools.partial(cupykern.attention, algorithm="naive", causal=True),
        queries,
        (),
    ),
    "attention_varlen, portable": (
        functools.partial(cupykern.attention_varlen, max_seqlen_q=64, max_seqlen_k=64, config=TILE),
        packed_queries,
        (),
    ),
}


@pytest.mark.parametrize("name", PACKED)
def test_a_packed_launch_is_of_the_arrays_given(fake, name):
    """After packed launches each array lies elsewhere in turn, each result, and the workspace."""
    call, make, without = PACKED[name]
    given = {one: x for one, x in make(fake).items() if one not in without}
    elsewhere = {one: fake.array(x.shape, x.dtype) for one, x in given.items()}
    place, made = fake.offset, []

    def launches(arrays, moved=None):
        made.clear()

        def allocate(size):
            made.append(fake.allocate(size))
            return made[-1] + (2**20 if moved == len(made) else 0)

        fake.offset = place
        fake.launches.clear()
        fake.xp.cuda.set_allocator(allocate)
        call(**arrays)
        fake.xp.cuda.set_allocator(fake.allocate)
        return list(fake.launches)

    launches(given)
    launches(given)
    num_results = len(made)
    workspace.of_streams.clear()
    launches(given)
    num_with_workspace = len(made)
    for moved in (*given, *range(1, num_with_workspace + 1)):
        plans.clear()
        first, *others = (launches(given) for _ in range(4))
        pattern = numbered(fake, first, place)
        assert all(numbered(fake, one, place) == pattern for one in others)
        if moved not in given and moved > num_results:
            workspace.of_streams.clear()
        arrays = {**given, moved: elsewhere[moved]} if moved in given else given
        warm = launches(arrays, moved)
        plans.clear()
        assert others[-1] != warm, moved
        cold = launches(arrays, moved)
        assert numbered(fake, warm, place) == numbered(fake, cold, place), moved
    assert num_with_workspace > num_results or "decode" not in name
    for _ in range(3):
        launches(given)
    fake.num_packed = 0
    assert len(launches(given)) == fake.num_packed > 0


def test_other_arrays_are_cold_again(fake):
    x = fake.array((64, 4096), "float16")
    known = len(plans.warm)

    def added(call) -> int:
        nonlocal known
        call()
        before, known = known, len(plans.warm)
        return known - before

    assert added(lambda: cupykern.softmax(x)) == 1
    assert added(lambda: cupykern.softmax(fake.array(x.shape, x.dtype))) == 0
    assert added(lambda: cupykern.softmax(fake.array(x.shape, "float32"))) == 1
    assert added(lambda: cupykern.softmax(x[:32])) == 1
    assert added(lambda: cupykern.softmax(x, 1)) == 1
    assert added(lambda: cupykern.softmax(x, scale=1.0)) == 1
    assert added(lambda: cupykern.softmax(x[:, 1:], out=fake.array((64, 4095), "float16"))) == 1
    assert added(lambda: cupykern.softmax(x[:, 2:4095], out=fake.array((64, 4093), "float16"))) == 1
    # The strides of its result are CuPy's choice.
    assert added(lambda: cupykern.softmax(x.T)) == 0


def test_arrays_made_sooner_are_what_cupy_makes(fake):
    memory, make = fake.allocate(4096), arrays_of_cupykern.maker(cupy)
    assert make is not cupy.ndarray
    for shape, dtype in (
        ((3, 5, 7), np.float16),
        ((), np.float32),
        ((4, 1), np.dtype("u1")),
        ((0, 3), np.int64),
    ):
        for where in (memory, memory + 512, None):
            found, wanted = make(shape, dtype, where), cupy.ndarray(shape, dtype, where)
            assert type(found) is cupy.ndarray and found.base is None
            for name in ("shape", "strides", "dtype", "size", "nbytes", "ndim"):
                assert getattr(found, name) == getattr(wanted, name)
            assert str(found.flags) == str(wanted.flags)
            assert where is None or found.data.ptr == where.ptr
            assert found.T.strides == wanted.T.strides and found.reshape(-1).shape == (found.size,)


def test_operands_that_are_copied_are_not_kept(fake, monkeypatch):
    """The plan is one for the copies, which lie elsewhere in other steps."""
    monkeypatch.setattr(fake.xp, "array", lambda x, order: fake.array(x.shape, x.dtype))
    x, w = fake.array((64, 1024), "float16"), fake.array((64, 2048), "uint8")
    scale = fake.array((64, 64), "uint8").view(dtypes.float8_e4m3fn)
    for data, kept in ((w[:, :512], 1), (w[:, :1024:2], 0)):
        known = len(plans.warm)
        cupykern.scaled_mm(x, cupykern.NvFp4.unchecked(data, scale, "plain", 1.0))
        assert len(plans.warm) - known == kept


def test_what_was_illegal_stays_so(fake):
    x, residual, weight, bias = arrays(fake)
    for _ in range(2):
        cupykern.softmax(x)
        cupykern.softmax(x, 1)
        cupykern.softmax(x[:32], out=x[32:])
        cupykern.rms_norm(x, weight, residual=residual)
        with pytest.raises(TypeError, match="axis must be an integer; got bool"):
            cupykern.softmax(x, True)
        with pytest.raises(TypeError, match="axis must be an integer; got float"):
            cupykern.softmax(x, 1.0)
        with pytest.raises(ValueError, match="out must not overlap x"):
            cupykern.softmax(x[:32], out=x[16:48])
        with pytest.raises(TypeError, match="dtype must be one of"):
            cupykern.softmax(x, dtype=[])
        with pytest.raises(TypeError, match="weight must be a cupy array as x is"):
            cupykern.rms_norm(x, np.ones(4096, np.float16), residual=residual)
        with pytest.raises(TypeError, match="x must be a cupy or numpy array"):
            cupykern.softmax("x")
        q, k = heads(x, residual)
        cupykern.attention(q, k, k)
        cupykern.attention(q, k, k, scale=1)
        with pytest.raises(TypeError, match="causal must be a bool"):
            cupykern.attention(q, k, k, causal=1)
        with pytest.raises(TypeError, match="scale must be a real number"):
            cupykern.attention(q, k, k, scale=True)
        with pytest.raises(ValueError, match="overlap"):
            cupykern.attention(q, k, k, out=k)


def test_members_of_tuples_are_checked_in_every_call(fake):
    """(3, 0) equals (3.0, False), which is no window."""
    q = fake.array((1, 4, 64, 64), "float16")
    rows, cu = fake.array((8, 4, 64), "float16"), fake.array((3,), "int32")
    longest = {"max_seqlen_q": 4, "max_seqlen_k": 4}

    def varlen(window):
        cupykern.attention_varlen(rows, rows, rows, cu, cu, window=window, **longest)

    for call in (
        lambda window: cupykern.attention(q, q, q, window=window),
        lambda window: cupykern.decode_attention(q, q, q, window=window),
        varlen,
    ):
        for _ in range(2):
            call((3, 0))
            for window in ((3.0, 0), (3, False), (np.float64(3), 0)):
                with pytest.raises(TypeError, match="window must have integers"):
                    call(window)
    x = fake.array((256, 256), "float16")
    for _ in range(2):
        cupykern.quantize(x, "e4m3", granularity="block", block=(1, 128))
        with pytest.raises(TypeError, match=r"block's rows must be an integer"):
            cupykern.quantize(x, "e4m3", granularity="block", block=(1.0, 128.0))


def test_block_tables_are_no_slopes(fake):
    """Both are the sixth array of their calls."""
    q, cu = fake.array((8, 4, 64), "float16"), fake.array((3,), "int32")
    pages, k = fake.array((5, 4, 16, 64), "float16"), fake.array((9, 4, 64), "float16")
    lens, table = fake.array((2,), "int32"), fake.array((2, 2), "int32")
    slopes = fake.array((4,), "float32")
    call = functools.partial(cupykern.attention_varlen, q, max_seqlen_q=4, max_seqlen_k=30)
    for _ in range(3):
        call(pages, pages, cu, block_table=table, seq_lens_k=lens)
        call(k, k, cu, cu, alibi_slopes=slopes)
    with pytest.raises(ValueError, match="k must have 3 dims"):
        call(pages, pages, cu, lens, alibi_slopes=table)
    with pytest.raises(ValueError, match="k must have 4 dims"):
        call(k, k, cu, seq_lens_k=cu, block_table=slopes)


def test_masked_arrays_are_no_scales(fake):
    q = fake.array((1, 4, 1, 64), "float16")
    cache = fake.array((1, 4, 64, 64), "int8")
    for _ in range(2):
        cupykern.decode_attention(q, cache, cache, k_scale=2.0)
        with pytest.raises(TypeError, match="k_scale must be a real number; got MaskedArray"):
            cupykern.decode_attention(q, cache, cache, k_scale=np.ma.array(2.0))


def test_a_warm_call_is_one_on_the_current_device(fake, monkeypatch):
    """Elsewhere all is checked again, and the device is another one meanwhile."""
    x = fake.array((2, 8), "float16")

    def find(x, y, option, out=None):
        return plans.find(("test", option), out, x, y)

    key, _, places = find(x, None, 3)
    assert places == (x.data.ptr, *[None] * 6)
    plans.remember(key, "known")
    assert find(x, None, 3) == (key, "known", places)
    assert find(x, None, 3.0)[1] is find(x, x, 3)[1] is find(x, None, 3, x)[1] is None
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: 1)
    assert find(x, None, 3) == (key, None, places)
    assert find(np.zeros(3), None, 3) == find(x, None, []) == (None, None, None)


@pytest.mark.parametrize("into", [False, True])
def test_the_key_has_all_of_every_array(fake, into):
    """Also of those that are given after the ones with a name of their own."""
    x, other, moved = (fake.array((4, 8), dtype) for dtype in ("float16", "float32", "float16"))
    out = fake.array((4, 8), "float16") if into else None
    seen, addresses = set(), set()
    for place in range(1, 10):
        for one in (other, x[:, ::2], x[1:], x.reshape(8, 4), x[1:].reshape(4, 6), None, moved):
            key, _, places = plans.find(("test",), out, *[x] * place, one, *[x] * (9 - place))
            seen.add(key)
            addresses.add(places)
    plain, _, places = plans.find(("test",), out, *[x] * 10)
    assert len(seen) == 9 * (7 if into else 6) + (not into) and (plain in seen) == (not into)
    assert len(addresses) == 9 * 4 + 1 and places in addresses


def test_the_table_does_not_grow_forever(fake, monkeypatch):
    monkeypatch.setattr(plans, "MAX_PLANS", 3)
    for num_cols in range(1, 9):
        cupykern.softmax(fake.array((2, num_cols), "float16"))
        assert len(plans.warm) <= 3
