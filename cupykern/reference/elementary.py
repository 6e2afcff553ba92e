"""Largest errors of the FP32 elementary functions, in units in the last place of the exact result.

kernels_cu/parts/math.cuh has the functions, tests/platform/test_math.py measures them.  They hold
on every target, whether or not a * b + c is contracted, as long as exp2_approx keeps EXP2_ULPS.
One ulp is at most 2 * UNIT_ROUNDOFF_32, relatively.  Results below 2^-126 may be zero, and
subnormal arguments count as zero.
"""

EXP2_ULPS = 2
"""exp2_approx, a platform's word: what the PTX ISA states of ex2.approx.ftz.f32, the weakest of them."""

EXP2_RMS, EXP2_BIAS = 0.98, 0.85
"""exp2_approx's relative error in units of 2^-24, root mean square, and how far its mean may be from 0: of
ex2.approx.ftz.f32 on an H100, all mantissas of arguments in [-64, -1): 0.972 to 1.002, mean -0.830 to
-0.865; nearer to 0 they are smaller, down to 0.50 and -0.09.  The host's is rounded to nearest: 0.43, 0."""

RECIPROCAL_RMS, RECIPROCAL_BIAS = 0.50, 0.07
"""reciprocal_approx, likewise: of rcp.approx.ftz.f32 on an H100, all mantissas: 0.502, mean +0.070."""

RSQRT_RMS, RSQRT_BIAS = 0.66, 0.09
"""reciprocal_square_root, likewise: of rsqrt.approx.ftz.f32 on an H100, all mantissas: 0.658 and 0.481 by
the exponent's parity, mean -0.077 and -0.091; of the host's square root and quotient 0.60, mean 0."""

RSQRT_SEGMENTS, RSQRT_TABLE_RMS, RSQRT_TABLE_MAX = 64, 0.44, 1.64
"""Units that approximate look a polynomial up by the leading bits of the argument's mantissa: rsqrt by 6,
and the exponent's parity (Oberman and Siu, A high-performance area-efficient multifunction interpolator,
ARITH-17 (2005)).  What is left of RSQRT_RMS without the rounding of the result, which is 0.490 where the
result is in the lower half of a binade (0.658^2 - 0.490^2 = 0.44^2), is the polynomial's: one function of
the argument, so that arguments of one segment share it.  A polynomial that fits best is furthest off at
the ends of its segment and on the same side there, so that arguments at the same place in their segments
share it too.  The PTX ISA states 2^-22.9, 2.14 * 2^-24, of the whole, of which the rounding has at least
0.5 where the polynomial is furthest off."""

LOG_ULPS = 1
"""log_accurate; 0.95 measured."""

ERF_ULPS = 2
"""erf_accurate; 1.31 measured, 1.70 with the worst exp2_approx."""

GELU_ERROR = 3
"""gelu, times 2^-24 |x|; 1.87 measured, 2.65 with the worst exp2_approx."""

GELU_RMS = 0.6
"""gelu's error in units of 2^-24 |x|, root mean square: 0.2 to 0.5 measured for |x| up to 6, and what an
exp2_approx of EXP2_RMS adds."""

GELU_OF_TWICE = 2.0**-16
"""gelu_of_twice, for results of 16 bits: so much of the result beside GELU_ERROR, of which 1.47 measured,
with the worst exp2_approx too."""

SIGMOID_ULPS = 7
SIGMOID_ULPS_PER_UNIT = 1.25
"""sigmoid: SIGMOID_ULPS + SIGMOID_ULPS_PER_UNIT * max(-x, 0); beside the latter 2.00 measured with a
division, 5.06 with the worst exp2_approx; reciprocal_approx adds at most 1.

The exponent -x * log2 e takes the roundings of the product and of log2 e, 2^-24 and 0.23 * 2^-24 of
it, which the exponential makes relative errors |x| times as large.
"""

GELU_TANH_ULPS = 9
GELU_TANH_ULPS_PER_UNIT = 5
"""gelu_tanh: GELU_TANH_ULPS + GELU_TANH_ULPS_PER_UNIT * max(-2 t, 0), where it is x times the sigmoid of 2 t.
The exponent takes up to five roundings of products, sums and constants."""
