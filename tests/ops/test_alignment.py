"""Where arrays begin in memory: results at multiples of 512 bytes, arguments anywhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cupykern import arrays, dtypes, targets
from cupykern.tools.history import FAMILIES, Array, Call, Integers, Machine, call
from cupykern.tools.history.memory import make_image
from cupykern.tools.history.run import as_arrays

ROWS, MASK = Array((6, 1501)), Array((6, 1501), "bool")
EVEN, COLUMNS = Array((6, 1024)), Array((1024,))
ODD_COLUMNS, WIDE = Array((1501,)), Array((6, 1501), "float32")
A, B, BIAS, SUM = Array((33, 256)), Array((256, 40), layout="F"), Array((40,)), Array((33, 40))
A8, B8 = Array((33, 256), "float8_e4m3fn"), Array((256, 40), "float8_e4m3fn", "F")
A_INT, B_INT = Array((33, 256), "int8"), Array((256, 40), "int8", "F")
A32, B32 = Array((33, 256), "float32"), Array((256, 40), "float32", "F")
OF_ROWS, OF_COLUMNS = Array((33, 1), "float32"), Array((1, 40), "float32")
Q, K, PACKED_Q, PACKED_K = (
    Array(s) for s in ((1, 2, 40, 64), (1, 2, 72, 64), (43, 4, 16), (52, 2, 16))
)
NEW_Q, CACHE, PAGES = Array((2, 4, 1, 64)), Array((2, 2, 300, 64)), Array((40, 2, 16, 64))
TABLE = Integers(tuple(tuple(range(first, first + 19)) for first in (0, 19)))
OFFSETS = {"cu_seqlens_q": Integers((0, 3, 43)), "cu_seqlens_k": Integers((0, 5, 52)),
           "max_seqlen_q": 40, "max_seqlen_k": 47}  # fmt: skip
HEADS = {"q": Array((2, 3, 4, 64)), "k": Array((2, 3, 2, 64)), "v": Array((2, 3, 2, 64)),
         "positions": Integers((4, 5, 6)), "inv_freq": Array((32,), "float32")}  # fmt: skip
SLOTS = Array((2, 2, 8, 64), "float8_e4m3fn")

CALLS = (
    call("softmax", x=ROWS, mask=MASK, dtype="float32", out=WIDE),
    call("softmax", x=EVEN, out=EVEN),
    call("log_softmax", x=ROWS, scale=0.5, out=ROWS),
    call("layer_norm", x=ROWS, weight=ODD_COLUMNS, bias=ODD_COLUMNS, residual=ROWS, out=ROWS),
    call("layer_norm", x=EVEN, weight=COLUMNS, bias=COLUMNS, return_stats=True, out=EVEN),
    call("rms_norm", x=ROWS, weight=ODD_COLUMNS, dtype="float32", out=WIDE),
    call("rms_norm", x=EVEN, weight=COLUMNS, residual=EVEN, quantize="e4m3"),
    call("quantize", x=ROWS, dtype="e4m3", granularity="row"),
    call("quantize", x=ROWS, dtype="int8"),
    call("quantize", x=EVEN, dtype="int8", granularity="column"),
    call("quantize", x=EVEN, dtype="e5m2", granularity="block"),
    call("quantize_nvfp4", x=EVEN),
    call("nonfinite_report", x=Array((40, 1501), "float32")),
    call("matmul", a=A, b=B, bias=BIAS, residual=SUM, out=SUM),
    call("matmul", a=A32, b=B32, out=Array((33, 40), "float32")),
    call("matmul", a=A_INT, b=B_INT, out=Array((33, 40), "int32")),
    call("scaled_mm", a=A8, b=B8, scale_a=OF_ROWS, scale_b=OF_COLUMNS, bias=BIAS),
    call("scaled_mm", a=A, b=B_INT, scale_b=OF_COLUMNS, out=SUM),
    call("dual_gemm_silu", a=A, b1=B, b2=B, out=SUM),
    call("dequant_softmax", a=A, w=B_INT, scale_w=OF_COLUMNS, bias=BIAS, out=SUM),
    call("attention", q=Q, k=K, v=K, mask=Array((40, 72), "float32"), out=Q),
    call("attention_varlen", q=PACKED_Q, k=PACKED_K, v=PACKED_K, **OFFSETS, out=PACKED_Q),
    call("decode_attention", q=NEW_Q, k_cache=CACHE, v_cache=CACHE, seq_lens=Integers((300, 150)),
         return_lse=True, out=NEW_Q),
    call("decode_attention", q=NEW_Q, k_cache=PAGES, v_cache=PAGES, block_table=TABLE),
    call("rope_and_cache", **HEADS, k_weight=Array((64,)), out=HEADS["q"]),
    call("rope_and_cache", **HEADS, k_cache=SLOTS, v_cache=SLOTS),
)  # fmt: skip

# The arguments whose alignment decides how a sum is ordered: aligned rows are added up in vectors.
# Where all others begin, no bit of a result depends on it.
BITS_MAY_DIFFER = {
    "softmax": {"x", "out"},
    "log_softmax": {"x", "out"},
    "layer_norm": {"x", "weight", "bias", "residual", "out"},
    "rms_norm": {"x", "weight", "residual", "out"},
    "nonfinite_report": {"x"},
    "matmul": {"a", "b"},
    "scaled_mm": {"a", "b"},
    "dual_gemm_silu": {"a", "b1", "b2"},
    "dequant_softmax": {"a", "w"},
    "rope_and_cache": {"q", "k", "out"},
}
BEGINS = (0, 1, 2, 3, 4, 7, 8, 12, 16, 17, 24, 31)  # elements: all that a plan can tell apart


def named(call: Call) -> str:
    return call.name


def differing(machine: Machine, call: Call) -> set[str]:
    """The arguments whose alignment changes a bit of the results."""
    found = set()
    for name, value in call.arguments:
        if not isinstance(value, (Array, Integers)):
            continue
        outputs = set()
        for begin in BEGINS:
            moved = replace(value, begin=begin)
            given = tuple((n, moved if n == name else x) for n, x in call.arguments)
            outcome = machine.run(replace(call, arguments=given))
            assert outcome.error is None and outcome.fault is None, outcome
            outputs.add(tuple(output[-1] for output in outcome.outputs))
        if len(outputs) > 1:
            found.add(name)
    return found


@pytest.mark.parametrize("call", CALLS, ids=named)
def test_bits_depend_on_the_alignment_of_few_arguments(call):
    found = differing(Machine(targets.get("host")), call)
    assert found <= BITS_MAY_DIFFER.get(call.name, set())


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS, ids=named)
def test_bits_depend_on_the_alignment_of_few_arguments_on_a_gpu(call, gpu):
    assert differing(Machine(gpu), call) <= BITS_MAY_DIFFER.get(call.name, set())


def test_bits_of_wide_rows_depend_on_their_alignment():
    """Or the other test sees nothing."""
    wide_rms_norm = CALLS[5]
    assert differing(Machine(targets.get("host")), wide_rms_norm) == {"x", "out"}


@pytest.mark.parametrize("call", CALLS, ids=named)
def test_results_are_aligned_as_cupy_aligns_them(call):
    given = tuple(one for one in call.arguments if one[0] != "out")
    image = make_image(given)
    memory = image.content()
    arguments = image.build(
        lambda place: np.ndarray(place.shape, place.dtype, memory, place.offset, place.strides)
    )
    kept = []
    for odd in (1, 33, 1009):  # malloc's next places
        outputs = as_arrays(FAMILIES[call.name].run(**arguments))
        if call.name in ("nonfinite_report", "rope_and_cache"):
            outputs = outputs[:1]  # int64 and float64 of one memory; caches that were given
        assert not any(targets.address_of(y) % arrays.ALIGNMENT for y in outputs)
        kept += [outputs, np.empty(odd, np.uint8)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e5m2", "int8"])
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7, 3), (2, 5, 1009)])
def test_new_arrays_have_the_strides_that_numpy_gives(shape, dtype):
    dtype = dtypes.NAMES[dtype]
    x = np.zeros(shape, dtype)
    turned = np.swapaxes(np.zeros((*shape, 3), dtype), 0, -1)
    for made, like in (
        (arrays.empty_of(np, shape, dtype), x),
        (arrays.packed(x), x),
        (arrays.empty_like_of(np, turned, dtype), np.empty_like(turned)),
    ):
        assert type(made) is np.ndarray and made.flags.writeable
        assert (made.shape, made.dtype) == (like.shape, like.dtype)
        assert made.strides == like.strides or not made.size
        assert targets.address_of(made) % arrays.ALIGNMENT == 0
