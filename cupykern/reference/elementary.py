"""Largest errors of the FP32 elementary functions, in units in the last place of the exact result.

kernels_cu/common/math.cuh defines the functions; tests/platform/test_math.py measures them.  The
bounds hold on every target, with and without contraction of a * b + c, if exp2_approx keeps
EXP2_ULPS.  One ulp is a relative error of at most 2 * UNIT_ROUNDOFF_32.  Results below 2^-126 may
be zero, and subnormal arguments count as zero.
"""

EXP2_ULPS = 2
"""exp2_approx on all platforms: the PTX ISA's bound of ex2.approx.ftz.f32, the least accurate."""

EXP2_RMS, EXP2_BIAS = 0.98, 0.85
"""Relative error of exp2_approx in units of 2^-24: root mean square, and largest |mean|.
ex2.approx.ftz.f32 on an H100, all mantissas of arguments in [-64, -1): 0.972 to 1.002, mean -0.830
to -0.865.  Closer to 0 the errors are smaller, down to 0.50 and -0.09.  The host's exp2 is rounded
to nearest: 0.43, 0."""

RECIPROCAL_RMS, RECIPROCAL_BIAS = 0.50, 0.07
"""The same of reciprocal_approx: rcp.approx.ftz.f32 on an H100, all mantissas: 0.502, mean
+0.070."""

RSQRT_RMS, RSQRT_BIAS = 0.66, 0.09
"""The same of reciprocal_square_root: rsqrt.approx.ftz.f32 on an H100, all mantissas: 0.658 and
0.481 by the exponent's parity, mean -0.077 and -0.091.  The host's square root and division: 0.60,
mean 0."""

RSQRT_SEGMENTS, RSQRT_TABLE_RMS, RSQRT_TABLE_MAX = 64, 0.44, 1.64
"""Approximating units look up a polynomial by the leading bits of the argument's mantissa: rsqrt by
6 bits and the exponent's parity (Oberman and Siu, A high-performance area-efficient multifunction
interpolator, ARITH-17 (2005)).  The rounding of the result is 0.490 of RSQRT_RMS where the result
is in the lower half of a binade.  The rest is the polynomial's error: 0.658^2 - 0.490^2 = 0.44^2.

That error is a function of the argument, so arguments in one segment share it.  The best fit has
its largest error at both ends of a segment, with the same sign.  So arguments at the same position
in their segments also share it.  The PTX ISA states 2^-22.9 = 2.14 * 2^-24 for the whole error.
Where the polynomial's error is largest, the rounding takes at least 0.5 of that."""

LOG_ULPS = 1
"""log_accurate; 0.95 measured."""

ERF_ULPS = 2
"""erf_accurate; 1.31 measured, 1.70 with the worst exp2_approx."""

SQRT_ULPS, TANH_ULPS, SINE_ULPS = 1, 4, 2
"""square_root, tanh_accurate, and sine and cosine up to SINE_LIMIT; tests/platform/
test_expression_math.py has what was measured."""

SINE_LIMIT = 2.0**16

GELU_ERROR = 3
"""gelu, times 2^-24 |x|; 1.87 measured, 2.65 with the worst exp2_approx."""

GELU_RMS = 0.6
"""gelu's error in units of 2^-24 |x|, root mean square: 0.2 to 0.5 measured for |x| up to 6, plus
what an exp2_approx of EXP2_RMS adds."""

GELU_OF_TWICE = 2.0**-16
"""gelu_of_twice, for 16-bit results: an additional error relative to the result.  Of GELU_ERROR,
1.47 was measured, also with the worst exp2_approx."""

SIGMOID_ULPS = 7
SIGMOID_ULPS_PER_UNIT = 1.25
"""sigmoid: SIGMOID_ULPS + SIGMOID_ULPS_PER_UNIT * max(-x, 0).  For SIGMOID_ULPS, 2.00 was measured
with a division and 5.06 with the worst exp2_approx; reciprocal_approx adds at most 1.

The exponent -x * log2 e has the relative errors 2^-24 and 0.23 * 2^-24, from the roundings of the
product and of log2 e.  The exponential turns them into relative errors |x| times as large.
"""

GELU_TANH_ULPS = 9
GELU_TANH_ULPS_PER_UNIT = 5
"""gelu_tanh: GELU_TANH_ULPS + GELU_TANH_ULPS_PER_UNIT * max(-2 t, 0), where gelu_tanh is x times
the sigmoid of 2 t.  The exponent has up to five roundings of products, sums and constants."""

SINE_COSINE_ERROR = 1.75
SINE_COSINE_PER_ANGLE = 2.0**-51
"""sine_cosine: absolute error SINE_COSINE_ERROR * 2^-24 + SINE_COSINE_PER_ANGLE * |angle|.  For
the former 1.56 was measured: the roundings of the reduced angle (2^-25), of the result and of
1 - x^2 / 2, and the polynomials.  The FP64 angle and its reduction have one rounding each."""

SINE_COSINE_RMS, SINE_COSINE_BIAS = 0.36, 0.012
SINE_COSINE_RMS_PER_ANGLE = 2.0**-54
"""The same in units of 2^-24, root mean square and |mean|, for random angles: 0.354, and 0.0066 too
small.  Up to pi / 4: root mean square 0.433 of the cosine, mean 0.0104 of the sine."""
