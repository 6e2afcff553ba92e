// Shared by the three platform headers: sized integers, vector accesses, bit casts, int8 and e2m1.
#pragma once
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using int8_t = signed char;
using int32_t = int;

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);
constexpr float kLargestFloat = __builtin_bit_cast(float, 0x7f7fffffu);

template <class To, class From>
DEVICE To bit_cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}

// N bytes that one access moves: 1, 2, 4, 8 or 16.
template <int N> struct Bytes;
template <> struct alignas(1) Bytes<1> { uint8_t words[1]; };
template <> struct alignas(2) Bytes<2> { uint16_t words[1]; };
template <> struct alignas(4) Bytes<4> { uint32_t words[1]; };
template <> struct alignas(8) Bytes<8> { uint32_t words[2]; };
template <> struct alignas(16) Bytes<16> { uint32_t words[4]; };

// Rounds to nearest even and saturates; NaN gives 0.
DEVICE int8_t round_to_int8(float x) {
    if (!(x == x)) return 0;
    const float y = x < -128.0f ? -128.0f : x > 127.0f ? 127.0f : x;
    // The addition rounds: a sum of this size has an ulp of 1.
    return int8_t(bit_cast<int>(y + 12582912.0f));
}

template <bool kFirst, class T, class U> struct Choose { using Type = T; };
template <class T, class U> struct Choose<false, T, U> { using Type = U; };

// Two e2m1 elements, the first in the lower four bits.
struct e2m1x2 { uint8_t codes; };
// Returns +-0, 0.5, 1, 1.5, 2, 3, 4 or 6.
DEVICE float decode_e2m1(uint32_t code) {
    const uint32_t exponent = code >> 1 & 3, mantissa = code & 1;
    const uint32_t normal = (126 + exponent) << 23 | mantissa << 22;
    const uint32_t magnitude = exponent != 0 ? normal : mantissa * 0x3f000000u;
    return bit_cast<float>(magnitude | code >> 3 << 31);
}
// Rounds to nearest even and saturates; NaN gives +-0.
DEVICE uint32_t encode_e2m1(float x) {
    const float size = x < 0.0f ? -x : x;
    const uint32_t code = uint32_t(size > 0.25f) + uint32_t(size >= 0.75f) +
                          uint32_t(size > 1.25f) + uint32_t(size >= 1.75f) + uint32_t(size > 2.5f) +
                          uint32_t(size >= 3.5f) + uint32_t(size > 5.0f);
    return code | bit_cast<uint32_t>(x) >> 31 << 3;
}

template <class T> constexpr bool kAlwaysFalse = false;
template <class A, class B> constexpr bool kSame = false;
template <class A> constexpr bool kSame<A, A> = true;
