// layer_norm and rms_norm of rows in shared memory, with all options: strides, conversion, weights
// of any dtype, compensation, quantization.
#pragma once
#include "rows/load_shared.cuh"
#include "rows/moments.cuh"
#include "rows/norm_params.cuh"
#include "rows/quantize.cuh"

namespace rows {

static_assert(!kEven, "even rows have kernels of their own (rows/norm_even.cuh)");

// A thread's elements of s = x + residual.
struct SharedInput {
    SharedRow<Element> x, residual;
    bool has_residual;

    // outside: the value outside of the row.
    DEVICE void get(int i, float outside, float (&values)[kVectorWidth]) const {
        const Vector<Element, kVectorWidth> a = x[i];
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) values[j] = a[j];
        if (has_residual) {
            const Vector<Element, kVectorWidth> b = residual[i];
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) values[j] += b[j];
        }
        const int position = x.thread.position(i);
        if (outside == 0.0f || x.chunk.holds_all(position)) return;
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
            if (!x.chunk.holds(position + j)) values[j] = outside;
        }
    }
};

// Whether layer_norm of unchunked rows computes the mean first, then the squares about it.
constexpr bool kMeanFirst = kClusterSize == 1 && kChunked != kAlways;

// The statistic that warps, blocks or chunks of a row exchange, and its merge.
template <bool kOfMeans>
struct StatisticOf {
    using Type = Moments;
    using Merge = MergeMoments;
};
template <>
struct StatisticOf<false> {
    using Type = float;  // the sum of squares
    using Merge = MergeFloats<Sum>;
};

// Moments of FP32 elements leave no registers for a second vector in flight.
constexpr int kSquaresUnrolled = kCentered && kClusterSize > 1 && sizeof(Element) == 4 ? 1 : 2;

// Sum of the warp's squared deviations from `mean`.  rest: null, or gets the sum of the deviations.
DEVICE float warp_squares(const SharedInput& s, float mean, float* rest) {
    float squares = 0.0f, distances = 0.0f;
#pragma unroll(kSquaresUnrolled)
    for (int i = 0; i < kVectorsPerThread; ++i) {
        float values[kVectorWidth], part = 0.0f, part_distances = 0.0f;
        s.get(i, mean, values);
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
            const float distance = values[j] - mean;
            part += distance * distance;
            part_distances += distance;
        }
        squares += part;
        distances += part_distances;
    }
    if (rest) *rest = reduce_in_warp(distances, Sum());
    return reduce_in_warp(squares, Sum());
}

DEVICE float warp_sum(const SharedInput& s) {
    float sum = 0.0f;
#pragma unroll 2
    for (int i = 0; i < kVectorsPerThread; ++i) {
        float values[kVectorWidth], part = 0.0f;
        s.get(i, 0.0f, values);
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) part += values[j];
        sum += part;
    }
    return reduce_in_warp(sum, Sum());
}

DEVICE void warp_statistic(const SharedInput& s, bool, float& squares) {
    squares = warp_squares(s, 0.0f, nullptr);
}
DEVICE void warp_statistic(const SharedInput& s, bool compensated, Moments& m) {
    m.count = count_in_warp(s.x.thread, s.x.chunk);
    const float one_over_count = 1.0f / (m.count > 0.0f ? m.count : 1.0f);
    m.mean = warp_sum(s) * one_over_count;
    if (compensated) {
        float rest;
        m.m2 = warp_squares(s, m.mean, &rest);
        m.mean_low = rest * one_over_count;
        m.m2 -= rest * m.mean_low;
    } else {
        m.m2 = warp_squares(s, m.mean, nullptr);
    }
}

// Weights or biases: one element per column.
struct ColumnOperand {
    const void* first;
    int64_t stride, first_col;
    int32_t dtype;

    template <class T>
    DEVICE void load(int64_t col, float (&values)[kVectorWidth]) const {
        Vector<T, kVectorWidth> vector;
        vector.load_read_only(static_cast<const T*>(first) + col);
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) values[j] = vector[j];
    }
    template <class T>
    DEVICE void load_each(int64_t col, float (&values)[kVectorWidth]) const {
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j)
            values[j] = to_float(static_cast<const T*>(first)[col + j]);
    }
    // Elements of the vector at `position`, which overlaps the chunk; undefined outside.
    DEVICE void get(int position, const RowChunk& c, float (&values)[kVectorWidth]) const {
        const int64_t col = first_col + position;
        const uintptr_t address =
            reinterpret_cast<uintptr_t>(first) + (dtype == kFloat ? col * 4 : col * 2);
        const bool whole = kVectorWidth > 1 && stride == 1 && c.holds_all(position);
        if (whole && address % 16 != 0) {
            if (dtype == kFloat) {
                load_each<float>(col, values);
            } else if (dtype == kHalf) {
                load_each<half>(col, values);
            } else {
                load_each<bf16>(col, values);
            }
        } else if (!whole) {
#pragma unroll 1  // saves code
            for (int j = 0; j < kVectorWidth; ++j) {
                const bool inside = c.holds(position + j);
                const float x = inside ? load_element(first, (col + j) * stride, dtype) : 0.0f;
#pragma unroll
                for (int k = 1; k < kVectorWidth; ++k) values[k - 1] = values[k];
                values[kVectorWidth - 1] = x;
            }
        } else if (dtype == kFloat) {
            load<float>(col, values);
        } else if (dtype == kHalf) {
            load<half>(col, values);
        } else {
            load<bf16>(col, values);
        }
    }
};

