// Small floating-point formats on CUDA, converted by instructions.  NVIDIA's headers are not used:
// NVRTC takes as long for them as for a small kernel.
#pragma once
#include "platform/formats.cuh"

namespace cuda {
// Pairs of FP16 or BF16.
#define BINARY_PAIR(word, instruction)                              \
    DEVICE uint32_t word(uint32_t a, uint32_t b) {                  \
        uint32_t y;                                                 \
        asm(instruction " %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b)); \
        return y;                                                   \
    }
BINARY_PAIR(maximum_halves, "max.f16x2")
BINARY_PAIR(maximum_bf16s, "max.bf16x2")
BINARY_PAIR(multiply_halves, "mul.f16x2")
BINARY_PAIR(subtract_halves, "sub.f16x2")
#if __CUDA_ARCH__ >= 900
BINARY_PAIR(subtract_bf16s, "sub.bf16x2")
#else
DEVICE uint32_t subtract_bf16s(uint32_t a, uint32_t b) {
    uint32_t y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(b), "r"(0xbf80bf80u), "r"(a));
    return y;
}
#endif
#undef BINARY_PAIR

DEVICE float low_float(uint32_t halves) {
    float y;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }"
        : "=f"(y)
        : "r"(halves));
    return y;
}
DEVICE float high_float(uint32_t halves) {
    float y;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high; }"
        : "=f"(y)
        : "r"(halves));
    return y;
}

// Converts two FP8 elements in the lower 16 bits to FP16, exactly.
template <class T>
DEVICE uint32_t halves_of(uint32_t bytes) {
    uint32_t halves;
#if __CUDA_ARCH__ >= 890
    if constexpr (kSame<T, e4m3>) {
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(bytes)));
    } else {
        asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(bytes)));
    }
#else
    halves = __byte_perm(bytes, 0, 0x1404);  // e5m2: the upper half of an FP16 code
    if constexpr (kSame<T, e4m3>) {
        // In FP16's fields the magnitudes are 2^8 too small; NaN has one code.
        const uint32_t magnitudes = (halves & 0x7f007f00u) >> 1;
        const uint32_t nans = __vcmpeq2(magnitudes, 0x3f803f80u) & 0x7fff7fffu;
        halves = (halves & 0x80008000u) | multiply_halves(magnitudes, 0x5c005c00u) | nans;
    }
#endif
    return halves;
}
}  // namespace cuda

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(int8_t x) { return float(x); }
DEVICE float to_float(half x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.code));
    return y;
}
DEVICE float to_float(bf16 x) {
    float y;
#if __CUDA_ARCH__ >= 900
    asm("cvt.f32.bf16 %0, %1;" : "=f"(y) : "h"(x.code));
#else
    asm("mov.b32 %0, {0, %1};" : "=f"(y) : "h"(x.code));
#endif
    return y;
}
DEVICE float to_float(e4m3 x) { return cuda::low_float(cuda::halves_of<e4m3>(x.code)); }
DEVICE float to_float(e5m2 x) { return cuda::low_float(cuda::halves_of<e5m2>(x.code)); }

// Packs two elements into one register, `low` in the lower half; e4m3 and e5m2 take the lower 16
// bits.
template <class T>
DEVICE uint32_t pack(float low, float high) {
    static_assert(sizeof(T) <= 2 && !kSame<T, int8_t>, "pack makes two numbers of 8 or 16 bits");
    uint32_t pair;
    if constexpr (kSame<T, half>) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    } else if constexpr (kSame<T, bf16>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    } else {
        constexpr bool kE4m3 = kSame<T, e4m3>;
#if __CUDA_ARCH__ >= 890
        uint16_t bytes;
        if constexpr (kE4m3) {
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(high), "f"(low));
        } else {
            asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(high), "f"(low));
        }
        pair = bytes;
#else
        using Format = typename Choose<kE4m3, formats::E4m3, formats::E5m2>::Type;
        pair = Format::encode(low) | Format::encode(high) << 8;
#endif
    }
    return pair;
}

// Rounds to nearest even.  FP8 formats saturate, infinities too, and NaN stays NaN.  int8 saturates
// as well, and NaN gives 0.
template <class T>
DEVICE T from_float(float x) {
    if constexpr (kSame<T, half>) {
        half y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.code) : "f"(x));
        return y;
    } else if constexpr (kSame<T, bf16>) {
        bf16 y;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.code) : "f"(x));
        return y;
    } else if constexpr (kSame<T, e4m3> || kSame<T, e5m2>) {
        return {uint8_t(pack<T>(x, 0.0f))};
    } else if constexpr (kSame<T, int8_t>) {
        int y;
        asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(y) : "f"(x));
        return int8_t(y);
    } else {
        return T(x);
    }
}

// Unpacks the two elements of a pack; e4m3 and e5m2 are in the lower 16 bits.
template <class T>
DEVICE void unpack(uint32_t pair, float& low, float& high) {
    if constexpr (kSame<T, bf16>) {
        low = bit_cast<float>(pair << 16);
        high = bit_cast<float>(pair & 0xffff0000u);
    } else {
        uint32_t halves = pair;
        if constexpr (!kSame<T, half>) halves = cuda::halves_of<T>(pair);
        low = cuda::low_float(halves);
        high = cuda::high_float(halves);
    }
}

// Element-wise maximum of two pairs of 16-bit elements (see pack and maximum).
template <class T>
DEVICE uint32_t maximum_pair(uint32_t a, uint32_t b) {
    return kSame<T, half> ? cuda::maximum_halves(a, b) : cuda::maximum_bf16s(a, b);
}
