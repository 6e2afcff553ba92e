// Matrix products of tiles: d (rows x n) += a (rows x k) b (k x n).  rows: a multiple of 4, at most
// kMostRows; n: a multiple of 8; k: at most kMostK.
#pragma once
#include <stdint.h>
#include <string.h>

#include "platform/host/formats.h"
#include "platform/host/interface.h"

namespace host {
namespace {

typedef float Floats __attribute__((vector_size(32), aligned(4), may_alias));
typedef int Ints __attribute__((vector_size(32), aligned(4), may_alias));
typedef double Doubles __attribute__((vector_size(64), may_alias));
typedef long long Longs __attribute__((vector_size(64), may_alias));

using TypePair = ElementType[2];  // of A and of B
int item_bytes(ElementType type) { return type == kHalf || type == kBf16 ? 2 : 1; }
constexpr int kMostRows = 64, kMostK = 32;

// int8: exact.
void multiply(const TypePair&, int* d, const int* a, const int* b, int rows, int n, int k) {
    for (int row = 0; row < rows; row += 4) {
        for (int col = 0; col < n; col += 8) {
            const auto sum = [&](int r) -> Ints& {
                return *reinterpret_cast<Ints*>(d + (row + r) * n + col);
            };
            Ints s0 = sum(0), s1 = sum(1), s2 = sum(2), s3 = sum(3);
            const int* of_a = a + row * k;
            for (int i = 0; i < k; ++i, ++of_a) {
                const Ints of_b = *reinterpret_cast<const Ints*>(b + i * n + col);
                s0 += of_a[0] * of_b;
                s1 += of_a[k] * of_b;
                s2 += of_a[2 * k] * of_b;
                s3 += of_a[3 * k] * of_b;
            }
            sum(0) = s0, sum(1) = s1, sum(2) = s2, sum(3) = s3;
        }
    }
}

// --- floating-point numbers ------------------------------------------------------------------
constexpr int kExponentBias = 127;

// Biased exponents of floats that hold values of `type`; subnormals get the type's smallest one.
// With a zero, infinite or NaN factor, a product's exponent is out of FP32's range.
Ints exponents_of(ElementType type, const float* x) {
    const int least = type == kHalf || type == kE5m2 ? -14 : type == kE4m3 ? -6 : -126;
    const Ints e = *reinterpret_cast<const Ints*>(x) >> 23 & 0xff;
    const Ints lifted = e < least + kExponentBias ? e - e + (least + kExponentBias) : e;
    return e == 0 ? e - 2048 : e == 0xff ? e + 4096 : lifted;
}

bool all_of(const Ints& lanes) {
    int all = -1;
    for (int i = 0; i < 8; ++i) all &= lanes[i];
    return all;
}

// Eight columns of B.
struct Columns {
    Floats values[kMostK];
    Ints exponents[kMostK];

    Columns(ElementType type, const float* b, int n, int k) {
        for (int i = 0; i < k; ++i, b += n) {
            values[i] = *reinterpret_cast<const Floats*>(b);
            exponents[i] = exponents_of(type, b);
        }
    }
};

// `sum` plus a row of A times eight columns of B, added like Hopper's tensor cores (arXiv
// 2511.10909; bit for bit equal to tests/support/golden/hopper.npz).  A product's exponent is the
// sum of its factors' exponents; e is the largest exponent of the addends.  All addends are
// truncated to multiples of 2^(e - kBits) and added exactly; the result is truncated to kFraction
// fractional bits.
template <int kBits, int kFraction>
Floats add_truncated(Floats sum, const float* a, const int* exponents, const Columns& b, int k) {
    Ints largest = (Ints)sum >> 23 & 0xff;
    for (int i = 0; i < k; ++i) {
        const Ints e = b.exponents[i] + (exponents[i] - kExponentBias);
        largest = e > largest ? e : largest;
    }
    // Otherwise all addends are zero, one is infinite or NaN, or FP32 cannot hold scale and unit.
    const Ints usual = (largest > kBits) & (largest < 2 * kExponentBias - 1);
    Floats plain = sum;
    if (!all_of(usual)) {
        for (int i = 0; i < k; ++i) plain += a[i] * b.values[i];
    }
    const Floats scale = (Floats)((2 * kExponentBias + kBits - largest) << 23);
    const Floats unit = (Floats)((largest - kBits) << 23);
    // Two accumulators: one int32 would overflow with 17 addends below 2^27.
    Ints even = __builtin_convertvector(sum * scale, Ints), odd = {};
    for (int i = 0; i < k; i += 2) {
        even += __builtin_convertvector(a[i] * b.values[i] * scale, Ints);
        odd += __builtin_convertvector(a[i + 1] * b.values[i + 1] * scale, Ints);
    }
    Doubles total = __builtin_convertvector(even, Doubles) + __builtin_convertvector(odd, Doubles);
    total = (Doubles)((Longs)total & ~((1ll << (52 - kFraction)) - 1));
    return usual ? __builtin_convertvector(total, Floats) * unit : plain;
}

template <int kBits, int kFraction>
void multiply_truncated(const TypePair& types, float* d, const float* a, const float* b, int rows,
                        int n, int k) {
    static thread_local int exponents[kMostRows * kMostK];  // too large for a fiber's stack
    for (int i = 0; i < rows * k; i += 8)
        *reinterpret_cast<Ints*>(exponents + i) = exponents_of(types[0], a + i);
    for (int col = 0; col < n; col += 8) {
        const Columns columns(types[1], b + col, n, k);
        for (int row = 0; row < rows; ++row) {
            Floats& sum = *reinterpret_cast<Floats*>(d + row * n + col);
            sum =
                add_truncated<kBits, kFraction>(sum, a + row * k, exponents + row * k, columns, k);
        }
    }
}

void multiply(const TypePair& types, float* d, const float* a, const float* b, int rows, int n,
              int k) {
    const bool fp8 = types[0] == kE4m3 || types[0] == kE5m2;
    if (fp8) multiply_truncated<13, 13>(types, d, a, b, rows, n, k);
    else multiply_truncated<25, 23>(types, d, a, b, rows, n, k);
}

}  // namespace
}  // namespace host