// The epilogue: computes y from s.
template <bool kOfMeans>
struct Normalizer {
    float mean, mean_low, rstd;
    ColumnOperand weight, bias;

    DEVICE void take(float squares, float count, float eps) {
        squares = squares < 0.0f ? 0.0f : squares;  // rounding may make it negative; NaN stays
        rstd = reciprocal_square_root(squares / count + eps);
    }
    DEVICE void take(const Moments& m, float count, float eps) {
        mean = m.mean;
        mean_low = m.mean_low;
        take(m.m2, count, eps);
    }
    // For a row in one block: computes the mean, then the squares about it.
    DEVICE void take_mean_first(const SharedInput& s, float count, float eps, bool compensated) {
        const RowThread& t = s.x.thread;
        const MergeFloats<Sum> merge;
        const float one_over_count = 1.0f / count;
        mean = merge_across_warps<0>(warp_sum(s), t, merge) * one_over_count;
        float squares;
        if (compensated) {
            float rest;
            squares = merge_across_warps<1>(warp_squares(s, mean, &rest), t, merge);
            rest = merge_across_warps<2>(rest, t, merge);
            mean_low = rest * one_over_count;
            squares -= rest * mean_low;
        } else {
            squares = merge_across_warps<1>(warp_squares(s, mean, nullptr), t, merge);
        }
        take(squares, count, eps);
    }
    // Turns s of the vector at `position` into y.
    DEVICE void apply(int position, const RowChunk& c, float (&values)[kVectorWidth]) const {
        float factors[kVectorWidth];
        if (weight.first) {
            weight.get(position, c, factors);
        } else {
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) factors[j] = 1.0f;
        }
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
            float y;
            if (kOfMeans) {
                y = (values[j] - mean - mean_low) * rstd;
            } else {
                y = values[j] * rstd;
            }
            values[j] = y * factors[j];
        }
        if (kOfMeans && bias.first) {
            bias.get(position, c, factors);
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) values[j] += factors[j];
        }
    }
};

// Where a row's results go, at position 0.  sum: s rounded to Element; null: not stored.
struct Destination {
    void* y;
    int64_t y_offset, y_stride;
    int32_t dtype;
    Element* sum;
    int64_t sum_stride;

    template <class T>
    DEVICE void store(int position, const RowChunk& c, const float (&values)[kVectorWidth]) const {
        store_row_vector(static_cast<T*>(y) + y_offset, y_stride, position, c, values);
    }
    // Stores s, and y times `factor`.
    template <bool kOfMeans>
    DEVICE void write(const SharedInput& s, const Normalizer<kOfMeans>& normalizer,
                      float factor) const {
        const RowChunk& c = s.x.chunk;
#pragma unroll 1
        for (int i = 0; i < kVectorsPerThread; ++i) {
            const int position = s.x.thread.position(i);
            if (!c.holds_any(position)) continue;
            float values[kVectorWidth];
            s.get(i, 0.0f, values);
            if (sum) store_row_vector(sum, sum_stride, position, c, values);
            normalizer.apply(position, c, values);
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) values[j] *= factor;
            if (dtype == kE4m3) {
                store<e4m3>(position, c, values);
            } else if (dtype == kE5m2) {
                store<e5m2>(position, c, values);
            } else if (dtype == kInt8) {
                store<int8_t>(position, c, values);
            } else if (dtype == kHalf) {
                store<half>(position, c, values);
            } else if (dtype == kBf16) {
                store<bf16>(position, c, values);
            } else {
                store<float>(position, c, values);
            }
        }
    }
};

// The scale of the row's y in a narrow format.
template <bool kOfMeans>
DEVICE QuantizeScale row_quantize_scale(const SharedInput& s,
                                        const Normalizer<kOfMeans>& normalizer, int32_t dtype) {
    Largest largest;
#pragma unroll 1
    for (int i = 0; i < kVectorsPerThread; ++i) {
        const int position = s.x.thread.position(i);
        if (!s.x.chunk.holds_any(position)) continue;
        float values[kVectorWidth];
        s.get(i, 0.0f, values);
        normalizer.apply(position, s.x.chunk, values);
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
            // Elements outside of the row are zeros, or NaN like the row.
            largest.take(values[j]);
        }
    }
    const float of_warp = reduce_in_warp(largest.value(), Larger());
    constexpr int kExchange = kOfMeans && kMeanFirst ? 3 : 1;
    const MergeFloats<Larger> merge;
    const float of_row = merge_across_warps<kExchange>(of_warp, s.x.thread, merge);
    return QuantizeScale(of_row, largest_finite(dtype));
}

