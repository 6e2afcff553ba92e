// quantize_nvfp4.cu: x = code * scale * global_scale for a batch of matrices, codes in e2m1, an
// e4m3 scale for every 16 of a row (NVIDIA's recipe for NVFP4).
//   global_scale = max |x| over finite x / (6 * 448), 1 where that is no normal number;
//   scale = max |x| of the group / (6 * global_scale), NaN for a group with a NaN or an infinity;
//   code = x / global_scale / scale; all three rounded to nearest even.
// First pass: each block's largest finite |x|.  After a grid barrier, second pass: codes and
// scales, one thread per group; padding of blocked scales (gemm/nvfp4.cuh) becomes zero.  The
// second pass visits a thread's groups in reverse order, because the last ones read are in L2.  A
// thread's first kCachedGroups groups stay in shared memory.
// Constants: Element; kAtOnce: groups that a thread loads at once; kCachedGroups, a multiple of it.
// Launch: grid (any), block (kNumThreads), dynamic shared memory sizeof(CachedGroups).  Fewer than
// 2^32 rows in all, with padding.  barrier: followed by the blocks' partial results.
#include "common/math.cuh"
#include "gemm/nvfp4.cuh"
#include "common/vector.cuh"

// Sizes and strides in elements; scale_rows, scale_groups: with padding.
struct QuantizeNvfp4Params {
    int64_t batch, rows, groups, scale_rows, scale_groups;
    int64_t batch_stride, row_stride, col_stride;  // of x
    int64_t block, quarter, row, word;             // of a matrix's scales (GroupScales)
    int64_t matrix_scales;
};

constexpr float kLargestCode = 6.0f, kLargestScale = 448.0f, kLeastNormalScale = 0x1p-6f;

// Bits of a group's elements.  The bits of |x| order as |x| does; of infinity and NaN they are at
// least kInfinityBits.
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
    // Keeps the group in shared memory, as the thread's `index`-th.
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

// Rounds x to the nearest e2m1 value times 2^-14, ties to even; past 6 times that, to more digits
// than e2m1 has.
DEVICE float round_code(float x) {
    // The exponent of x, at least that of the smallest normal value: 2^22 times it has half of its
    // ulp for the spacing of e2m1.  The 1.5 keeps the exponent for negative x.
    const float power = maximum(bit_cast<float>(bit_cast<uint32_t>(x) & 0x7f800000u), 0x1p-14f);
    const float shift = power * (1.5f * 0x1p22f);  // exact; only x + shift rounds
    return (x + shift) - shift;
}

// Codes, four bits each, of eight results of round_code, given as FP16 pairs.
DEVICE uint32_t pack_codes(const uint32_t (&pairs)[4]) {
    // FP16's upper byte: sign, three zeros, the lower two exponent bits, the first mantissa bit,
    // zero.  Gathers those of the first and of the second elements of all pairs.
    const uint32_t left = pick_bytes(pairs[0], pairs[1], 0x7351),
                   right = pick_bytes(pairs[2], pairs[3], 0x7351);
    const uint32_t firsts = pick_bytes(left, right, 0x5410),
                   seconds = pick_bytes(left, right, 0x7632);
    return (firsts >> 1 & 0x07070707u) | (firsts >> 4 & 0x08080808u) |
           (seconds << 3 & 0x70707070u) | (seconds & 0x80808080u);
}
// Saturates at 6, which a scale that was rounded down may exceed.
DEVICE uint32_t saturate_codes(uint32_t pair) {
    return (pair & 0x80008000u) | min_unsigned_pair(pair & 0x7fff7fffu, 0x0e000e00u);
}

struct CachedGroups {
    Bytes<16> vectors[kCachedGroups > 0 ? kCachedGroups * int(sizeof(Element)) : 1][kNumThreads];
};

// Calls f(row, next, group, index) for the batches of kAtOnce groups of each thread of `block`:
// the groups `group` of the rows `row`, `row` + `next`, ...; index: of the batch's first group
// among the thread's.  Adjacent threads have adjacent groups; a thread keeps its group's column.
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

