// softmax.cu: y = exp(s - max s) / sum exp(s - max s) along one axis, s = scale * x, or its logarithm.
//
// A row is read once into registers (parts/row.cuh), reduced, and written once.  A row longer than
// kChunk (kSplitRows) takes three launches: kStatistics writes each chunk's MaxSum, kMerge makes one
// of a row's, and kApply reads x a second time.
//   mask    bytes, nonzero = keep; what it hides counts as absent.  Null: keep all.
//   dtype   of y, which need not be Element.
// The scale multiplies after the subtraction, so that 3e38 gives no inf - inf.  Exponents are in base
// 2: exp(s - max s) = exp2((x - x_max) * scale * log2(e)), x_max the x of the largest score.
// Constants: Element, kThreadsPerRow, kVectorWidth, kVectorsPerThread, kLanesAcrossRows, kSplitRows.
// Launch: grid (ceil(rows / kRowsPerBlock) * chunks * kClusterSize), block (kNumThreads).
#include "parts/math.cuh"
#include "parts/max_sum.cuh"
#include "parts/row.cuh"

enum Pass { kWholeRow, kStatistics, kMerge, kApply };
enum Operand { kX, kY, kMask, kOperands };
enum DType { kHalf, kBf16, kFloat };

struct SoftmaxParams {
    RowLayout<kOperands> layout;
    int64_t num_chunks;
    float scale;
    int32_t dtype;
    int32_t log;  // nonzero: log_softmax
    int32_t padding;
};

using Row = RowVectors<Element>;

// What the mask hides becomes `fill`; true when this thread keeps anything.
DEVICE bool hide(Row& row, const uint8_t* mask, int64_t stride, const RowThread& t,
                 const RowChunk& c, Element fill) {
    const bool aligned = stride == 1 && reinterpret_cast<uintptr_t>(mask) % kVectorWidth == 0;
    bool any = false;
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
        const int position = t.position(i);
        Element values[kVectorWidth];
        Vector<uint8_t, kVectorWidth> keep;
        const bool whole = aligned && c.holds_all(position);
        if (whole) keep.load(mask + position);
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
            const bool kept = whole ? keep.element(j) != 0
                                    : c.holds(position + j) && mask[(position + j) * stride] != 0;
            values[j] = kept ? row.vectors[i].element(j) : fill;
            any |= kept;
        }
        row.vectors[i].from_elements(values);
    }
    return any;
}

// A scale of 0 makes equal scores of all finite x, and NaN of the rest.
DEVICE void multiply_by_zero(Row& row, const RowThread& t, const RowChunk& c, Element fill) {
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
        Element values[kVectorWidth];
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
            values[j] = c.holds(t.position(i) + j)
                            ? from_float<Element>(row.vectors[i][j] * 0.0f)
                            : fill;
        }
        row.vectors[i].from_elements(values);
    }
}

// The MaxSum of this warp's part of the row; every lane of the row gets it.
DEVICE MaxSum warp_max_sum(const Row& row, bool any, float sign, float exponent_scale) {
    float max = any ? -kLargestFloat : -kInfinity;
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) max = maximum(max, sign * row.vectors[i][j]);
    }
    max = reduce_in_warp(max, Max());
    const float x_max = max == -kInfinity ? 0.0f : sign * max;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
            sum += exp2_approx((row.vectors[i][j] - x_max) * exponent_scale);
        }
    }
    return {max, reduce_in_warp(sum, Sum())};
}

struct Normalizer {
    float x_max, scale, exponent_scale, factor, log_sum;

    DEVICE Normalizer(const MaxSum& total, float sign, float scale) : scale(scale) {
        const bool empty = total.max == -kInfinity;
        const bool only_infinite = total.sum == 0.0f && !empty;
        const float nan = kInfinity - kInfinity;
        x_max = empty ? 0.0f : sign * total.max;
        exponent_scale = scale * kLog2E;
        factor = empty ? 0.0f : only_infinite ? nan : 1.0f / total.sum;
        log_sum = empty ? 0.0f : only_infinite ? nan : log_accurate(total.sum);
    }
    DEVICE float softmax(float x) const {
        return exp2_approx((x - x_max) * exponent_scale) * factor;
    }
    DEVICE float log_softmax(float x) const { return (x - x_max) * scale - log_sum; }
};