// Outputs and scratch memory.
struct NormOutputs {
    void* y;
    Element* sum;
    float *mean, *rstd, *row_scale;
    void* statistics;
};

template <bool kOfMeans>
DEVICE void normalize_shared_row(const SharedInput& s, const RowWork& work, const void* weight,
                                 const void* bias, const NormOutputs& out,
                                 const NormParams& params) {
    const auto& layout = params.layout;
    const RowThread& t = s.x.thread;
    const RowChunk& c = s.x.chunk;
    Normalizer<kOfMeans> n{0.0f,
                           0.0f,
                           0.0f,
                           {weight, params.weight_stride, c.first_col, params.weight_dtype},
                           {bias, params.bias_stride, c.first_col, params.bias_dtype}};
    const float count = float(layout.num_cols);
    const bool compensated = params.compensated != 0;
    if (work.pass != kMerge) s.x.finish();
    if (kOfMeans && kMeanFirst && work.pass == kSinglePass) {
        n.take_mean_first(s, count, params.eps, compensated);
    } else {
        using Statistic = typename StatisticOf<kOfMeans>::Type;
        const typename StatisticOf<kOfMeans>::Merge merge;
        Statistic statistic{}, *statistics = static_cast<Statistic*>(out.statistics);
        if (work.pass != kMerge && work.pass != kApply) warp_statistic(s, compensated, statistic);
        if (!merge_row(work, t, c.live, layout.num_rows, statistics, merge, statistic)) return;
        n.take(statistic, count, params.eps);
    }

    Destination to{out.y,
                   row_offset(layout, NormParams::kY, work.row),
                   layout.col_strides[NormParams::kY],
                   params.dtype,
                   out.sum,
                   layout.col_strides[NormParams::kSum]};
    to.y_offset += c.first_col * to.y_stride;
    if (to.sum)
        to.sum += row_offset(layout, NormParams::kSum, work.row) + c.first_col * to.sum_stride;
    float factor = 1.0f;
    const int64_t offset = row_offset(layout, NormParams::kStatistic, work.row);
    const bool writes = c.live && t.lane == 0 && t.rank == 0 && work.chunk == 0;
    // The mean of a row with an infinity is NaN, whatever its sums are.
    if (writes && out.mean) out.mean[offset] = n.rstd != n.rstd ? n.rstd : n.mean + n.mean_low;
    if (writes && out.rstd) out.rstd[offset] = n.rstd;
    if (kChunked != kAlways && out.row_scale) {
        const QuantizeScale scale = row_quantize_scale(s, n, params.dtype);
        if (writes) out.row_scale[offset] = scale.decode;
        factor = scale.encode;
    }
    to.write(s, n, factor);
}

DEVICE void normalize_shared_rows(const Element* x, const Element* residual, const void* weight,
                                  const void* bias, const NormOutputs& out,
                                  const NormParams& params, int64_t pass) {
    using Params = NormParams;
    init_exchange_barriers();
    SHARED_STORAGE(SharedRowStorage<Element>, storage);
    const auto& layout = params.layout;
    const RowThread t = RowThread::here();
    const RowWork work = RowWork::here(pass, params.num_chunks, t);
    const Element* x_row = x + row_offset(layout, Params::kX, work.row);
    const RowChunk c = row_chunk(x_row, work.row, layout.num_rows, layout.num_cols, work.chunk);

    const SharedRow<Element> xs{storage, t, c}, residuals{(&storage)[1], t, c};
    if (work.pass != kMerge) {
        const Element zero = from_float<Element>(0.0f);
        const LoadPolicy policy = load_policy(params.loads_last);
        if (residual) {
            const int64_t stride = layout.col_strides[Params::kResidual];
            const int64_t offset =
                row_offset(layout, Params::kResidual, work.row) + c.first_col * stride;
            residuals.start(residual + offset, stride, zero, policy);
        }
        const int64_t stride = layout.col_strides[Params::kX];
        xs.start(x_row + c.first_col * stride, stride, zero, policy);
    }
    const SharedInput s{xs, residuals, residual != nullptr};
    if constexpr (kCentered != kEither) {
        normalize_shared_row<kCentered == kAlways>(s, work, weight, bias, out, params);
    } else if (params.centered) {
        normalize_shared_row<true>(s, work, weight, bias, out, params);
    } else {
        normalize_shared_row<false>(s, work, weight, bias, out, params);
    }
}

}  // namespace rows
