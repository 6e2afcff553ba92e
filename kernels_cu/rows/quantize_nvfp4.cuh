// Groups of 16 elements in registers, and their codes and scales in NVFP4.
#pragma once
#include "common/math.cuh"
#include "gemm/nvfp4.cuh"
#include "common/vector.cuh"

// Sizes and strides in elements.  groups: per row; scale_rows, scale_groups: with padding.
struct QuantizeNvfp4Params {
    int64_t batch, rows, groups, scale_rows, scale_groups;
    int64_t batch_stride, row_stride, col_stride;  // of x
    int64_t block, quarter, row, word;             // of a matrix's scales (GroupScales)
    int64_t matrix_scales;
};

// e2m1's largest value, e4m3's largest and its smallest normal value.
constexpr float kLargestCode = 6.0f, kLargestScale = 448.0f, kLeastNormalScale = 0x1p-6f;

// Bits of a group's elements.  The bits of |x| have the order of |x|; those of infinity and NaN are
// at least kInfinityBits.
constexpr bool kPairs = sizeof(Element) == 2;
constexpr uint32_t kInfinityBits = kSame<Element, half> ? 0x7c00u : kPairs ? 0x7f80u : 0x7f800000u;
struct Group {
    Bytes<16> vectors[sizeof(Element)];

    DEVICE void load(const Element* x, int64_t stride, bool by_vectors) {
        if (by_vectors) {
#pragma unroll
            for (int i = 0; i < int(sizeof(Element)); ++i) {
                vectors[i] = load_vector_read_only<16>(reinterpret_cast<const char*>(x) + 16 * i);
            }
        } else {
            Element elements[kGroup];
#pragma unroll
            for (int i = 0; i < kGroup; ++i) elements[i] = x[i * stride];
            memcpy(vectors, elements, sizeof(vectors));
        }
    }
    // Stores the group in shared memory, as the thread's `index`-th.
    template <class Cache> DEVICE void store_cached(Cache& cache, uint32_t index) const {
#pragma unroll
        for (int i = 0; i < int(sizeof(Element)); ++i) {
            cache.vectors[index * sizeof(Element) + i][threadIdx.x] = vectors[i];
        }
    }
    template <class Cache> DEVICE void load_cached(const Cache& cache, uint32_t index) {
#pragma unroll
        for (int i = 0; i < int(sizeof(Element)); ++i) {
            vectors[i] = cache.vectors[index * sizeof(Element) + i][threadIdx.x];
        }
    }
    DEVICE uint32_t word(int i) const { return vectors[i / 4].words[i % 4]; }
    DEVICE uint32_t bits(int i) const {
        const uint32_t bits = kPairs ? word(i / 2) >> i % 2 * 16 & 0x7fffu : word(i) & 0x7fffffffu;
        return bits;
    }
    DEVICE uint32_t largest_bits() const {
        uint32_t largest = 0;
#pragma unroll
        for (int i = 0; i < 4 * int(sizeof(Element)); ++i) {
            if constexpr (kPairs) {
                largest = max_unsigned_pair(largest, word(i) & 0x7fff7fffu);
            } else {
                const uint32_t bits = word(i) & 0x7fffffffu;
                largest = largest > bits ? largest : bits;
            }
        }
        if (!kPairs) return largest;
        const uint32_t low = largest & 0xffffu, high = largest >> 16;
        return low > high ? low : high;
    }
    DEVICE uint32_t largest_finite_bits() const {
        uint32_t largest = largest_bits();
        if (largest < kInfinityBits) return largest;
        largest = 0;
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
            if (bits(i) < kInfinityBits && bits(i) > largest) largest = bits(i);
        }
        return largest;
    }
    // Elements 2 i and 2 i + 1.
    DEVICE void pair(int i, float& first, float& second) const {
        if constexpr (kPairs) {
            unpack<Element>(word(i), first, second);
        } else {
            first = bit_cast<float>(word(2 * i));
            second = bit_cast<float>(word(2 * i + 1));
        }
    }
};
DEVICE float value_of_bits(uint32_t bits) {
    if constexpr (kPairs) return to_float(bit_cast<Element>(uint16_t(bits)));
    else return bit_cast<float>(bits);
}

