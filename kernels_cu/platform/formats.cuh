// Small floating-point formats and their conversions in integer arithmetic, for targets without
// conversion instructions.
#pragma once
struct half { uint16_t code; };
struct bf16 { uint16_t code; };
struct e4m3 { uint8_t code; };
struct e5m2 { uint8_t code; };

namespace formats {
// A format with sign, exponent and mantissa.  kSpecial: the smallest code of infinity and NaN;
// kOverflow: the code for magnitudes that are too large.
template <int kExponent, int kMantissa, uint32_t kSpecial, uint32_t kOverflow, uint32_t kNan>
struct Format {
    static constexpr int kBias = (1 << (kExponent - 1)) - 1;
    static constexpr int kShift = 23 - kMantissa;
    static constexpr int kSign = kExponent + kMantissa;
    static constexpr uint32_t kMagnitude = (1u << kSign) - 1;
    static constexpr uint32_t kSmallestNormal = uint32_t(128 - kBias) << 23;
    static constexpr uint32_t kSubnormalUnit = uint32_t(128 - kBias - kMantissa) << 23;

    DEVICE static float decode(uint32_t code) {
        const uint32_t magnitude = code & kMagnitude;
        uint32_t bits = (magnitude << kShift) + (uint32_t(127 - kBias) << 23);
        if (magnitude < 1u << kMantissa) {
            bits = bit_cast<uint32_t>(float(int(magnitude)) * bit_cast<float>(+kSubnormalUnit));
        }
        if (magnitude >= kSpecial) bits = magnitude << kShift | 0x7f800000u;
        return bit_cast<float>(bits | code >> kSign << 31);
    }
    // Rounds to nearest even.
    DEVICE static uint32_t encode(float x) {
        const uint32_t bits = bit_cast<uint32_t>(x);
        const uint32_t magnitude = bits & 0x7fffffffu;
        const uint32_t half_unit = (1u << (kShift - 1)) - 1 + (magnitude >> kShift & 1);
        uint32_t code = ((magnitude + half_unit) >> kShift) - (uint32_t(127 - kBias) << kMantissa);
        if (magnitude < kSmallestNormal) {
            // The addition rounds: a sum of this size has the format's subnormal unit as its ulp.
            constexpr uint32_t kLarge = kSubnormalUnit + (23u << 23);
            code =
                bit_cast<uint32_t>(bit_cast<float>(magnitude) + bit_cast<float>(kLarge)) - kLarge;
        }
        if (magnitude >= kSmallestNormal && code > kOverflow) code = kOverflow;
        if (magnitude > 0x7f800000u) code = kNan;
        return code | bits >> 31 << kSign;
    }
};
using Half = Format<5, 10, 0x7c00, 0x7c00, 0x7e00>;
using E4m3 = Format<4, 3, 0x7f, 0x7e, 0x7f>;
using E5m2 = Format<5, 2, 0x7c, 0x7b, 0x7e>;

DEVICE uint32_t encode_bf16(float x) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return nan ? bits >> 31 << 15 | 0x7fc0u : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
}  // namespace formats
