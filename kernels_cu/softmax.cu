// softmax.cu: y = exp(s - max s) / sum exp(s - max s) along one axis, s = scale * x, or its logarithm.
//
// A row is read once into shared memory (parts/row.cuh), reduced, and written once.  A row longer than
// a block or cluster holds (kSplitRows) takes three launches: kStatistics writes each chunk's MaxSum,
// kMerge makes one of a row's, and kApply reads x a second time.
//   mask    bytes, nonzero = keep; what it hides counts as absent.  Null: keep all.
//   dtype   of y, which need not be Element.
// The scale multiplies after the subtraction, so that 3e38 gives no inf - inf.  Exponents are in base
// 2: exp(s - max s) = exp2((x - x_max) * scale * log2(e)), x_max the x of the largest score.
// Constants: Element, kThreadsPerRow, kVectorWidth, kLanesAcrossRows, kSplitRows.
// Launch: grid (ceil(rows / kRowsPerBlock) * chunks * kClusterSize), block (kNumThreads), dynamic
// shared memory vectors_per_thread * kNumThreads vectors.
#include "parts/math.cuh"
#include "parts/max_sum.cuh"
#include "parts/row.cuh"

enum Pass { kWholeRow, kStatistics, kMerge, kApply };
enum Operand { kX, kY, kMask, kOperands };
enum DType { kHalf, kBf16, kFloat };

struct SoftmaxParams {
    RowLayout<kOperands> layout;
    int64_t num_chunks;
    int32_t vectors_per_thread;
    float scale;
    int32_t dtype;
    int32_t log;  // nonzero: log_softmax
};

using Row = RowVectors<Element>;

// What the mask hides becomes `fill`; true when this thread keeps anything.  mask: at position 0.
DEVICE bool hide(const Row& row, const uint8_t* mask, int64_t stride, Element fill) {
    const bool aligned = stride == 1 && reinterpret_cast<uintptr_t>(mask) % kVectorWidth == 0;
    bool any = false;
    for (int i = 0; i < row.vectors_per_thread; ++i) {
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

// A scale of 0 makes equal scores of all finite x, and NaN of the rest.
DEVICE void multiply_by_zero(const Row& row, Element fill) {
    for (int i = 0; i < row.vectors_per_thread; ++i) {
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

// The MaxSum of this warp's part of the row; every lane of the row gets it.
DEVICE MaxSum warp_max_sum(const Row& row, bool any, float sign, float exponent_scale) {
    float max = any ? -kLargestFloat : -kInfinity;
#pragma unroll 2
    for (int i = 0; i < row.vectors_per_thread; ++i) {
        const Vector<Element, kVectorWidth> x = row[i];
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) max = maximum(max, sign * x[j]);
    }
    max = reduce_in_warp(max, Max());
    const float x_max = max == -kInfinity ? 0.0f : sign * max;
    float sum = 0.0f;
#pragma unroll 2
    for (int i = 0; i < row.vectors_per_thread; ++i) {
        const Vector<Element, kVectorWidth> x = row[i];
        float part = 0.0f;
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
            part += exp2_approx((x[j] - x_max) * exponent_scale);
        }
        sum += part;
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
DEVICE void write(Out* y, int64_t stride, const Row& row, const Normalizer& normalizer, bool log) {
#pragma unroll 2
    for (int i = 0; i < row.vectors_per_thread; ++i) {
        const int position = row.thread.position(i);
        if (!row.chunk.holds_any(position)) continue;
        const Vector<Element, kVectorWidth> x = row[i];
        float values[kVectorWidth];
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
            values[j] = log ? normalizer.log_softmax(x[j]) : normalizer.softmax(x[j]);
        }
        store_row_vector(y, stride, position, row.chunk, values);
    }
}

KERNEL void softmax(const Element* x, const uint8_t* mask, void* y, MaxSum* statistics,
                    const SoftmaxParams params, int64_t pass_argument) {
    announce_to_cluster();
    SHARED_STORAGE(RowStorage<Element>, storage);
    const Pass pass = kSplitRows ? Pass(pass_argument) : kWholeRow;
    const auto& layout = params.layout;
    const int64_t num_chunks = kSplitRows ? params.num_chunks : 1;
    const int64_t group = blockIdx.x / kClusterSize;
    const bool by_chunk = kSplitRows && pass != kMerge;
    const int64_t row_group = by_chunk ? group / num_chunks : group;
    const int64_t chunk = by_chunk ? group % num_chunks : 0;

    const RowThread t = RowThread::here();
    const int chunk_size =
        params.vectors_per_thread * kClusterSize * kThreadsPerRow * kVectorWidth;
    const int64_t row = row_group * kRowsPerBlock + t.row_in_block;
    const Element* x_row = x + row_offset(layout, kX, row);
    const RowChunk c =
        row_chunk(x_row, row, layout.num_rows, layout.num_cols, chunk, chunk_size);
    MaxSum* merged = statistics + layout.num_rows * num_chunks;

    const float sign = params.scale < 0.0f ? -1.0f : 1.0f;
    const float scale = params.scale == 0.0f ? 1.0f : params.scale;
    const MergeMaxSum merge{sign * scale * kLog2E};

    const Row values{storage, t, c, params.vectors_per_thread};
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
        const int64_t stride = layout.col_strides[kX];
        values.load(x_row + c.first_col * stride, stride, fill);
        if (params.scale == 0.0f) multiply_by_zero(values, fill);
        bool any = c.holds_any(t.position(0));
        if (mask) {
            const int64_t stride = layout.col_strides[kMask];
            const uint8_t* p = mask + row_offset(layout, kMask, row) + c.first_col * stride;
            any = hide(values, p, stride, fill);
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
        write(static_cast<float*>(y) + offset, stride, values, normalizer, log);
    } else if (params.dtype == kHalf) {
        write(static_cast<half*>(y) + offset, stride, values, normalizer, log);
    } else {
        write(static_cast<bf16*>(y) + offset, stride, values, normalizer, log);
    }
}
