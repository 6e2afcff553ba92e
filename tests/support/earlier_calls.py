"""Pairs of calls of which the second once had another result after the first."""

from __future__ import annotations

from cupykern.tools.history import Alias, Array, Blocks, Fp4, call

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
