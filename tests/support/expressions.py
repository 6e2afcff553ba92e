"""Random expressions, and a small kernel that computes one of arrays."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from cupykern import check
from cupykern.expression import cpp, read
from cupykern.kernels import Variant
from cupykern.reference.approximate import Approximate
from cupykern.reference.expression import expression
from cupykern.reference.expression_error import expression_bound

ROWS, COLS = 16, 64
NAMES = ("s", "t")
UNARY = ("abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "erf", "sigmoid",
         "gelu", "gelu_tanh", "sin", "cos", "floor", "float16", "bfloat16", "float")  # fmt: skip
_KERNEL = """
struct Operands {
    const float* arrays;
    int64_t at;
    template <int k> DEVICE float get() const { return arrays[k * kSize + at]; }
};

KERNEL void word(const float* acc, const float* operands, float* y) {
    const int64_t i = blockIdx.x, j = threadIdx.x, at = i * kNumThreads + j;
    const Operands x{operands, at};
    float results[1];
    Expression::of(x, acc[at], i, j, int64_t(0), results);
    y[at] = results[0];
}
"""


@st.composite
def texts(draw, depth: int = 4) -> str:
    """An expression of reals."""

    def real(depth: int) -> str:
        if depth == 0:
            return draw(st.sampled_from(("acc", "acc", "s", "t", "i", "j", "0.1", "2", "-1.5")))
        kind = draw(st.sampled_from(("binary", "binary", "unary", "where", "extreme", "integer")))
        if kind == "unary":
            return f"{draw(st.sampled_from(UNARY))}({real(depth - 1)})"
        if kind == "where":
            return f"({real(depth - 1)} if {boolean(depth - 1)} else {real(depth - 1)})"
        if kind == "extreme":
            name = draw(st.sampled_from(("minimum", "maximum")))
            return f"{name}({real(depth - 1)}, {real(depth - 1)})"
        if kind == "integer":
            return integer(depth - 1)
        sign = draw(st.sampled_from(("+", "-", "*", "/")))
        # By a name, so that no literal is divided by 0.
        return f"({real(depth - 1)} {sign} {real(depth - 1) if sign != '/' else 'acc'})"

    def integer(depth: int) -> str:
        if depth <= 0:
            return draw(st.sampled_from(("i", "j", "b", "3")))
        sign = draw(st.sampled_from(("+", "-", "*", "//", "%")))
        second = integer(depth - 1) if sign in "+-*" else draw(st.sampled_from(("3", "-7")))
        return f"({integer(depth - 1)} {sign} {second})"

    def boolean(depth: int) -> str:
        # Never of two literals, whose comparison a callable would make itself.
        if depth <= 0:
            name = draw(st.sampled_from(("acc", "s", "i")))
            return f"({name} {draw(st.sampled_from(('<', '<=', '>', '==', '!=')))} {real(0)})"
        kind = draw(st.sampled_from(("compare", "compare", "both", "not", "isnan", "where")))
        if kind == "both":
            return f"({boolean(depth - 1)} {draw(st.sampled_from('&|'))} {boolean(depth - 1)})"
        if kind == "not":
            return f"~{boolean(depth - 1)}"
        if kind == "where":
            first = draw(st.sampled_from(("s", boolean(0))))  # an operand is whether it is not 0
            return f"({first} if {boolean(depth - 1)} else {boolean(depth - 1)})"
        if kind == "isnan":
            return f"isnan({real(depth - 1)})"
        return f"({real(depth - 1)} < (acc - {real(depth - 1)}))"

    return real(depth)


class Computed:
    """An expression of a product that has errors, by a kernel.

    acc: what the kernel is given, FP32; off: by how much its exact value may differ.
    """

    def __init__(self, target, text, seed: int, kind: str = "normal", off: float = 2.0**-20):
        formula, rng = read(text), np.random.default_rng(seed)
        shape = ROWS, COLS
        acc = rng.standard_normal(shape).astype(np.float32)
        if kind == "wide":
            acc *= np.exp2(rng.integers(-40, 40, shape)).astype(np.float32)
        if kind == "whole":
            acc = rng.integers(-9, 10, shape).astype(np.float32)
        if kind == "special":
            acc = rng.choice(np.float32([0, 1, -1, np.inf, -np.inf, np.nan, 1e-30, 3e38]), shape)
        worst = np.where(np.isfinite(acc), np.abs(acc).astype(np.float64), 0.0) * off
        exact = acc + worst * rng.uniform(-1, 1, shape)
        given = {name: rng.standard_normal(shape).astype(np.float32) for name in NAMES}
        operands = {name: given[name] for name in formula.names}
        value = Approximate(exact, worst, 0.0 * worst, worst**2 / 3, np.inf)
        self.reference = expression(exact, text, operands)[0]
        dtype = np.dtype(np.float32)
        (self.bound,) = expression_bound(value, text, operands, dtype, (self.reference,))
        codes = [cpp.OperandCode("float", True, True)] * len(formula.names)
        source = cpp.source(formula.nodes, codes)
        kernel = target.compile(
            Variant("word", (), (("kSize", ROWS * COLS),), COLS, text=source + _KERNEL)
        )
        xp = target.xp
        arrays = np.stack([*operands.values(), acc])
        y = xp.empty(shape, np.float32)
        kernel(ROWS, (xp.asarray(acc), xp.asarray(arrays), y), 0)
        self.y = y if isinstance(y, np.ndarray) else y.get()

    @property
    def comparison(self) -> check.Comparison:
        return check.compare((self.y,), (self.reference,), (self.bound,))
