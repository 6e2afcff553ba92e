// Narrow formats with a scale: decoded = code * scale, the scale the group's largest |value| over
// the format's largest number; 1 where that is no normal number (a group of zeros), NaN for a group
// with a NaN or an infinity.
#include "parts/dtype.cuh"
#include "parts/math.cuh"

// The largest |value| of a group; NaN if there is one, because its code is the largest.
struct Largest {
    uint32_t code = 0;
    DEVICE void take(float x) {
        const uint32_t magnitude = bit_cast<uint32_t>(x) & 0x7fffffffu;
        code = magnitude > code ? magnitude : code;
    }
    DEVICE float value() const { return bit_cast<float>(code); }
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
