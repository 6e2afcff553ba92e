"""Interval arithmetic of formulas, in Python and in kernels: an interval contains all values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupykern.expression import read
from cupykern.expression.cpp_attention import Code, FormulaOperand, source
from cupykern.expression.interval import Interval, evaluate
from cupykern.kernels import Variant

ROWS, COLS = 5, 32
_KERNEL = """
// Of one tile: the mask of every element, and what its interval says.
KERNEL void mask_of_tile(const float* numbers, const float* table, int first, int key,
                         uint8_t* keeps, int* found) {
    const OperandParams params{{{0}, {1}}, {{0}, {7}}, {numbers[0]}};
    const OperandArrays arrays{{nullptr, table}};
    const FormulaOperands x{params, arrays};
    const int i = first + int(blockIdx.x), j = key + int(threadIdx.x);
    keeps[blockIdx.x * kNumThreads + threadIdx.x] = Formulas::mask(x, 3, 2, 1, i, j);
    const Interval<int> rows{first, first + int(gridDim.x) - 1}, keys{key, key + kNumThreads - 1};
    const Interval<bool> all = Formulas::mask_over(x, point(3), point(2), rows, keys);
    if (threadIdx.x == 0 && blockIdx.x == 0) found[0] = all.lo, found[1] = all.hi;
}
"""


@st.composite
def masks(draw, depth: int = 3) -> str:
    def integer(depth: int) -> str:
        if depth <= 0:
            return draw(st.sampled_from(("i", "j", "j", "b", "h", "3", "40", "-7")))
        kind = draw(st.sampled_from(("+", "-", "*", "//", "%", "extreme", "abs", "where")))
        if kind == "extreme":
            name = draw(st.sampled_from(("minimum", "maximum")))
            return f"{name}({integer(depth - 1)}, {integer(depth - 1)})"
        if kind == "abs":
            return f"abs({integer(depth - 1)})"
        if kind == "where":
            return f"where(i < j + 3, {integer(depth - 1)}, {integer(depth - 1)})"
        by = draw(st.sampled_from(("3", "-5", "16"))) if kind in "//%" else integer(depth - 1)
        return f"({integer(depth - 1)} {kind} {by})"

    def real(depth: int) -> str:
        if depth <= 0:
            return draw(st.sampled_from(("w", "0.37", "i", "j", "t[h]", "t[j % 7]")))
        kind = draw(st.sampled_from("+-*/fuxi"))
        if kind == "f":
            return f"floor({real(depth - 1)})"
        if kind == "u":
            name = draw(st.sampled_from(("abs", "exp", "log", "tanh", "sqrt", "float16")))
            return f"{name}({real(depth - 1)})"
        if kind == "x":
            name = draw(st.sampled_from(("minimum", "maximum")))
            return f"{name}({real(depth - 1)}, {real(depth - 1)})"
        if kind == "i":
            return integer(depth)
        return f"({real(depth - 1)} {kind} {real(depth - 1) if kind != '/' else 'w'})"

    def boolean(depth: int) -> str:
        kinds = ("integers", "integers", "reals", "both", "not", "where", "operand")
        kind = draw(st.sampled_from(kinds))
        sign = draw(st.sampled_from(("<", "<=", ">", ">=", "==", "!=")))
        if depth <= 0 or kind == "integers":
            # Never of two literals, whose comparison has no names.
            return f"({integer(2)} {sign} i + {integer(1)})"
        if kind == "reals":
            return f"({real(2)} {sign} w * {real(1)})"
        if kind == "not":
            return f"~{boolean(depth - 1)}"
        if kind == "where":
            return f"({boolean(depth - 1)} if {boolean(depth - 1)} else {boolean(depth - 1)})"
        if kind == "operand":
            return f"({draw(st.sampled_from(('w', 't[h]', 't[j % 7]')))} & {boolean(depth - 1)})"
        return f"({boolean(depth - 1)} {draw(st.sampled_from('&|'))} {boolean(depth - 1)})"

    return boolean(depth)


def of_tile(target, text: str, first: int, key: int, seed: int):
    """(mask of a tile's elements by a kernel, its interval there, the same in Python)."""
    formula, rng = read(text, "mask"), np.random.default_rng(seed)
    kinds = {"w": FormulaOperand(0), "t": FormulaOperand(1, "float")}
    code = Code(formula.nodes, tuple(kinds[name] for name in formula.names))
    variant = Variant("mask_of_tile", (), (), COLS, text=_INCLUDES + source(None, code) + _KERNEL)
    xp = target.xp
    w, table = np.float32(rng.normal()), rng.normal(0, 30, 7).astype(np.float32)
    keeps, found = xp.zeros((ROWS, COLS), np.uint8), xp.zeros(2, np.int32)
    arrays = xp.asarray(np.array([w])), xp.asarray(table)
    target.compile(variant)(ROWS, (*arrays, np.int32(first), np.int32(key), keeps, found), 0)

    def point(x: float) -> Interval:
        return Interval(float(x), float(x))

    names = {"b": point(3), "h": point(2), "i": Interval(first, first + ROWS - 1.0),
             "j": Interval(key, key + COLS - 1.0)}  # fmt: skip

    def load(node, indices):
        (at,) = indices
        known = at.lo == at.hi
        return point(table[int(np.clip(at.lo, 0, 6))]) if known else Interval(-np.inf, np.inf)

    numbers = [float(w) if name == "w" else None for name in formula.names]
    python = evaluate(formula.nodes, names, load, numbers)[-1]
    keeps, found = (x if isinstance(x, np.ndarray) else x.get() for x in (keeps, found))
    return keeps.astype(bool), found.tolist(), [int(python.lo), int(python.hi)]


_INCLUDES = '#include "expression/operands.cuh"\n'


@pytest.mark.in_turn
@given(
    text=masks(),
    first=st.sampled_from((-9, 0, 3, 100, 2**28)),
    key=st.sampled_from((0, 96, 992)),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=40)
def test_intervals_contain_every_element(target, text, first, key, seed):
    """Those of the kernel and those of Python."""
    keeps, *found = of_tile(target, text, first, key, seed)
    for lo, hi in found:
        assert lo <= keeps.min() and keeps.max() <= hi, text


@pytest.mark.parametrize(
    ("text", "first", "key", "interval"),
    [
        ("j <= i", 100, 0, [1, 1]),
        ("j <= i", 0, 32, [0, 0]),
        ("j <= i", 8, 0, [0, 1]),
        ("(j <= i) & (i - j < 64)", 160, 32, [0, 0]),
        ("i // 64 == j // 64", 64, 96, [1, 1]),
        ("i // 64 == j // 64", 0, 96, [0, 0]),
        ("(j < t[h] * 0 + 16.5) | (j > 64)", 0, 96, [1, 1]),
        ("exp(j) < 3", 0, 96, [0, 1]),
        ("t[j % 7] < w", 0, 96, [0, 1]),
        ("isnan(w)", 0, 0, [0, 0]),
        ("j <= i if i < 50 else j > 9", 100, 32, [1, 1]),
        ("j <= i if i < 50 else j > 9", 0, 32, [0, 0]),
        ("j <= i if i < 50 else j > 9", 48, 0, [0, 1]),
        ("j <= i if i < 50 else j < 40", 48, 0, [1, 1]),  # either branch
        ("t[j % 7] if i < 50 else w", 100, 0, [1, 1]),
        ("t[j % 7] if i < 50 else w", 0, 0, [0, 1]),
        ("i * i * i * i * i < 3", 2**28, 0, [0, 1]),  # wraps
    ],
)
def test_tiles_of_usual_masks_are_known(target, text, first, key, interval):
    _, *found = of_tile(target, text, first, key, 0)
    assert found == [interval, interval]
