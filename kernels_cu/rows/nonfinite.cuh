// Statistics for nonfinite_report: counts, extremes and sums of a thread, a warp and a block.
#pragma once
#include "common/vector.cuh"

constexpr uint64_t kNowhere = 0x7fffffffffffffffull;

// The array's dims in traversal order, innermost first.  The element with digits d is at offset
// start + sum(d * strides) from x's first, and has C-order index first + sum(d * weights).
struct NonfiniteParams {
    int64_t num_elements, start, first, num_dims;
    int64_t sizes[kMaxDims], strides[kMaxDims], weights[kMaxDims];

    DEVICE int64_t locate(int64_t element, const int64_t (&steps)[kMaxDims]) const {
        int64_t index = 0;
        uint64_t rest = uint64_t(element);
#pragma unroll 1
        for (int d = 0; d + 1 < int(num_dims); ++d) {
            const uint64_t size = uint64_t(sizes[d]);
            // A 64-bit division costs about a hundred instructions, a 32-bit one twenty.
            const uint64_t next =
                (rest | size) >> 32 ? rest / size : uint32_t(rest) / uint32_t(size);
            index += int64_t(rest - next * size) * steps[d];
            rest = next;
        }
        return index + int64_t(rest) * steps[num_dims - 1];
    }
};

// --- codes -----------------------------------------------------------------------------------
// A 32-bit word holds one code in its upper bits, or one in the upper bits of each half; the bits
// below an 8-bit code are undefined.  Codes are sign and magnitude.
constexpr int kBits = 8 * int(sizeof(Element));
constexpr bool kPairs = kBits < 32;

template <int kBytes> struct CodeOf;
template <> struct CodeOf<1> { using Type = uint8_t; };
template <> struct CodeOf<2> { using Type = uint16_t; };
template <> struct CodeOf<4> { using Type = uint32_t; };
using Code = CodeOf<sizeof(Element)>::Type;

// The smallest non-finite magnitude, and infinity's magnitude.  e4m3 has no infinity: 0xff is above
// all of its magnitudes.
constexpr uint32_t kSpecial = kSame<Element, float>  ? 0x7f800000u
                              : kSame<Element, bf16> ? 0x7f80u
                              : kSame<Element, half> ? 0x7c00u
                              : kSame<Element, e5m2> ? 0x7cu
                                                     : 0x7fu;
constexpr uint32_t kInfinite = kSame<Element, e4m3> ? 0xffu : kSpecial;

// Exact, also for FP32 subnormals, which arithmetic would flush.
DEVICE double to_double(Code code) {
    uint32_t bits = code;
    if constexpr (kSame<Element, bf16>) {
        bits <<= 16;
    } else if constexpr (!kSame<Element, float>) {
        bits = bit_cast<uint32_t>(to_float(bit_cast<Element>(code)));
    }
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude >= 0x00800000u) return double(bit_cast<float>(bits));
    constexpr double kUnit = __builtin_bit_cast(double, 0x36a0000000000000ull);  // 2^-149
    const double value = double(int(magnitude)) * kUnit;
    return bits >> 31 ? -value : value;
}

// Minimum and maximum of codes by three integer extremes.  As unsigned integers, negative codes are
// above all others and grow with their magnitude; as signed integers, they are below all others.
// So the minimum is the largest unsigned code if that is negative, otherwise the smallest unsigned
// code; the maximum is the largest signed code if that is nonnegative, otherwise the smallest
// unsigned code.
struct Extremes {
    uint32_t most, least, most_signed;

