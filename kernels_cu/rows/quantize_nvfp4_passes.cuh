// The two passes of quantizing to NVFP4, with a grid barrier between them.
//
// The first pass finds each block's largest finite |x|.  The second pass computes codes and scales,
// one thread per group, and zeros the padding of blocked scales (gemm/nvfp4.cuh).  It visits a
// thread's groups in reverse order, because the groups read last are in L2.  A thread's first
// kCachedGroups groups stay in shared memory.  The blocks' partial results follow the barrier in
// memory.
#pragma once
#include "rows/quantize_nvfp4.cuh"

// Arguments: quantize_nvfp4.cu's.
DEVICE void quantize_matrices(const Element* x, uint8_t* codes, e4m3* scales, float* global_scale,
                              GridBarrier* barrier, const QuantizeNvfp4Params& params) {
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
    // Matrix and row of a group.  is_there: the group exists, or is padding of the scales.
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
        const bool is_own = block == blockIdx.x;  // only this block's groups are cached here
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
            if (factor < kLeastNormalScale) {  // normal scales are rounded by at most 1 / 16
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
