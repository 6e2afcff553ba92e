// Elementary functions in FP32, the same instructions on every target.  Their largest errors, in
// units in the last place of the exact result, hold with and without contraction of a * b + c and
// with an exp2_approx that is 2 ulp off either way: cupykern/reference/elementary.py states them
// and tests/platform/test_math.py measures them.  NaN gives NaN; a subnormal counts as zero, or as
// itself.
// The polynomials are minimax in relative error: iterated weighted least squares (Lawson), then the
// coefficients are rounded to FP32 one after another and the remaining ones fitted again.
#pragma once

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kSmallestNormal = 0x1p-126f;

struct Max {
    DEVICE float operator()(float a, float b) const { return maximum(a, b); }
};
struct Sum {
    DEVICE float operator()(float a, float b) const { return a + b; }
};
// Merges floats by Combine, as a row statistic (rows/reduce.cuh).
template <class Combine>
struct MergeFloats {
    DEVICE float operator()(float a, float b) const { return Combine()(a, b); }
    // All-reduce over the lanes that differ in the bits [begin, end).
    DEVICE float across_lanes(float value, int begin, int end) const {
#pragma unroll
        for (int bit = begin; bit < end; bit *= 2)
            value = Combine()(value, shuffle_xor(value, bit));
        return value;
    }
};

// c[0] + c[1] x + c[2] x^2 + ...
template <int kCount>
DEVICE float polynomial(const float (&c)[kCount], float x) {
    float y = c[kCount - 1];
#pragma unroll
    for (int i = kCount - 2; i >= 0; --i) y = y * x + c[i];
    return y;
}

// |x|; and y >= 0 with the sign of x, including the sign of a zero.
DEVICE float magnitude(float x) { return bit_cast<float>(bit_cast<int>(x) & 0x7fffffff); }
DEVICE float with_sign(float y, float x) {
    return bit_cast<float>(bit_cast<int>(y) | (bit_cast<int>(x) & int(0x80000000)));
}

// Natural logarithm, within 1 ulp; -inf at a zero of either sign, NaN below.
DEVICE float log_accurate(float x) {
    // x = 2^e * (1 + f), f in [-1/3, 1/3); log(1 + f) = f - f^2 / 2 + f^3 p(f)
    constexpr float p[] = {0.333332151f, -0.249998063f, 0.200104266f, -0.166801959f,
                           0.14005734f,  -0.121874787f, 0.139845937f, -0.128801481f};
    // log 2 in two parts: e times the first is exact.
    constexpr float kHigh = 0.693359375f, kLow = -2.12194440e-4f;
    const int bits = bit_cast<int>(x);
    // Not a positive, normal, finite number.  One comparison: the usual arguments cost no more.
    if (uint32_t(bits) - 0x00800000u >= 0x7f000000u) {
        const float invalid = x < 0.0f ? kInfinity - kInfinity : x;
        return magnitude(x) < kSmallestNormal ? -kInfinity : invalid;
    }
    const int exponent_bits = (bits - 0x3f2aaaab) & int(0xff800000);
    const float f = bit_cast<float>(bits - exponent_bits) - 1.0f;
    const float e = float(exponent_bits >> 23);
    return e * kHigh + (e * kLow + ((polynomial(p, f) * f - 0.5f) * (f * f) + f));
}

// Error function, within 2 ulp; +-1 at +-inf, and a zero keeps its sign.
DEVICE float erf_accurate(float x) {
    constexpr float p[] = {0.128379166f,  -0.37612626f,    0.112835787f,   -0.0268533472f,
                           0.0051871622f, -0.00079978531f, 7.80690389e-05f};
    constexpr float q[] = {1.62805259f,    0.917310774f,  0.151650757f,
                           -0.0328913964f, 0.0045978534f, -0.000303902692f};
    // Both ranges are computed: with a branch, the operations of several elements do not overlap.
    // Near 0: t + t p(t^2), scaled so that the product is not flushed to zero where t is tiny.
    const float t = magnitude(x), scaled = t * 0x1p24f;
    const float near = (scaled + scaled * polynomial(p, t * t)) * 0x1p-24f;
    // 1 - erf(t) = 2^-(t q(t)), which rounds to 0 from 4 on.
    const float end = t > 4.0f ? 4.0f : t;
    const float far = 1.0f - exp2_approx(-(end * polynomial(q, end)));
    return with_sign(t < 1.0f ? near : far, x);
}

// x times the standard normal distribution function of x, within 3 * 2^-24 |x|; NaN at -inf, where
// FP64's x / 2 * (1 + erf(x / sqrt 2)) is NaN too.
DEVICE float gelu(float x) {
    // 2^p(t) is the distribution function at -t, t = |x|.  p is fitted up to 5.5 and falls beyond
    // it, too.
    constexpr float p[] = {-1.0f,           -1.1511052f,    -0.45920852f,
                           -0.052495245f,   0.007062108f,   -0.00013594632f,
                           -0.00018658832f, 3.9463906e-05f, -2.84219e-06f};
    const float t = magnitude(x);
    return t * (0.5f - exp2_approx(polynomial(p, t))) + 0.5f * x;
}

// gelu(2 x) for 16-bit results, within 2^-16 of the result plus 3 * 2^-24 |2 x|.  It takes two
// thirds of gelu's instructions: 2^p(t) is twice the distribution function at -2 t, so that
// 1 - 2^p(t) needs no other factor.  p is fitted up to 2.7 and falls beyond it, too.
DEVICE float gelu_of_twice(float x) {
    constexpr float p[] = {-1.97317422e-05f, -2.30141616f, -1.84183502f,
                           -0.410050631f,    0.109299138f, -0.0139591321f};
    const float t = magnitude(x);
    return t * (1.0f - exp2_approx(polynomial(p, t))) + x;
}

// x / 2 (1 + tanh(t)), t = sqrt(2 / pi) (x + 0.044715 x^3), as x times the sigmoid of 2 t; within 9
// + 5 max(-2 t, 0) ulp.
DEVICE float gelu_tanh(float x) {
    constexpr float kFirst = -2.3022082f, kThird = -0.10294324f;  // coefficients of -2 t log2 e
    return x * reciprocal_approx(1.0f + exp2_approx(x * (kThird * (x * x) + kFirst)));
}

// 1 / (1 + exp(-x)), within 7 + 1.25 max(-x, 0) ulp, because the exponent is rounded.  Results
// below 2^-126 are zero.
DEVICE float sigmoid(float x) { return reciprocal_approx(1.0f + exp2_approx(-kLog2E * x)); }
