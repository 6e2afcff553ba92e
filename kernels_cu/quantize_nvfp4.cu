// quantize_nvfp4.cu: x = code * scale * global_scale for a batch of matrices, codes in e2m1, an e4m3 scale
// for every 16 of a row (NVIDIA's recipe for NVFP4).
//   global_scale = max |x| over finite x / (6 * 448), 1 where that is no normal number;
//   scale = max |x| of the group / (6 * global_scale), NaN for a group with a NaN or an infinity;
//   code = x / global_scale / scale; all three rounded to nearest even.
// Pass kLargest: each block's largest finite |x|; kEncode: codes and scales, a thread for each group, and
// for the padding of scales in blocks (parts/nvfp4.cuh), which become zero.
// Constants: Element.
// Launch: grid (num_partials), then (ceil(batch * scale_rows * scale_groups / kNumThreads)), block
// (kNumThreads).
#include "parts/math.cuh"
#include "parts/nvfp4.cuh"
#include "parts/vector.cuh"

enum Pass { kLargest, kEncode };

// Sizes and steps in elements; scale_rows, scale_groups: with padding.
struct QuantizeParams {
    int64_t batch, rows, groups, scale_rows, scale_groups;
    int64_t batch_stride, row_stride, col_stride;  // of x
    int64_t block, quarter, row, word;             // of the scales of a matrix (GroupScales)
    int64_t matrix_scales, num_partials;
};

constexpr float kLargestCode = 6.0f, kLargestScale = 448.0f;

DEVICE bool is_finite(float x) { return magnitude(x) <= kLargestFloat; }

// The largest of all threads' numbers, for each of them.
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

DEVICE void load_group(const Element* x, const QuantizeParams& p, int64_t matrix, int64_t row,
                       int64_t group, float (&values)[kGroup]) {
    const int64_t offset =
        matrix * p.batch_stride + row * p.row_stride + group * kGroup * p.col_stride;
    load_run(x + offset, p.col_stride, kGroup, values);
}

KERNEL void quantize_nvfp4(const Element* x, uint8_t* codes, e4m3* scales, float* global_scale,
                           float* partials, const QuantizeParams params, int64_t pass) {
    const QuantizeParams& p = params;
    const int64_t first = int64_t(blockIdx.x) * kNumThreads + threadIdx.x;
    float values[kGroup];
    if (pass == kLargest) {
        float largest = 0.0f;
        const int64_t count = p.batch * p.rows * p.groups;
        for (int64_t i = first; i < count; i += int64_t(gridDim.x) * kNumThreads) {
            const int64_t line = i / p.groups;
            load_group(x, p, line / p.rows, line % p.rows, i % p.groups, values);
#pragma unroll
            for (int j = 0; j < kGroup; ++j) {
                if (is_finite(values[j])) largest = maximum(largest, magnitude(values[j]));
            }
        }
        largest = block_largest(largest);
        if (threadIdx.x == 0) partials[blockIdx.x] = largest;
        return;
    }
    float largest = 0.0f;
    for (int64_t i = threadIdx.x; i < p.num_partials; i += kNumThreads) {
        largest = maximum(largest, partials[i]);
    }
    largest = block_largest(largest) / (kLargestCode * kLargestScale);
    const float global = largest >= kSmallestNormal ? largest : 1.0f;
    if (first == 0) *global_scale = global;
    const int64_t line = first / p.scale_groups, group = first % p.scale_groups;
    const int64_t matrix = line / p.scale_rows, row = line % p.scale_rows;
    if (matrix >= p.batch) return;
    e4m3 scale = from_float<e4m3>(0.0f);
    if (row < p.rows && group < p.groups) {
        load_group(x, p, matrix, row, group, values);
        float of_group = 0.0f;
        bool finite = true;
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
            finite = finite && is_finite(values[j]);
            of_group = maximum(of_group, magnitude(values[j]));
        }
        scale = from_float<e4m3>(finite ? of_group / kLargestCode / global : kInfinity - kInfinity);
        const float factor = to_float(scale);
        Bytes<8> packed{};
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
            const float code = factor > 0.0f ? values[j] / global / factor : 0.0f;
            packed.words[j / 8] |= encode_e2m1(code) << j % 8 * 4;
        }
        store_vector<8>(codes + ((matrix * p.rows + row) * p.groups + group) * (kGroup / 2), packed);
    }
    const GroupScales place{scales + matrix * p.matrix_scales, p.block, p.quarter, p.row, p.word};
    const_cast<e4m3&>(*place.at(row, group * kGroup)) = scale;
}
