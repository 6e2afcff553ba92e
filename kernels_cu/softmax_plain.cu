// softmax_plain.cu: softmax and log_softmax as in softmax.cu, of rows of whole, aligned vectors that
// one block holds, without options.
//
// A row is read once, into registers.  Its exponentials are taken once, over the largest number of
// their own warp, and stay in registers too: what the warps of a row tell each other makes one
// factor for all that a thread has.  log_softmax keeps the numbers instead.
// The other arguments are those of softmax.cu.
// Constants: Element and those of parts/row.cuh.
// Launch: grid (ceil(rows / kRowsPerBlock)), block (kNumThreads).
#include "parts/math.cuh"
#include "parts/max_sum.cuh"
#include "parts/softmax_params.cuh"

static_assert(kPlain && !kSplitRows && !kLanesAcrossRows && kClusterSize == 1,
              "whole rows of one block, without options");

using RowVector = Vector<Element, kVectorWidth>;

// kWhole: every thread has all of its vectors, in every row.
template <bool kLog, bool kWhole>
DEVICE void normalize_row(const Element* x, Element* y, const SoftmaxParams& params) {
    const auto& layout = params.layout;
    const RowThread t = RowThread::here();
    const int64_t row = int64_t(blockIdx.x) * kRowsPerBlock + t.row_in_block;
    const int num_cols = !kWhole && row >= layout.num_rows ? 0 : int(layout.num_cols);

    RowVector held[kVectorsPerThread], larger;
    const Element* from = x + row_offset(layout, kX, row);
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
        const int position = t.position(i);
        if constexpr (!kWhole) held[i].fill(from_float<Element>(-kInfinity));
        if (kWhole || position < num_cols) held[i].load(from + position);
    }
    larger = held[0];
#pragma unroll
    for (int i = 1; i < kVectorsPerThread; ++i) larger.take_larger(held[i], false);
    float max = -kLargestFloat;
#pragma unroll
    for (int j = 0; j < kVectorWidth; ++j) max = maximum(max, larger[j]);
    max = reduce_in_warp(max, Max());

    float powers[kVectorsPerThread][kVectorWidth], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
        float part = 0.0f;
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
            powers[i][j] = exp2_approx((held[i][j] - max) * kLog2E);
            part += powers[i][j];
        }
        sum += part;
    }
    const MergeMaxSum merge{kLog2E};
    const MaxSum mine{max, reduce_in_warp(sum, Sum())};
    const MaxSum total = merge_across_warps<0>(mine, t, merge);

    const float log_sum = kLog ? log_accurate(total.sum) : 0.0f;
    float factor = reciprocal_approx(total.sum);
    if constexpr (kWarpsPerRow > 1) factor *= merge.rescale(max, total.max);
    Element* to = y + row_offset(layout, kY, row);
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
        const int position = t.position(i);
        if (!kWhole && position >= num_cols) continue;
        if constexpr (kLog) held[i].stay_packed();
        float values[kVectorWidth];
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
            values[j] = kLog ? held[i][j] - total.max - log_sum : powers[i][j] * factor;
        }
        RowVector vector;
        vector.from_floats(values);
        vector.store(to + position);
    }
}

KERNEL void softmax_plain(const Element* x, const uint8_t*, void* out, MaxSum*,
                          const SoftmaxParams params, int64_t) {
    Element* y = static_cast<Element*>(out);
    const auto& layout = params.layout;
    const bool whole = layout.num_cols == kChunk && layout.num_rows % kRowsPerBlock == 0;
    if (params.log) {
        whole ? normalize_row<true, true>(x, y, params) : normalize_row<true, false>(x, y, params);
    } else if (whole) {
        normalize_row<false, true>(x, y, params);
    } else {
        normalize_row<false, false>(x, y, params);
    }
}
