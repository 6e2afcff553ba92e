"""Calls that once had other results, or wrote elsewhere, after certain other calls."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from fake_gpu import fake_gpu
from fake_machine import SIZE, FakeMachine

import cupykern
from cupykern import arrays, plans, targets
from cupykern.tools.history import Alias, Array, Blocks, Fp4, Machine, call, check_sequence

# A vocabulary slice: rows of 1501 of 1512 columns, which begin at multiples of 16 bytes.
SLICE = {"x": Array((4, 1501), "float16", "gap"), "out": Alias("x")}
LOGITS = Array((4, 50257), "float32", "gap of 8")
NARROW = {"dtype": "float16", "out": Array((4, 50257), "float16", "gap of 8")}
A, B = Array((8, 257)), Array((257, 64), layout="F")
SHIFTED_A = Array((8, 257), begin=1)
FP4 = Fp4((64, 256))
HEADS = Array((1, 8, 256, 128))
QKV = {"q": HEADS, "k": HEADS, "v": HEADS}

PAIRS = {
    f"{name} {what}": (call(name, **SLICE), call(name, **SLICE, **option))
    for name in ("softmax", "log_softmax")
    for what, option in (
        ("in place, then with a scale", {"scale": 4.0}),
        ("in place, then with a mask", {"mask": Array((4, 1501), "bool")}),
        (
            "in place, then with a mask of the same strides",
            {"mask": Array((4, 1501), "bool", "gap")},
        ),
        ("in place, then with a mask of columns", {"mask": Array((1501,), "bool")}),
    )
}
PAIRS |= {
    "softmax into a slice, then into one of 16 bits": (
        call("softmax", x=LOGITS, out=LOGITS),
        call("softmax", x=LOGITS, **NARROW),
    ),
    "softmax into slices, then of other dtypes": (
        call("softmax", x=Array((4, 50257), "float16", "gap of 8"), out=Alias("x")),
        call("softmax", x=Array((4, 50257), "float16", "gap of 8"), dtype="float32"),
    ),
    "matmul, then of a shifted a with a residual": (
        call("matmul", a=A, b=B),
        call("matmul", a=SHIFTED_A, b=B, residual=Array((8, 64))),
    ),
    "matmul, then of a shifted a to float32": (
        call("matmul", a=A, b=B),
        call("matmul", a=SHIFTED_A, b=B, out_dtype="float32"),
    ),
    "dual_gemm_silu of scales in rows, then in blocks": (
        call("dual_gemm_silu", a=Array((8, 256)), b1=FP4, b2=FP4),
        call("dual_gemm_silu", a=Array((8, 256)), b1=FP4, b2=Fp4((64, 256), "blocked")),
    ),
    "attention by blocks of 128, then of 64": (
        call("attention", **QKV, mask=Blocks((1, 1), 256, 256, 128, 128)),
        call("attention", **QKV, mask=Blocks((1, 1), 256, 256, 64, 64)),
    ),
    "attention, then of reversed heads of k": (
        call("attention", **QKV),
        call("attention", **{**QKV, "k": Array(HEADS.shape, layout="heads negative")}),
    ),
}
SMALL = [name for name in PAIRS if not name.startswith("attention")]


@pytest.mark.parametrize("order", [1, -1], ids=["as named", "in the other order"])
@pytest.mark.parametrize("name", SMALL)
def test_bits_on_the_host(name, order):
    failure = check_sequence(Machine(targets.get("host")), PAIRS[name][::order])
    assert failure is None, str(failure)


@pytest.mark.parametrize("order", [1, -1], ids=["as named", "in the other order"])
@pytest.mark.parametrize("name", PAIRS)
def test_launches_on_a_fake_gpu(name, order, monkeypatch):
    pytest.importorskip("cupy")
    with fake_gpu(monkeypatch, SIZE) as gpu:
        failure = check_sequence(FakeMachine(gpu, monkeypatch), PAIRS[name][::order])
    assert failure is None, str(failure)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PAIRS)
def test_bits_on_a_gpu(name, gpu):
    for order in 1, -1:
        failure = check_sequence(Machine(gpu), PAIRS[name][::order])
        assert failure is None, str(failure)


def test_rows_of_two_dims_then_of_three():
    """(2, 3) rows at two strides have no kernel of one stride, however many rows there are."""
    memory = np.random.default_rng(0).standard_normal((2, 4, 1512)).astype(np.float16)

    def results(functions):
        plans.clear()
        found = {}
        for name, view in functions:
            x = view(arrays.packed(memory))  # aligned: bits depend on where rows begin
            found[name] = cupykern.softmax(x, out=x).copy()
        return found

    views = {
        "2-d": lambda m: m.reshape(8, 1512)[:6, :1501],
        "3-d": lambda m: m[:, :3, :1501],
    }
    alone = {name: results([(name, view)])[name] for name, view in views.items()}
    for order in itertools.permutations(views.items()):
        for name, y in results(order).items():
            assert (y.view(np.uint16) == alone[name].view(np.uint16)).all(), name


def test_a_slice_is_written_up_to_its_end():
    x = np.random.default_rng(0).standard_normal((4, 50304)).astype(np.float32)[:, :50257]
    cupykern.softmax(x, out=np.empty((4, 50304), np.float32)[:, :50257])
    memory = np.full((12, 50304), 7.0, np.float16)
    out = memory[:4, :50257]
    cupykern.softmax(x, dtype="float16", out=out)
    assert (memory[4:] == 7).all() and (memory[:4, 50257:] == 7).all()
    assert (np.abs(out.astype(np.float64).sum(1) - 1) < 2e-2).all()


@pytest.mark.parametrize("first", [False, True], ids=["alone", "after an aligned cache"])
def test_an_empty_cache_may_begin_anywhere(first):
    q = np.ones((1, 2, 1, 16), np.float16)
    memory = np.zeros((1, 2, 4, 24), np.float16)
    if first:
        cupykern.decode_attention(q, memory[:, :, :0, :16], memory[:, :, :0, :16])
    cache = memory[:, :, :0, 1:17]
    y, lse = cupykern.decode_attention(q, cache, cache, return_lse=True)
    assert (y == 0).all() and (lse == -np.inf).all()