    DEVICE static Extremes none() { return {0u, 0xffffffffu, kPairs ? 0x80008000u : 0x80000000u}; }
    DEVICE void take(uint32_t word) { merge({word, word, word}); }
    DEVICE void take_code(Code code) {
        const uint32_t top = uint32_t(code) << (32 - kBits);
        take(kPairs ? top | top >> 16 : top);
    }
    DEVICE void merge(const Extremes& other) {
        if constexpr (kPairs) {
            most = max_unsigned_pair(most, other.most);
            least = min_unsigned_pair(least, other.least);
            most_signed = max_signed_pair(most_signed, other.most_signed);
        } else {
            most = other.most > most ? other.most : most;
            least = other.least < least ? other.least : least;
            most_signed =
                int(other.most_signed) > int(most_signed) ? other.most_signed : most_signed;
        }
    }
    // Both halves become the extreme of the two.
    DEVICE void merge_pairs() {
        if constexpr (kPairs) {
            merge({most << 16 | most >> 16, least << 16 | least >> 16,
                   most_signed << 16 | most_signed >> 16});
        }
    }
    DEVICE bool any() const { return least != none().least || most != none().most; }
    DEVICE Code smallest() const { return Code((most >> 31 ? most : least) >> (32 - kBits)); }
    DEVICE Code largest() const {
        return Code((most_signed >> 31 ? least : most_signed) >> (32 - kBits));
    }
};

// An order-preserving unsigned key of a code; never 0 or 1 for a finite one.
DEVICE uint32_t key_of(Code code) {
    const uint32_t top = uint32_t(code) << (32 - kBits);
    return top >> 31 ? ~top : top | 0x80000000u;
}
DEVICE double value_of(uint32_t key) {
    return to_double(Code((key >> 31 ? key ^ 0x80000000u : ~key) >> (32 - kBits)));
}

// Partial result of finite elements: sum, key of the maximum, complement of the minimum's key;
// kNone without elements.
struct Finite {
    static constexpr uint32_t kNone = 1;
    double sum;
    uint32_t largest, smallest;

    DEVICE static Finite none() { return {0.0, kNone, kNone}; }
    DEVICE void merge(const Finite& other) {
        sum += other.sum;
        largest = other.largest > largest ? other.largest : largest;
        smallest = other.smallest > smallest ? other.smallest : smallest;
    }
    // All-reduce over the warp.
    DEVICE void merge_lanes() {
        sum = sum_of_warp(sum);
        largest = maximum_of_warp(largest);
        smallest = maximum_of_warp(smallest);
    }
};

// Words of a block, and of all blocks: counts per non-finite kind, and the index of the first.
enum { kNan, kPositive, kNegative, kKinds, kFirst = kKinds, kSpecialWords };
// A block's words: the above, then the complement of the sum, which is not NaN, and two keys.
enum { kSum = kSpecialWords, kKeys, kNumWords };

// --- vectors ---------------------------------------------------------------------------------
using Items = Vector<Element, kVectorWidth>;

// Sum of kCount values, pairwise: log2(kCount) roundings per term.
template <int kCount>
DEVICE float sum_pairwise(const float* values) {
    if constexpr (kCount == 1) {
        return values[0];
    } else {
        return sum_pairwise<kCount / 2>(values) + sum_pairwise<kCount / 2>(values + kCount / 2);
    }
}

DEVICE float sum_of(const Items& items) {
    float values[kVectorWidth];
    if constexpr (kPairs && kVectorWidth > 1) {
        constexpr int kWords = 4;
        uint32_t words[kWords];
        memcpy(words, items.bytes, sizeof(words));
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            float* to = values + i * (32 / kBits);
            unpack<Element>(words[i], to[0], to[1]);
            if constexpr (kBits == 8) unpack<Element>(words[i] >> 16, to[2], to[3]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kVectorWidth; ++i) values[i] = items[i];
    }
    return sum_pairwise<kVectorWidth>(values);
}

DEVICE void take(const Items& items, Extremes& extremes) {
    if constexpr (kVectorWidth == 1) {
        extremes.take_code(bit_cast<Code>(items.element(0)));
    } else {
        uint32_t words[4];
        memcpy(words, items.bytes, sizeof(words));
#pragma unroll
        for (const uint32_t word : words) {
            extremes.take(word);
            if constexpr (kBits == 8) extremes.take(word << 8);
        }
    }
}

DEVICE bool is_finite(float x) { return (bit_cast<uint32_t>(x) & 0x7fffffffu) < 0x7f800000u; }
