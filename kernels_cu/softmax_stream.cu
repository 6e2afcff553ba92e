// softmax_stream.cu: softmax and log_softmax as in softmax.cu, of rows of whole, aligned vectors, without
// mask, scale or another result type.  A block or cluster takes a row after the other
// (parts/row_stream.cuh).
// Constants: Element and those of parts/row_stream.cuh.
// Launch: grid (blocks that run at once, or fewer), block (kNumThreads), dynamic shared memory
// params.stages * sizeof(Slice).
#include "parts/max_sum.cuh"
#include "parts/row_stream.cuh"
#include "parts/softmax_params.cuh"

static_assert(kPlain && kThreadsPerRow == kNumThreads, "rows without options, one at a time");

using Row = RowOfRing<1>;

// As in softmax.cu, of the warp.
DEVICE float warp_max(Row& row) {
    RowVector larger;
    larger.fill(from_float<Element>(-kInfinity));
#pragma unroll(Row::kUnrolled)
    for (int i = 0; i < kVectorsPerThread; ++i) larger.take_larger(row.get(i, 0), false);
    float max = row.ring.place.holds(0) ? -kLargestFloat : -kInfinity;
#pragma unroll
    for (int j = 0; j < kVectorWidth; ++j) max = maximum(max, larger[j]);
    return reduce_in_warp(max, Max());
}

// The sum of exp2((x - x_max) * log2 e).
DEVICE float warp_sum(Row& row, float x_max) {
    float sum = 0.0f;
#pragma unroll(Row::kUnrolled)
    for (int i = 0; i < kVectorsPerThread; ++i) {
        const RowVector x = row.get(i, 0);
        float part = 0.0f;
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) part += exp2_approx((x[j] - x_max) * kLog2E);
        sum += part;
    }
    return reduce_in_warp(sum, Sum());
}

template <bool kLog>
DEVICE void softmax_rows(const Element* x, Element* y, Slice* slices, const SlicePlace& place,
                         const StreamBarriers& barriers, const SoftmaxParams& params) {
    const auto& layout = params.layout;
    const int64_t step = gridDim.x / kClusterSize;
    int64_t row = blockIdx.x / kClusterSize;
    RowRing<1> ring{slices, barriers.full, place, params.stages, 0, 0};
    const auto start = [&](int stage, int turns) {
        const int64_t next = row + turns * step;
        if (next >= layout.num_rows) return;
        const Element* rows[1] = {x + row_offset(layout, kX, next)};
        ring.start(stage, rows);
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < params.stages; ++i) start(i, i);
    }

    const MergeMaxSum merge{kLog2E};
    Row s{ring, from_float<Element>(-kInfinity)};
#pragma unroll 1
    for (int turn = 0; row < layout.num_rows; row += step, ++turn) {
        s.take();
        // A warp's sum is about its own maximum, so that there is one exchange.
        MaxSum mine{warp_max(s), 0.0f};
        mine.sum = warp_sum(s, mine.max == -kInfinity ? 0.0f : mine.max);
        const MaxSum of_block = merge_in_block<0>(mine, turn, merge);
        if (threadIdx.x == 0) s.refill(turn, start);
        const MaxSum total = merge_in_cluster(of_block, turn, merge, barriers.exchanges);
        const float factor = kLog ? log_accurate(total.sum) : 1.0f / total.sum;
        Element* y_row = y + row_offset(layout, kY, row);
#pragma unroll(Row::kUnrolled)
        for (int i = 0; i < kVectorsPerThread; ++i) {
            if (!place.holds(i)) continue;
            const RowVector vector = s.get(i, 0);
            float values[kVectorWidth];
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) {
                const float distance = vector[j] - total.max;
                values[j] = kLog ? distance - factor : exp2_approx(distance * kLog2E) * factor;
            }
            RowVector result;
            result.from_floats(values);
            result.store(y_row + place.position(i));
        }
        ring.advance();
    }
}

KERNEL void softmax_stream(const Element* x, const uint8_t*, void* y, void*,
                           const SoftmaxParams params, int64_t) {
    SHARED_STORAGE(Slice, slices);
    const StreamBarriers barriers = StreamBarriers::make(params.stages);
    const SlicePlace place = SlicePlace::here(params.layout.num_cols);
    if (params.log) {
        softmax_rows<true>(x, static_cast<Element*>(y), &slices, place, barriers, params);
    } else {
        softmax_rows<false>(x, static_cast<Element*>(y), &slices, place, barriers, params);
    }
}
