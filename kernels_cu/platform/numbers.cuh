// The small number formats where the platform has no types of its own (host, HIP): integer code,
// because compilers differ in the small types that they have.  The results are the same everywhere,
// subnormals included.
struct half { uint16_t code; };
struct bf16 { uint16_t code; };
struct e4m3 { uint8_t code; };
struct e5m2 { uint8_t code; };

namespace numbers {
// Formats of a sign, an exponent and a mantissa.  kSpecial: the first code of infinity and NaN;
// kOverflow: what too large a magnitude becomes.
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
            // The addition rounds: a sum this large has the format's subnormal unit for its own.
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
}  // namespace numbers

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(int8_t x) { return float(x); }
DEVICE float to_float(half x) { return numbers::Half::decode(x.code); }
DEVICE float to_float(bf16 x) { return bit_cast<float>(uint32_t(x.code) << 16); }
DEVICE float to_float(e4m3 x) { return numbers::E4m3::decode(x.code); }
DEVICE float to_float(e5m2 x) { return numbers::E5m2::decode(x.code); }

// Round to nearest even.  The fp8 formats saturate, infinities too; NaN stays NaN.
// int8 saturates as well; NaN gives 0.
template <class T>
DEVICE T from_float(float x) {
    if constexpr (kSame<T, half>) {
        return {uint16_t(numbers::Half::encode(x))};
    } else if constexpr (kSame<T, bf16>) {
        return {uint16_t(numbers::encode_bf16(x))};
    } else if constexpr (kSame<T, e4m3>) {
        return {uint8_t(numbers::E4m3::encode(x))};
    } else if constexpr (kSame<T, e5m2>) {
        return {uint8_t(numbers::E5m2::encode(x))};
    } else if constexpr (kSame<T, int8_t>) {
        return round_to_int8(x);
    } else {
        return T(x);
    }
}
template <class T>
DEVICE uint32_t pack(float low, float high) {
    static_assert(sizeof(T) <= 2 && !kSame<T, int8_t>, "pack makes two numbers of 8 or 16 bits");
    return from_float<T>(low).code | uint32_t(from_float<T>(high).code) << (8 * sizeof(T));
}

// The two numbers of a pack; e4m3 and e5m2: of the lower 16 bits.
template <class T>
DEVICE void unpack(uint32_t pair, float& low, float& high) {
    if constexpr (sizeof(T) == 2) {
        low = to_float(T{uint16_t(pair)});
        high = to_float(T{uint16_t(pair >> 16)});
    } else {
        low = to_float(T{uint8_t(pair)});
        high = to_float(T{uint8_t(pair >> 8)});
    }
}

// Two 16-bit integers in each of a and b: the larger or smaller ones.
DEVICE uint32_t max_unsigned_pair(uint32_t a, uint32_t b) {
    const uint32_t low = (a & 0xffffu) > (b & 0xffffu) ? a & 0xffffu : b & 0xffffu;
    return low | (a >> 16 > b >> 16 ? a & 0xffff0000u : b & 0xffff0000u);
}
DEVICE uint32_t min_unsigned_pair(uint32_t a, uint32_t b) { return ~max_unsigned_pair(~a, ~b); }
DEVICE uint32_t max_signed_pair(uint32_t a, uint32_t b) {
    return max_unsigned_pair(a ^ 0x80008000u, b ^ 0x80008000u) ^ 0x80008000u;
}

// Four bytes out of a's (0 to 3) and b's (4 to 7), by the hexadecimal digits of `select`, the last
// one first.
DEVICE uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t select) {
    const uint64_t both = uint64_t(b) << 32 | a;
    uint32_t picked = 0;
    for (int i = 0; i < 4; ++i)
        picked |= (uint32_t(both >> 8 * (select >> 4 * i & 7)) & 0xff) << 8 * i;
    return picked;
}

// Eight e2m1 numbers, the first in the lowest bits, times an e4m3 scale: four pairs of T, which
// holds them.
template <class T>
DEVICE void decode_scaled(uint32_t codes, e4m3 scale, uint32_t (&pairs)[4]) {
    const float factor = to_float(scale);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t byte = codes >> 8 * i & 0xff;
        pairs[i] = pack<T>(decode_e2m1(byte & 0xf) * factor, decode_e2m1(byte >> 4) * factor);
    }
}
