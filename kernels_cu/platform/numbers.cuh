// Conversions of small floating-point formats for targets without instructions for them (host,
// HIP).  They use integer arithmetic, because compilers' own types differ: the results are the same
// everywhere, subnormals included.
#pragma once
#include "platform/formats.cuh"

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(int8_t x) { return float(x); }
DEVICE float to_float(half x) { return formats::Half::decode(x.code); }
DEVICE float to_float(bf16 x) { return bit_cast<float>(uint32_t(x.code) << 16); }
DEVICE float to_float(e4m3 x) { return formats::E4m3::decode(x.code); }
DEVICE float to_float(e5m2 x) { return formats::E5m2::decode(x.code); }

// Rounds to nearest even.  FP8 formats saturate, infinities too, and NaN stays NaN.  int8 saturates
// as well, and NaN gives 0.
template <class T>
DEVICE T from_float(float x) {
    if constexpr (kSame<T, half>) {
        return {uint16_t(formats::Half::encode(x))};
    } else if constexpr (kSame<T, bf16>) {
        return {uint16_t(formats::encode_bf16(x))};
    } else if constexpr (kSame<T, e4m3>) {
        return {uint8_t(formats::E4m3::encode(x))};
    } else if constexpr (kSame<T, e5m2>) {
        return {uint8_t(formats::E5m2::encode(x))};
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

// Unpacks the two elements of a pack; e4m3 and e5m2 are in the lower 16 bits.
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

// Element-wise maximum or minimum of two 16-bit integers in each of a and b.
DEVICE uint32_t max_unsigned_pair(uint32_t a, uint32_t b) {
    const uint32_t low = (a & 0xffffu) > (b & 0xffffu) ? a & 0xffffu : b & 0xffffu;
    return low | (a >> 16 > b >> 16 ? a & 0xffff0000u : b & 0xffff0000u);
}
DEVICE uint32_t min_unsigned_pair(uint32_t a, uint32_t b) { return ~max_unsigned_pair(~a, ~b); }
DEVICE uint32_t max_signed_pair(uint32_t a, uint32_t b) {
    return max_unsigned_pair(a ^ 0x80008000u, b ^ 0x80008000u) ^ 0x80008000u;
}

// Picks bytes of a (0 to 3) and b (4 to 7).  Each hexadecimal digit of `select` is a byte's index;
// the last digit gives the result's lowest byte.
DEVICE uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t select) {
    const uint64_t both = uint64_t(b) << 32 | a;
    uint32_t picked = 0;
    for (int i = 0; i < 4; ++i)
        picked |= (uint32_t(both >> 8 * (select >> 4 * i & 7)) & 0xff) << 8 * i;
    return picked;
}
