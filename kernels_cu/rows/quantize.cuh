// Narrow formats with a scale: decoded = code * scale.  The scale is the group's largest |value|
// over the format's largest value; 1 if that is not a normal number (a group of zeros), NaN for a
// group with a NaN or an infinity.
#pragma once
#include "common/dtype.cuh"
#include "common/math.cuh"
#include "common/vector.cuh"
#include "platform/maximum_or_nan.cuh"

namespace rows {

// The largest |value| of a group; NaN if the group has one, because NaN's code is the largest.
struct Largest {
    uint32_t code = 0;
    DEVICE void take(float x) {
        const uint32_t magnitude = bit_cast<uint32_t>(x) & 0x7fffffffu;
        code = magnitude > code ? magnitude : code;
    }
    DEVICE float value() const { return bit_cast<float>(code); }
};
// Largest, 32 bits at a time: one FP32 element or a pair of 16-bit elements.
template <class T>
struct LargestPacked {
    static constexpr bool kPairs = sizeof(T) == 2;
    uint32_t packed = 0;

    DEVICE void merge(uint32_t other) {
        packed = kPairs ? max_unsigned_pair(packed, other) : other > packed ? other : packed;
    }
    DEVICE void take(uint32_t elements) { merge(elements & (kPairs ? 0x7fff7fffu : 0x7fffffffu)); }
    template <int kWidth>
    DEVICE void take(const Vector<T, kWidth>& vector) {
        static_assert(sizeof(vector) % 4 == 0, "a multiple of 32 bits");
#pragma unroll
        for (const auto& access : vector.bytes) {
#pragma unroll
            for (const uint32_t elements : access.words) take(elements);
        }
    }
    // All-reduce over the lanes that differ in the bits [begin, end).
    DEVICE void across_lanes(int begin, int end) {
#pragma unroll
        for (int bit = begin; bit < end; bit *= 2) merge(shuffle_xor(packed, bit));
    }
    DEVICE float value() const {
        if constexpr (kPairs) {
            const uint32_t low = packed & 0xffffu, high = packed >> 16;
            float largest, unused;
            unpack<T>(low > high ? low : high, largest, unused);
            return largest;
        } else {
            return bit_cast<float>(packed);
        }
    }
};
struct Larger {
    DEVICE float operator()(float a, float b) const { return maximum_or_nan(a, b); }
};

DEVICE float largest_finite(int dtype) {
    return dtype == kE4m3 ? 448.0f : dtype == kE5m2 ? 57344.0f : 127.0f;
}

struct QuantizeScale {
    float decode, encode;

    DEVICE QuantizeScale(float largest, float largest_finite) : decode(1.0f), encode(1.0f) {
        if (!(largest < kInfinity)) {
            decode = encode = kInfinity - kInfinity;
        } else if (largest / largest_finite >= kSmallestNormal) {
            decode = largest / largest_finite;
            encode = 1.0f / decode;
        }
    }
};

}  // namespace rows
