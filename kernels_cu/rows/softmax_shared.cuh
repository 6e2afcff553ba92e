// Softmax and log_softmax of rows in shared memory, with all options: mask, scale, conversion.
#pragma once
#include "common/math.cuh"
#include "common/max_sum.cuh"
#include "rows/softmax_params.cuh"
#include "rows/load_shared.cuh"

namespace rows {

static_assert(!kEven, "even rows are in registers (softmax_register.cu)");

// Replaces masked elements by `fill`; returns whether this thread keeps any element.  mask: address
// of position 0.
DEVICE bool hide(const SharedRow<Element>& row, const uint8_t* mask, int64_t stride, Element fill) {
    const bool aligned = stride == 1 && reinterpret_cast<uintptr_t>(mask) % kVectorWidth == 0;
    bool any = false;
#pragma unroll 1
    for (int i = 0; i < kVectorsPerThread; ++i) {
        const int position = row.thread.position(i);
        Element values[kVectorWidth];
        Vector<uint8_t, kVectorWidth> keep;
        const bool whole = aligned && row.chunk.holds_all(position);
        if (whole) keep.load(mask + position);
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
            const bool kept =
                whole ? keep.element(j) != 0
                      : row.chunk.holds(position + j) && mask[(position + j) * stride] != 0;
            values[j] = kept ? row[i].element(j) : fill;
            any |= kept;
        }
        row[i].from_elements(values);
    }
    return any;
}

// Applies a scale of 0: all finite x get equal scores, the others NaN.
DEVICE void multiply_by_zero(const SharedRow<Element>& row, Element fill) {
#pragma unroll 1
    for (int i = 0; i < kVectorsPerThread; ++i) {
        const int position = row.thread.position(i);
        Element values[kVectorWidth];
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
            values[j] =
                row.chunk.holds(position + j) ? from_float<Element>(row[i][j] * 0.0f) : fill;
        }
        row[i].from_elements(values);
    }
}

// The largest sign * x of the warp's elements of a row, which is the largest score / |scale|; every
// lane of the row gets it.
DEVICE float warp_max(const SharedRow<Element>& row, bool any, float sign) {
    Vector<Element, kVectorWidth> larger;
    larger.fill(from_float<Element>(-kInfinity));
#pragma unroll 2
    for (int i = 0; i < kVectorsPerThread; ++i) larger.take_larger(row[i], sign < 0.0f);
    float max = any ? -kLargestFloat : -kInfinity;
#pragma unroll
    for (int j = 0; j < kVectorWidth; ++j) max = maximum(max, larger[j]);
    return reduce_in_warp(max, Max());
}

// The warp's sum of exp2((x - x_max) * exponent_scale).
DEVICE float warp_sum(const SharedRow<Element>& row, float x_max, float exponent_scale) {
    float sum = 0.0f;
#pragma unroll 2
    for (int i = 0; i < kVectorsPerThread; ++i) {
        const Vector<Element, kVectorWidth> x = row[i];
        float part = 0.0f;
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
            part += exp2_approx((x[j] - x_max) * exponent_scale);
        }
        sum += part;
    }
    return reduce_in_warp(sum, Sum());
}

// A row's epilogue.  If all elements are masked, results are zero (log_softmax: -inf).  If all kept
// scores are -inf or one is NaN, results are NaN.
struct Normalizer {
    float x_max, scale, exponent_scale, factor, log_sum;

    DEVICE Normalizer(const MaxSum& total, float sign, float scale, bool log)
        : x_max(0.0f), scale(scale), exponent_scale(scale * kLog2E), factor(0.0f), log_sum(0.0f) {
        if (total.max == -kInfinity) return;
        x_max = sign * total.max;
        if (log) {  // with a sum of 0 or NaN every element is NaN
            log_sum = log_accurate(total.sum);
        } else {
            factor = 1.0f / total.sum;
        }
    }
};

template <bool kLog, class Out>
DEVICE void store(Out* y, int64_t stride, const SharedRow<Element>& row, const Normalizer& n) {
#pragma unroll 2
    for (int i = 0; i < kVectorsPerThread; ++i) {
        const int position = row.thread.position(i);
        if (!row.chunk.holds_any(position)) continue;
        float values[kVectorWidth];
        const Vector<Element, kVectorWidth> x = row[i];
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
            const float distance = x[j] - n.x_max;
            values[j] = kLog ? distance * n.scale - n.log_sum
                             : exp2_approx(distance * n.exponent_scale) * n.factor;
        }
        store_row_vector(y, stride, position, row.chunk, values);
    }
}

template <class Out>
DEVICE void store(Out* y, int64_t stride, const SharedRow<Element>& row, const Normalizer& n,
                  bool log) {
    if (log) {
        store<true>(y, stride, row, n);
    } else {
        store<false>(y, stride, row, n);
    }
}

DEVICE void softmax_rows(const Element* x, const uint8_t* mask, void* y, MaxSum* statistics,
                         const SoftmaxParams& params, int64_t pass) {
    using Params = SoftmaxParams;
    init_exchange_barriers();
    SHARED_STORAGE(SharedRowStorage<Element>, storage);
    const auto& layout = params.layout;
    const RowThread t = RowThread::here();
    const RowWork work = RowWork::here(pass, params.num_chunks, t);
    const Element* x_row = x + row_offset(layout, Params::kX, work.row);
    const RowChunk c = row_chunk(x_row, work.row, layout.num_rows, layout.num_cols, work.chunk);

    const float sign = params.scale < 0.0f ? -1.0f : 1.0f;
    const float scale = params.scale == 0.0f ? 1.0f : params.scale;
    const MergeMaxSum merge{sign * scale * kLog2E};

    const SharedRow<Element> row{storage, t, c};
    MaxSum total{-kInfinity, 0.0f};
    if (work.pass != kMerge) {
        const Element fill = from_float<Element>(-sign * kInfinity);
        const int64_t x_stride = layout.col_strides[Params::kX];
        row.start(x_row + c.first_col * x_stride, x_stride, fill, load_policy(params.loads_last));
        row.finish();
        if (params.scale == 0.0f) multiply_by_zero(row, fill);
        bool any = c.holds_any(t.position(0));
        if (mask) {
            const int64_t stride = layout.col_strides[Params::kMask];
            const int64_t offset =
                row_offset(layout, Params::kMask, work.row) + c.first_col * stride;
            any = hide(row, mask + offset, stride, fill);
        }
        if (work.pass != kApply) {
            total.max = warp_max(row, any, sign);
            const float x_max = total.max == -kInfinity ? 0.0f : sign * total.max;
            total.sum = warp_sum(row, x_max, scale * kLog2E);
        }
    }
    if (!merge_row(work, t, c.live, layout.num_rows, statistics, merge, total)) return;

    const bool log = params.log != 0;
    const Normalizer normalizer(total, sign, scale, log);
    const int64_t stride = layout.col_strides[Params::kY];
    const int64_t offset = row_offset(layout, Params::kY, work.row) + c.first_col * stride;
    if (params.dtype == kFloat) {
        store(static_cast<float*>(y) + offset, stride, row, normalizer, log);
    } else if (params.dtype == kHalf) {
        store(static_cast<half*>(y) + offset, stride, row, normalizer, log);
    } else {
        store(static_cast<bf16*>(y) + offset, stride, row, normalizer, log);
    }
}

}  // namespace rows
