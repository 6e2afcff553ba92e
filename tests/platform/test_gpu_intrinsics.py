"""Expected errors hold where intrinsics are as inexact as a GPU's, not rounded to nearest as the host's."""

from __future__ import annotations

import numpy as np
import pytest
from planted import Fault, planted

from cupykern import OPS, check
from cupykern.op import RandomDraw
from cupykern.ops.problems.norm import NormProblem
from cupykern.ops.softmax import SoftmaxProblem
from cupykern.targets import host

HOST = """
DEVICE float reciprocal_square_root(float x) { return 1.0f / __builtin_sqrtf(x); }
DEVICE float reciprocal_approx(float x) { return 1.0f / x; }
// 2^x; subnormals are zero.
DEVICE float exp2_approx(float x) { return __builtin_exp2f(x); }
"""
# Means and root mean squares of relative errors as measured on an H100 (reference/elementary.py): a
# mean, a number that depends on x's bits, and the rounding to FP32.
AS_A_GPU = """
namespace inexact {
DEVICE float number(double y, float x, double mean, double spread) {
    uint32_t bits = bit_cast<uint32_t>(x) * 2654435761u;
    bits = (bits ^ bits >> 15) * 2246822519u;
    const double uniform = double(bits ^ bits >> 13) * 0x1p-32 - 0.5;
    return float(y * (1.0 + (mean + spread * 3.4641016 * uniform) * 0x1p-24));
}
DEVICE bool is_normal(float y) { return y >= 0x1p-126f && y < 1.0f / 0.0f; }
}  // namespace inexact
DEVICE float reciprocal_square_root(float x) {
    const float y = 1.0f / __builtin_sqrtf(x);
    return inexact::is_normal(y)
        ? inexact::number(1.0 / __builtin_sqrt(double(x)), x, -0.09, 0.5) : y;
}
DEVICE float reciprocal_approx(float x) {
    const float y = 1.0f / x;
    return inexact::is_normal(y) ? inexact::number(1.0 / double(x), x, 0.07, 0.26) : y;
}
DEVICE float exp2_approx(float x) {
    const float y = __builtin_exp2f(x), size = x < 0.0f ? -x : x;
    if (!inexact::is_normal(y) || x == 0.0f) return y;
    const double mean = size >= 1.0f ? -0.85 : size > 0x1p-8f ? -0.35 : -0.09;
    return inexact::number(__builtin_exp2(double(x)), x, mean, 0.3);
}
"""
BY_NAME = {op.name: op for op in OPS}


@pytest.fixture(scope="module")
def as_a_gpu(tmp_path_factory):
    fault = Fault("platform/host.cuh", HOST, AS_A_GPU, "")
    with planted(fault, tmp_path_factory), host.use(warp_size=32) as target:
        yield target


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "layer_norm", "rms_norm"])
def test_what_is_expected_holds(name, as_a_gpu):
    """Of FP32 results, which show it most, and of drawn problems."""
    op = BY_NAME[name]
    make = SoftmaxProblem if name.endswith("softmax") else NormProblem
    problems = [make((200, cols), dtype="float32") for cols in (31, 64, 1000)]
    problems += [op.draw_problem(RandomDraw(seed)) for seed in range(8)]
    worst = 0.0
    for seed, problem in enumerate(problems):
        found = check.check_problem(op, problem, seed, np)
        assert found.ok, f"{problem!r}: {found}"
        worst = max(worst, found.rms_ratio)
    assert worst >= 0.5