// Block-wide maximum; all threads get it.
DEVICE float block_largest(float value) {
    SHARED(float, warps, [kNumThreads / kWarpSize]);
    const MergeFloats<Max> merge;
    value = merge.across_lanes(value, 1, kWarpSize);
    if (lane_id() == 0) warps[threadIdx.x / kWarpSize] = value;
    sync_block();
#pragma unroll
    for (int i = 0; i < kNumThreads / kWarpSize; ++i) value = maximum(value, warps[i]);
    return value;
}

// Rounds x to the nearest e2m1 value times 2^-14, ties to even.  Does not saturate at 6 * 2^-14
// (see saturate_codes).
DEVICE float round_code(float x) {
    // x's power of two, at least that of the smallest normal value.  A sum of size 2^22 * power has
    // an ulp of power / 2, e2m1's spacing.  The factor 1.5 keeps its exponent for negative x.
    const float power = maximum(bit_cast<float>(bit_cast<uint32_t>(x) & 0x7f800000u), 0x1p-14f);
    const float shift = power * (1.5f * 0x1p22f);  // exact; only x + shift rounds
    return (x + shift) - shift;
}

// Codes, four bits each, of eight results of round_code, given as FP16 pairs.
DEVICE uint32_t pack_codes(const uint32_t (&pairs)[4]) {
    // FP16's upper byte: sign, three zeros, the lower two exponent bits, the first mantissa bit,
    // zero.  Gathers these bytes of the first and of the second elements of all pairs.
    const uint32_t left = pick_bytes(pairs[0], pairs[1], 0x7351),
                   right = pick_bytes(pairs[2], pairs[3], 0x7351);
    const uint32_t firsts = pick_bytes(left, right, 0x5410),
                   seconds = pick_bytes(left, right, 0x7632);
    return (firsts >> 1 & 0x07070707u) | (firsts >> 4 & 0x08080808u) |
           (seconds << 3 & 0x70707070u) | (seconds & 0x80808080u);
}
// Saturates at 6, which a quotient by a scale that was rounded down can exceed.
DEVICE uint32_t saturate_codes(uint32_t pair) {
    return (pair & 0x80008000u) | min_unsigned_pair(pair & 0x7fff7fffu, 0x0e000e00u);
}

struct CachedGroups {
    Bytes<16> vectors[kCachedGroups > 0 ? kCachedGroups * int(sizeof(Element)) : 1][kNumThreads];
};

// Calls f(row, next, group, index) for each batch of kAtOnce groups of a thread of `block`.  A
// batch is group `group` of rows `row`, `row` + `next`, ...; index: of the batch's first group
// among the thread's groups.  Adjacent threads have adjacent groups.
template <bool kBackwards, class F>
DEVICE void for_each_batch(uint32_t block, uint32_t rows, uint32_t groups, F f) {
    const uint32_t threads = gridDim.x * kNumThreads, thread = block * kNumThreads + threadIdx.x;
    const uint32_t across = groups < threads ? groups : threads;
    const uint32_t down = threads / across, top = thread / across, first = thread - top * across;
    if (top >= down || top >= rows) return;
    const uint32_t columns = (groups - first - 1) / across + 1,
                   batches = (rows - top - 1) / (kAtOnce * down) + 1;
    for (uint32_t i = 0; i < columns; ++i) {
        const uint32_t column = kBackwards ? columns - 1 - i : i;
        for (uint32_t j = 0; j < batches; ++j) {
            const uint32_t batch = kBackwards ? batches - 1 - j : j;
            f(top + batch * (kAtOnce * down), down, first + column * across,
              (column * batches + batch) * kAtOnce);
        }
    }
}
