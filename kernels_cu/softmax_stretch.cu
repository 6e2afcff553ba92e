// softmax_stretch.cu: softmax, or log_softmax, as in softmax.cu, of rows that lie side by side,
// without options (parts/stretch.cuh).
// The other arguments are those of softmax.cu.
// Constants: Element and those of parts/stretch.cuh.
// Launch: grid (ceil(rows / (kNumThreads >> params.threads_log2))), block (kNumThreads), dynamic
// shared memory sizeof(StretchStorage).
#include "parts/math.cuh"
#include "parts/max_sum.cuh"
#include "parts/softmax_params.cuh"
#include "parts/stretch.cuh"

template <bool kLog, int kStep>
DEVICE void normalize_row(const RowPart<kStep>& part, const RowThreads& t) {
    RowNumbers x;
    part.load(x, -kInfinity);
    float max = -kLargestFloat;
    part.for_numbers(x, [&](float value) { max = maximum(max, value); });
    max = t.combine_in_warp(max, Max());
    float sum = 0.0f;
    part.for_numbers(x, [&](float& value) {
        const float power = exp2_approx((value - max) * kLog2E);
        if constexpr (!kLog) value = power;
        sum += power;
    });
    const MergeMaxSum merge{kLog2E};
    const MaxSum of_warp{max, t.combine_in_warp(sum, Sum())};
    const MaxSum total = t.merge_across_warps<0>(of_warp, merge);
    const float log_sum = kLog ? log_accurate(total.sum) : 0.0f;
    const float factor = reciprocal_approx(total.sum) * merge.rescale(max, total.max);
    part.for_numbers(
        x, [&](float& value) { value = kLog ? value - total.max - log_sum : value * factor; });
    part.store(x);
}

template <int kStep>
DEVICE void normalize_row(StretchStorage& tile, int begin, const RowThreads& t, int num_cols,
                          bool log) {
    const RowPart<kStep> part(tile, begin, t, num_cols);
    if (log) {
        normalize_row<true>(part, t);
    } else {
        normalize_row<false>(part, t);
    }
}

KERNEL void softmax_stretch(const Element* x, const uint8_t*, void* y, MaxSum*,
                            const SoftmaxParams params, int64_t) {
    SHARED_STORAGE(StretchStorage, tile);
    const int num_cols = int(params.layout.num_cols);
    const RowThreads t = RowThreads::of(params.threads_log2, params.layout.num_rows);
    const Stretch stretch = Stretch::of(x, t, num_cols);
    stretch.load(tile.places, x, load_policy(params.loads_last));
    stretch.loaded();
    const int begin = stretch.begin + t.row_in_block * num_cols;
    if (t.count < kWarpSize) {
        normalize_row<1>(tile, begin, t, num_cols, params.log != 0);
    } else {
        normalize_row<kWarpSize>(tile, begin, t, num_cols, params.log != 0);
    }
    sync_block();
    stretch.store(tile.places, static_cast<Element*>(y),
                  store_policy(t.first_row >= params.stores_last_from));
}