KERNEL void quantize_nvfp4(const Element* x, uint8_t* codes, e4m3* scales, float* global_scale,
                           GridBarrier* barrier, const QuantizeNvfp4Params params) {
    wait_for_previous_grid();
    SHARED_STORAGE(CachedGroups, cache);
    const QuantizeNvfp4Params& p = params;
    float* partials = reinterpret_cast<float*>(barrier + 1);
    const int64_t size = sizeof(Element);
    const bool by_vectors =
        p.col_stride == 1 &&
        (uintptr_t(x) | uintptr_t(p.row_stride * size) | uintptr_t(p.batch_stride * size)) % 16 ==
            0;
    const uint32_t rows = uint32_t(p.rows), groups = uint32_t(p.groups);
    const uint32_t scale_rows = uint32_t(p.scale_rows), flat_rows = uint32_t(p.batch) * scale_rows,
                   scale_groups = uint32_t(p.scale_groups);
    // Matrix and row of a group; whether it exists (with padding), and whether it has
    // elements.
    struct GroupCoord {
        uint32_t matrix, row;
        bool is_there, has_elements;
    };
    const auto coord_of = [&](uint32_t flat_row, uint32_t group) {
        const uint32_t matrix = p.batch > 1 ? flat_row / scale_rows : 0,
                       row = flat_row - matrix * scale_rows;
        return GroupCoord{matrix, row, flat_row < flat_rows,
                          flat_row < flat_rows && row < rows && group < groups};
    };
    const auto load = [&](Group& elements, const GroupCoord& coord, uint32_t group) {
        const int64_t offset = coord.matrix * p.batch_stride + coord.row * p.row_stride;
        elements.load(x + offset + group * (kGroup * p.col_stride), p.col_stride, by_vectors);
    };
    uint32_t largest_of_thread = 0;
    for_each_batch<false>(blockIdx.x, flat_rows, scale_groups,
                          [&](uint32_t flat_row, uint32_t next, uint32_t group, uint32_t index) {
                              Group elements[kAtOnce];
                              bool has_elements[kAtOnce];
#pragma unroll
                              for (int i = 0; i < kAtOnce; ++i) {
                                  const GroupCoord coord = coord_of(flat_row + i * next, group);
                                  has_elements[i] = coord.has_elements;
                                  if (coord.has_elements) load(elements[i], coord, group);
                              }
#pragma unroll
                              for (int i = 0; i < kAtOnce; ++i) {
                                  if (!has_elements[i]) continue;
                                  const uint32_t bits = elements[i].largest_finite_bits();
                                  largest_of_thread =
                                      largest_of_thread > bits ? largest_of_thread : bits;
                                  if (index < kCachedGroups)
                                      elements[i].store_cached(cache, index + i);
                              }
                          });
    const float of_block = block_largest(value_of_bits(largest_of_thread));
    if (threadIdx.x == 0) partials[blockIdx.x] = of_block;
    // Second pass of `block`.
    const auto encode_block = [&](uint32_t block) {
        float largest = 0.0f;
        for (int64_t i = threadIdx.x; i < gridDim.x; i += kNumThreads) {
            largest = maximum(largest, partials[i]);
        }
        largest = block_largest(largest) / (kLargestCode * kLargestScale);
        const float global = largest >= kSmallestNormal ? largest : 1.0f;
        if (block == 0 && threadIdx.x == 0) *global_scale = global;
        const bool is_own =
            block == blockIdx.x;  // a block that has left the barrier took its cache with it
        const float of_global = 1.0f / global, of_codes = 1.0f / (kLargestCode * global);
        // Stores a group's codes and returns its scale.
        const auto encode = [&](const Group& elements, uint32_t matrix, uint32_t row,
                                uint32_t group) {
            const uint32_t bits = elements.largest_bits();
            const float nan = kInfinity - kInfinity;
            const e4m3 scale =
                from_float<e4m3>(bits < kInfinityBits ? value_of_bits(bits) * of_codes : nan);
            const float factor = to_float(scale);
            const bool coded = factor > 0.0f;
            const float of_scale = coded ? 0x1p-14f * reciprocal_approx(factor) : 0.0f;
            // With FP16 inputs the product of both scales is never subnormal.
            const float of_both = of_global * of_scale;
            uint32_t pairs[2][4];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float values[2];
                elements.pair(i, values[0], values[1]);
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    values[n] = round_code(kSame<Element, half> ? values[n] * of_both
                                                                : values[n] * of_global * of_scale);
                }
                pairs[i / 4][i % 4] = pack<half>(values[0], values[1]);
            }
            if (factor < kLeastNormalScale) {  // larger scales are rounded by at most 1 / 16
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    pairs[i / 4][i % 4] = saturate_codes(pairs[i / 4][i % 4]);
            }
            const Bytes<8> packed = {coded ? pack_codes(pairs[0]) : 0,
                                     coded ? pack_codes(pairs[1]) : 0};
            const int64_t index = int64_t(matrix * rows + row) * groups + group;
            store_vector<8>(codes + index * (kGroup / 2), packed);
            return scale;
        };
        for_each_batch<true>(block, flat_rows, scale_groups,
                             [&](uint32_t flat_row, uint32_t next, uint32_t group, uint32_t index) {
                                 Group elements[kAtOnce];
#pragma unroll
                                 for (int i = 0; i < kAtOnce; ++i) {
                                     const GroupCoord coord = coord_of(flat_row + i * next, group);
                                     if (!coord.has_elements) continue;
                                     if (is_own && index < kCachedGroups)
                                         elements[i].load_cached(cache, index + i);
                                     else load(elements[i], coord, group);
                                 }
#pragma unroll
                                 for (int i = 0; i < kAtOnce; ++i) {
                                     const GroupCoord coord = coord_of(flat_row + i * next, group);
                                     if (!coord.is_there) break;
                                     e4m3 scale = from_float<e4m3>(0.0f);
                                     if (coord.has_elements)
                                         scale =
                                             encode(elements[i], coord.matrix, coord.row, group);
                                     // GroupScales::at in 32-bit arithmetic.
                                     const uint32_t row = coord.row;
                                     scales[coord.matrix * p.matrix_scales + row / 128 * p.block +
                                            row % 128 / 32 * p.quarter + row % 32 * p.row +
                                            group / kWord * p.word + group % kWord] = scale;
                                 }
                             });
    };
    after_all_blocks(barrier, encode_block);
}
