// softmax_plain.cu: softmax, or log_softmax (kLog), as in softmax.cu, of rows of whole, aligned
// vectors that one block holds, without options.
//
// A row is read once, into registers.  Its exponentials are taken once, over the largest number of
// their own warp, and stay there: what the warps of a row tell each other makes one factor for all
// that a thread has.  log_softmax keeps the numbers instead.
// The other arguments are those of softmax.cu.
// Constants: Element, kLog and those of parts/row.cuh.
// Launch: grid (ceil(rows / kRowsPerBlock)), block (kNumThreads).
#include "parts/math.cuh"
#include "parts/max_sum.cuh"
#include "parts/softmax_params.cuh"

static_assert(kPlain && !kSplitRows && !kLanesAcrossRows && kClusterSize == 1,
              "whole rows of one block, without options");

using RowVector = Vector<Element, kVectorWidth>;
constexpr int kStep = kThreadsPerRow * kVectorWidth;  // from one of a thread's vectors to the next

// kWhole: every thread has all of its vectors, in every row.
template <bool kWhole>
DEVICE void normalize_row(const Element* x, Element* y, const SoftmaxParams& params) {
    const auto& layout = params.layout;
    const RowThread t = RowThread::here();
    const int64_t row = int64_t(blockIdx.x) * kRowsPerBlock + t.row_in_block;
    const int num_cols = !kWhole && row >= layout.num_rows ? 0 : int(layout.num_cols);

    const int rest = num_cols - t.position(0);  // vector i is in the row if i * kStep < rest

    RowVector packed[kVectorsPerThread];
    const LoadPolicy policy = load_policy(params.loads_last);
    const Element* from = x + row_offset(layout, kX, row) + t.position(0);
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
        if constexpr (!kWhole) packed[i].fill(from_float<Element>(-kInfinity));
        if (kWhole || i * kStep < rest) packed[i].load(from + i * kStep, policy);
    }
    float values[kVectorsPerThread][kVectorWidth], max = -kLargestFloat;
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
            values[i][j] = packed[i][j];
            max = maximum(max, values[i][j]);
        }
    }
    max = reduce_in_warp(max, Max());
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
        float part = 0.0f;
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
            const float power = exp2_approx((values[i][j] - max) * kLog2E);
            if constexpr (!kLog) values[i][j] = power;
            part += power;
        }
        sum += part;
    }
    const MergeMaxSum merge{kLog2E};
    const MaxSum mine{max, reduce_in_warp(sum, Sum())};
    const MaxSum total = merge_across_warps<0>(mine, t, merge);

    const float log_sum = kLog ? log_accurate(total.sum) : 0.0f;
    float factor = reciprocal_approx(total.sum);
    if constexpr (kWarpsPerRow > 1) factor *= merge.rescale(max, total.max);
    Element* to = y + row_offset(layout, kY, row) + t.position(0);
    // Of the block's first row, so that the policy is the block's and takes no registers.
    const int64_t first_row = int64_t(blockIdx.x) * kRowsPerBlock;
    const StorePolicy policy_of_stores = store_policy(first_row >= params.stores_last_from);
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
        if (!kWhole && i * kStep >= rest) continue;
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
            float& value = values[i][j];
            value = kLog ? value - total.max - log_sum : value * factor;
        }
        packed[i].from_floats(values[i]);
        packed[i].store(to + i * kStep, policy_of_stores);
    }
}

KERNEL void softmax_plain(const Element* x, const uint8_t*, void* y, MaxSum*,
                          const SoftmaxParams params, int64_t) {
    if (params.whole) {
        normalize_row<true>(x, static_cast<Element*>(y), params);
    } else {
        normalize_row<false>(x, static_cast<Element*>(y), params);
    }
}
