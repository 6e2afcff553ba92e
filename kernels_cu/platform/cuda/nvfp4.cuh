// NVFP4 on CUDA.  An element's sign, exponent and mantissa, moved to FP16's fields, give 2^-14
// times the element; in BF16's fields, 2^-126 times.  This takes fewer instructions than a table or
// a conversion.  With BF16 the scale is multiplied by 2^119, the largest power of two with which no
// scale overflows.
#pragma once
template <class T> constexpr float kScaledUnit = kSame<T, half> ? 0x1p-14f : 0x1p-7f;

namespace cuda {
// Splits eight elements into the bytes' lower and upper halves, as upper bytes of FP16.
DEVICE void spread_codes(uint32_t codes, uint32_t& lower, uint32_t& upper) {
    lower = (codes << 4 & 0x80808080u) | (codes << 1 & 0x0e0e0e0eu);
    upper = (codes & 0x80808080u) | (codes >> 3 & 0x0e0e0e0eu);
}
// Repeats each half: the multiplication then selects its half without an instruction.
DEVICE void repeat_halves(uint32_t halves, uint32_t& low, uint32_t& high) {
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; mov.b32 %0, {l, l}; mov.b32 %1, {h, h}; }"
        : "=r"(low), "=r"(high)
        : "r"(halves));
}
DEVICE uint32_t multiply_bf16s(uint32_t a, uint32_t b) {
    uint32_t y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(0x80008000u));
    return y;
}
// Moves the elements' bits to T's fields, as pairs of adjacent elements.
template <class T>
DEVICE void spread_pairs(uint32_t codes, uint32_t (&pairs)[4]) {
    if constexpr (kSame<T, half>) {
        uint32_t lower, upper;
        spread_codes(codes, lower, upper);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            // From the lowest byte: lower elements of the second and first byte, then the upper.
            const uint32_t two = __byte_perm(lower, upper, i == 0 ? 0x4501 : 0x6723);
            pairs[2 * i] = two & 0xff00ff00u;
            pairs[2 * i + 1] = __byte_perm(two, 0, 0x2404);
        }
    } else {
        const uint32_t lower = codes << 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // byte i's elements, each in the upper bits of 16
            const uint32_t pair = __byte_perm(lower, codes, 0x4400 + 0x1111 * i);
            pairs[i] = (pair & 0x80008000u) | (pair >> 6 & 0x01c001c0u);
        }
    }
}
// spread_pairs of byte `byte` of each word.
template <class T>
DEVICE void spread_bytes(const uint32_t (&words)[4], int byte, uint32_t (&pairs)[4]) {
    if constexpr (kSame<T, half>) {
        const uint32_t select = 0x40 + 0x11 * byte;
        spread_pairs<T>(__byte_perm(__byte_perm(words[0], words[1], select),
                                    __byte_perm(words[2], words[3], select), 0x5410),
                        pairs);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // Multiplying by a sum of two powers of two shifts a field of both elements, on another
            // pipe than shifts and logic.
            const uint32_t two = __byte_perm(words[i], 0, 0x4440 + byte);
            const uint32_t signs = two * (1u << 12 | 1u << 24) & 0x80008000u;
            pairs[i] = signs | (two * (1u << 6 | 1u << 18) & 0x01c001c0u);
        }
    }
}
// Factors for spread_pairs' results: the two scales in the lower 16 bits of `scales`, as T.  With
// kUnits, products come out times kScaledUnit<T>.
template <class T, bool kUnits>
DEVICE uint32_t scale_factors(uint32_t scales) {
    const uint32_t halves = halves_of<e4m3>(scales);
    constexpr float kFactor = kUnits ? 0x1p119f : 1.0f;
    if constexpr (kSame<T, half>) return halves;
    else return pack<T>(low_float(halves) * kFactor, high_float(halves) * kFactor);
}
template <class T, bool kUnits>
DEVICE uint32_t scaled_pair(uint32_t pair, uint32_t factor) {
    if constexpr (kSame<T, half>) {
        if constexpr (!kUnits) pair = multiply_halves(pair, 0x74007400u);  // 2^14
        return multiply_halves(pair, factor);
    } else {
        if constexpr (!kUnits) pair = multiply_bf16s(pair, 0x7e807e80u);  // 2^126
        return multiply_bf16s(pair, factor);
    }
}