template <class Out>
DEVICE void write(Out* y, int64_t stride, const Row& row, const RowThread& t, const RowChunk& c,
                  const Normalizer& normalizer, bool log) {
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
        if (!c.holds_any(t.position(i))) continue;
        float values[kVectorWidth];
        if (log) {
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) {
                values[j] = normalizer.log_softmax(row.vectors[i][j]);
            }
        } else {
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) {
                values[j] = normalizer.softmax(row.vectors[i][j]);
            }
        }
        store_row_vector(y, stride, t.position(i), c, values);
    }
}

KERNEL void softmax(const Element* x, const uint8_t* mask, void* y, MaxSum* statistics,
                    const SoftmaxParams params, int64_t pass_argument) {
    announce_to_cluster();
    const Pass pass = kSplitRows ? Pass(pass_argument) : kWholeRow;
    const auto& layout = params.layout;
    const int64_t num_chunks = kSplitRows ? params.num_chunks : 1;
    const int64_t group = blockIdx.x / kClusterSize;
    const int64_t row_group = pass == kMerge ? group : kSplitRows ? group / num_chunks : group;
    const int64_t chunk = pass == kMerge ? 0 : kSplitRows ? group % num_chunks : 0;

    const RowThread t = RowThread::here();
    const int64_t row = row_group * kRowsPerBlock + t.row_in_block;
    const Element* x_row = x + row_offset(layout, kX, row);
    const RowChunk c = row_chunk(x_row, row, layout.num_rows, layout.num_cols, chunk);
    MaxSum* merged = statistics + layout.num_rows * num_chunks;

    const float sign = params.scale < 0.0f ? -1.0f : 1.0f;
    const float scale = params.scale == 0.0f ? 1.0f : params.scale;
    const MergeMaxSum merge{sign * scale * kLog2E};

    Row values;
    MaxSum mine{-kInfinity, 0.0f};
    if (pass == kMerge) {
        if (c.live) {
            for (int64_t i = t.lane; i < num_chunks; i += kThreadsPerRow) {
                mine = merge(mine, statistics[row * num_chunks + i]);
            }
        }
        mine = reduce_statistic_in_warp(mine, merge);
    } else {
        const Element fill = from_float<Element>(-sign * kInfinity);
        values.load(x_row + c.first_col * layout.col_strides[kX], layout.col_strides[kX], t, c,
                    fill);
        if (params.scale == 0.0f) multiply_by_zero(values, t, c, fill);
        bool any = false;
        if (mask) {
            const int64_t stride = layout.col_strides[kMask];
            const uint8_t* p = mask + row_offset(layout, kMask, row) + c.first_col * stride;
            any = hide(values, p, stride, t, c, fill);
        } else {
#pragma unroll
            for (int i = 0; i < kVectorsPerThread; ++i) any |= c.holds_any(t.position(i));
        }
        if (pass != kApply) mine = warp_max_sum(values, any, sign, scale * kLog2E);
    }

    MaxSum total;
    if (pass == kApply) {
        total = c.live ? merged[row] : mine;
    } else {
        total = merge_across_warps(mine, t, merge);
    }
    if (pass == kStatistics || pass == kMerge) {
        MaxSum* result = pass == kMerge ? merged + row : statistics + row * num_chunks + chunk;
        if (c.live && t.lane == 0) *result = total;
        return;
    }

    const Normalizer normalizer(total, sign, scale);
    const int64_t stride = layout.col_strides[kY];
    const int64_t offset = row_offset(layout, kY, row) + c.first_col * stride;
    const bool log = params.log != 0;
    if (params.dtype == kFloat) {
        write(static_cast<float*>(y) + offset, stride, values, t, c, normalizer, log);
    } else if (params.dtype == kHalf) {
        write(static_cast<half*>(y) + offset, stride, values, t, c, normalizer, log);
    } else {
        write(static_cast<bf16*>(y) + offset, stride, values, t, c, normalizer, log);
    }
}
