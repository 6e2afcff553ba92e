// Functions for users' formulas (cupykern/expression) besides common/math.cuh.
// cupykern/reference/elementary.py states their errors; tests/platform/test_expression_math.py
// measures them.
#pragma once
#include "common/math.cuh"

// e^x, with a relative error of at most (4 + 1.25 |x|) 2^-24, because the exponent is rounded.
DEVICE float exp_of(float x) { return exp2_approx(kLog2E * x); }

// Square root, within 1 ulp; NaN below 0; a subnormal number, which counts as zero, is returned.
DEVICE float square_root(float x) {
    if (magnitude(x) < kSmallestNormal || x == kInfinity) return x;
    const bool tiny = x < 0x1p-90f;  // the residual must not be flushed to zero
    const float scaled = tiny ? x * 0x1p48f : x, r = reciprocal_square_root(scaled), y = scaled * r;
    const float root = multiply_add(0.5f * r, multiply_add(-y, y, scaled), y);
    return tiny ? root * 0x1p-24f : root;
}

// Hyperbolic tangent, within 4 ulp.
DEVICE float tanh_accurate(float x) {
    constexpr float p[] = {-0.3333332f, 0.13332638f, -0.053857073f, 0.021089362f, -0.006297238f};
    // Both ranges are computed: with a branch, the operations of several elements do not overlap.
    // Near 0: x + x p(x^2), scaled so that the product is not flushed to zero where x is tiny.
    const float t = magnitude(x), scaled = x * 0x1p24f, z = x * x;
    const float near = (scaled + scaled * (polynomial(p, z) * z)) * 0x1p-24f;
    const float power = exp2_approx(2.0f * kLog2E * t);
    const float far = with_sign(1.0f - 2.0f * reciprocal_approx(1.0f + power), x);
    return t < 0.55f ? near : far;
}

// x = k pi / 2 + r, |r| <= pi / 4, for |x| up to 2^16.  pi / 2 has three parts; the difference with
// the first one is exact.  The polynomials are Cephes' (sinf.c, S. Moshier).
struct Quadrant {
    uint32_t k;  // only the last two bits are those of k
    float r;

    DEVICE static Quadrant of(float x) {
        constexpr float kToInteger = 12582912.0f;  // a sum of this size has an ulp of 1
        const float shifted = multiply_add(x, 0.636619772f, kToInteger);
        const float k = shifted - kToInteger;
        float r = multiply_add(k, -0x1.921fb6p+0f, x);
        r = multiply_add(k, 0x1.777a5cp-25f, r);
        r = multiply_add(k, 0x1.ee59dap-50f, r);
        return {bit_cast<uint32_t>(shifted), r};
    }
    DEVICE float sine() const {
        constexpr float p[] = {-1.6666654611e-1f, 8.3321608736e-3f, -1.9515295891e-4f};
        const float z = r * r;
        return polynomial(p, z) * z * r + r;
    }
    DEVICE float cosine() const {
        constexpr float p[] = {4.166664568298827e-2f, -1.388731625493765e-3f,
                               2.443315711809948e-5f};
        const float z = r * r;
        return polynomial(p, z) * (z * z) + (1.0f - 0.5f * z);
    }
};
DEVICE float sine(float x) {
    const Quadrant q = Quadrant::of(x);
    const float s = q.sine(), c = q.cosine(), y = q.k & 1 ? c : s;
    return q.k & 2 ? -y : y;
}
DEVICE float cosine(float x) {
    const Quadrant q = Quadrant::of(x);
    const float s = q.sine(), c = q.cosine(), y = q.k & 1 ? s : c;
    return (q.k + 1) & 2 ? -y : y;
}

// The largest integer that is at most x.
DEVICE float whole_below(float x) {
    if (!(magnitude(x) < 8388608.0f)) return x;  // an integer, or NaN
    const float whole = float(int(x));
    return whole > x ? whole - 1.0f : whole;
}

// NaN if either argument is NaN.
template <class T> DEVICE T larger_of(T a, T b) { return a > b || a != a ? a : b; }
template <class T> DEVICE T smaller_of(T a, T b) { return a < b || a != a ? a : b; }

// Integers wrap.
DEVICE int64_t wrap(uint64_t x) { return int64_t(x); }
// Python's // and %, for a divisor other than 0.
DEVICE int64_t floor_divide(int64_t a, int64_t b) {
    if (b == -1) return wrap(-uint64_t(a));
    const int64_t quotient = a / b;
    return quotient - (a % b != 0 && (a < 0) != (b < 0));
}
DEVICE int64_t floor_modulo(int64_t a, int64_t b) {
    if (b == -1) return 0;
    const int64_t rest = a % b;
    return rest != 0 && (a < 0) != (b < 0) ? rest + b : rest;
}
