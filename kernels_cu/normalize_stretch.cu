// normalize_stretch.cu: layer_norm (kCentered) and rms_norm as in normalize.cu, of rows that lie side
// by side (parts/stretch.cuh), with weights of their dtype or FP32 that lie so too; not quantized, not
// compensated.
// The other arguments are those of normalize.cu.
// Constants: Element, kCentered and those of parts/stretch.cuh.
// Launch: grid (ceil(rows / (kNumThreads >> params.threads_log2))), block (kNumThreads), dynamic
// shared memory for the elements of a block's rows and one vector, twice that with a residual.
#include "parts/math.cuh"
#include "parts/norm_params.cuh"
#include "parts/stretch.cuh"

// What a call asks of a row.
struct Task {
    const void *weight, *bias;  // null: none
    int32_t weight_dtype, bias_dtype;
    int num_cols;
    float eps;
    float *mean, *rstd;  // of this row; null: not wanted
    bool wants_sum;
};

template <int kStep, class Body>
DEVICE void for_columns(const RowPart<kStep>& part, RowNumbers& s, const void* columns,
                        int32_t dtype, Body body) {
    if (columns == nullptr) return;
    if (dtype == kFloat) {
        part.for_columns(s, static_cast<const float*>(columns), body);
    } else {
        part.for_columns(s, static_cast<const Element*>(columns), body);
    }
}

// residual: null: none; becomes the sum.
template <int kStep>
DEVICE void normalize_row(const RowPart<kStep>& part, const RowPart<kStep>* residual,
                          const RowThreads& t, const Task& task) {
    RowNumbers s;
    part.load(s, 0.0f);
    if (residual) {
        residual->add_to(s);
        if (task.wants_sum) residual->store(s);
    }
    const MergeFloats<Sum> merge;
    const float one_over_count = 1.0f / float(task.num_cols);
    float mean = 0.0f;
    if constexpr (kCentered) {
        float sum = 0.0f;
        part.for_numbers(s, [&](float value) { sum += value; });
        sum = t.merge_across_warps<0>(t.combine_in_warp(sum, Sum()), merge);
        mean = sum * one_over_count;
        part.for_numbers_there(
            s, [&](float& value, bool there) { value = there ? value - mean : 0.0f; });
    }
    float squares = 0.0f;
    part.for_numbers(s, [&](float value) { squares += value * value; });
    squares = t.merge_across_warps<1>(t.combine_in_warp(squares, Sum()), merge);
    const float rstd = reciprocal_square_root(squares * one_over_count + task.eps);
    if (t.live() && t.lane == 0) {
        // With an infinity in it the row is NaN, whatever its sums have become.
        if (task.mean) *task.mean = rstd != rstd ? rstd : mean;
        if (task.rstd) *task.rstd = rstd;
    }
    part.for_numbers(s, [&](float& value) { value *= rstd; });
    for_columns(part, s, task.weight, task.weight_dtype,
                [](float& value, float weight) { value *= weight; });
    if constexpr (kCentered) {
        for_columns(part, s, task.bias, task.bias_dtype,
                    [](float& value, float bias) { value += bias; });
    }
    part.store(s);
}

template <int kStep>
DEVICE void normalize_row(StretchStorage& x, StretchStorage* residual, int begin,
                          const RowThreads& t, const Task& task) {
    const RowPart<kStep> part(x, begin, t, task.num_cols);
    if (residual) {
        const RowPart<kStep> of_residual(*residual, begin, t, task.num_cols);
        normalize_row(part, &of_residual, t, task);
    } else {
        normalize_row<kStep>(part, nullptr, t, task);
    }
}

KERNEL void normalize_stretch(const Element* x, const Element* residual, const void* weight,
                              const void* bias, void* y, Element* sum, float* mean, float* rstd,
                              float*, void*, const NormParams params, int64_t) {
    SHARED_STORAGE(StretchStorage, tile);
    const int num_cols = int(params.layout.num_cols);
    const RowThreads t = RowThreads::of(params.threads_log2, params.layout.num_rows);
    const Stretch stretch = Stretch::of(x, t, num_cols);
    const LoadPolicy policy = load_policy(params.loads_last);
    StretchStorage* second = residual ? &tile + 1 : nullptr;
    if (residual) stretch.load(second->places, residual, policy);
    stretch.load(tile.places, x, policy);
    stretch.loaded();
    const int64_t row = t.first_row + t.row_in_block;
    const Task task{
        weight,        bias,       params.weight_dtype,         params.bias_dtype,
        num_cols,      params.eps, mean ? mean + row : nullptr, rstd ? rstd + row : nullptr,
        sum != nullptr};
    const int begin = stretch.begin + t.row_in_block * num_cols;
    if (t.count < kWarpSize) {
        normalize_row<1>(tile, second, begin, t, task);
    } else {
        normalize_row<kWarpSize>(tile, second, begin, t, task);
    }
    sync_block();
    const StorePolicy stores = store_policy(t.first_row >= params.stores_last_from);
    if (sum) stretch.store(second->places, sum, stores);
    stretch.store(tile.places, static_cast<Element*>(y), stores);
}