// Decodes eight elements times a scale and kScaledUnit<T>, in kEights' pairs of elements 16 bits
// apart.
template <class T>
DEVICE void decode_apart(uint32_t codes, e4m3 scale, uint32_t (&pairs)[4]) {
    uint32_t factor, none;
    repeat_halves(scale_factors<T, true>(scale.code), factor, none);
    if constexpr (kSame<T, half>) {
        uint32_t even, odd;
        spread_codes(codes, even, odd);
        pairs[0] = __byte_perm(even, 0, 0x2404);
        pairs[1] = even & 0xff00ff00u;
        pairs[2] = __byte_perm(odd, 0, 0x2404);
        pairs[3] = odd & 0xff00ff00u;
    } else {
        constexpr uint32_t kSigns = 0x80008000u, kMagnitudes = 0x01c001c0u;
        pairs[0] = (codes << 12 & kSigns) | (codes << 6 & kMagnitudes);
        pairs[1] = (codes << 4 & kSigns) | (codes >> 2 & kMagnitudes);
        pairs[2] = (codes << 8 & kSigns) | (codes << 2 & kMagnitudes);
        pairs[3] = (codes & kSigns) | (codes >> 6 & kMagnitudes);
    }
#pragma unroll
    for (uint32_t& pair : pairs) pair = scaled_pair<T, true>(pair, factor);
}
}  // namespace cuda

template <class T>
DEVICE void decode_scaled(uint32_t codes, e4m3 scale, uint32_t (&pairs)[4]) {
    uint32_t factor, none;
    cuda::repeat_halves(cuda::scale_factors<T, false>(scale.code), factor, none);
    cuda::spread_pairs<T>(codes, pairs);
#pragma unroll
    for (uint32_t& pair : pairs) pair = cuda::scaled_pair<T, false>(pair, factor);
}

template <class T, bool kUnits>
DEVICE uint32_t scale_factors(uint32_t scales) {
    return cuda::scale_factors<T, kUnits>(scales);
}

template <class T, bool kUnits>
DEVICE void decode_bytes(const uint32_t (&words)[4], int byte, uint32_t scale_factors,
                         uint32_t (&pairs)[4]) {
    uint32_t factors[2];
    cuda::repeat_halves(scale_factors, factors[0], factors[1]);
    cuda::spread_bytes<T>(words, byte, pairs);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        pairs[i] = cuda::scaled_pair<T, kUnits>(pairs[i], factors[i / 2]);
    }
}

template <class T, Side kSide, class Tile>
DEVICE void load_scaled(Fragment<T, kSide>& low, Fragment<T, kSide>& high, const Tile& tile,
                        int first, int k) {
    const int row = first + lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        // A lane's elements in 64 of k share one scale: the next step loads it again.
        const char* chunk = static_cast<const char*>(tile.codes(row + 8 * i, k / 64 * 2 + t / 2));
        const auto two = *reinterpret_cast<const Bytes<8>*>(chunk + t % 2 * 8);
        uint32_t pairs[4];
        // A select, not an index: k may be a runtime value.
        const uint32_t codes = k / 32 % 2 == 0 ? two.words[0] : two.words[1];
        cuda::decode_apart<T>(codes, tile.scale(row + 8 * i, k / 64 * 4 + t), pairs);
        low.words[low.word(i, 0)] = pairs[0];
        low.words[low.word(i, 1)] = pairs[1];
        high.words[high.word(i, 0)] = pairs[2];
        high.words[high.word(i, 1)] = pairs[3];
    }
}
