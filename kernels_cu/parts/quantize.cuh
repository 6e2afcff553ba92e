// Narrow formats with a scale: decoded = code * scale, the scale the group's largest |value| over
// the format's largest number; 1 where that is no normal number (a group of zeros), NaN for a group
// with a NaN or an infinity.
#include "parts/dtype.cuh"
#include "parts/math.cuh"
#include "parts/vector.cuh"

// The largest |value| of a group; NaN if there is one, because its code is the largest.
struct Largest {
    uint32_t code = 0;
    DEVICE void take(float x) {
        const uint32_t magnitude = bit_cast<uint32_t>(x) & 0x7fffffffu;
        code = magnitude > code ? magnitude : code;
    }
    DEVICE float value() const { return bit_cast<float>(code); }
};
// The same of words: a 32-bit number each, or two of 16 bits.
template <class T>
struct LargestOfWords {
    static constexpr bool kPairs = sizeof(T) == 2;
    uint32_t word = 0;

    DEVICE void merge(uint32_t other) {
        word = kPairs ? max_unsigned_pair(word, other) : other > word ? other : word;
    }
    DEVICE void take(uint32_t numbers) { merge(numbers & (kPairs ? 0x7fff7fffu : 0x7fffffffu)); }
    template <int kWidth>
    DEVICE void take(const Vector<T, kWidth>& vector) {
        static_assert(sizeof(vector) % 4 == 0, "whole words");
#pragma unroll
        for (const auto& access : vector.bytes) {
#pragma unroll
            for (const uint32_t numbers : access.words) take(numbers);
        }
    }
    // Of the lanes that differ in the bits [begin, end); each of them gets it.
    DEVICE void across_lanes(int begin, int end) {
#pragma unroll
        for (int bit = begin; bit < end; bit *= 2) merge(shuffle_xor(word, bit));
    }
    DEVICE float value() const {
        if constexpr (kPairs) {
            const uint32_t low = word & 0xffffu, high = word >> 16;
            float largest, unused;
            unpack<T>(low > high ? low : high, largest, unused);
            return largest;
        } else {
            return bit_cast<float>(word);
        }
    }
};
struct Larger {
    DEVICE float operator()(float a, float b) const { return a >= b || a != a ? a : b; }
};

DEVICE float largest_number(int dtype) {
    return dtype == kE4m3 ? 448.0f : dtype == kE5m2 ? 57344.0f : 127.0f;
}

struct QuantizeScale {
    float decode, encode;

    DEVICE QuantizeScale(float largest, float largest_number) : decode(1.0f), encode(1.0f) {
        if (!(largest < kInfinity)) {
            decode = encode = kInfinity - kInfinity;
        } else if (largest / largest_number >= kSmallestNormal) {
            decode = largest / largest_number;
            encode = 1.0f / decode;
        }
    }
};
