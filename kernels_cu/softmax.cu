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

// What the mask hides in vectors [begin, end) becomes `fill`; true when this thread keeps anything
// there.  mask: at position 0.
DEVICE bool hide(const Row& row, int begin, int end, const uint8_t* mask, int64_t stride,
                 Element fill) {
    const bool aligned = stride == 1 && reinterpret_cast<uintptr_t>(mask) % kVectorWidth == 0;
    bool any = false;
    for (int i = begin; i < end; ++i) {
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
DEVICE void multiply_by_zero(const Row& row, int begin, int end, Element fill) {
    for (int i = begin; i < end; ++i) {
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

// The MaxSum of this thread's vectors [begin, end), of which it keeps something or not.
DEVICE MaxSum max_sum(const Row& row, int begin, int end, bool any, float sign,
                      float exponent_scale) {
    Vector<Element, kVectorWidth> larger;
    larger.fill(from_float<Element>(-kInfinity));
#pragma unroll 2
    for (int i = begin; i < end; ++i) larger.take_larger(row[i], sign < 0.0f);
    float max = any ? -kLargestFloat : -kInfinity;
#pragma unroll
    for (int j = 0; j < kVectorWidth; ++j) max = maximum(max, larger[j]);
    const float x_max = max == -kInfinity ? 0.0f : sign * max;
    float sum = 0.0f;
#pragma unroll 2
    for (int i = begin; i < end; ++i) {
        const Vector<Element, kVectorWidth> x = row[i];
        float part = 0.0f;
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
            part += exp2_approx((x[j] - x_max) * exponent_scale);
        }
        sum += part;
    }
    return {max, sum};
}

// What the row's MaxSum makes of an element.  Nothing kept: zero, or -inf of the logarithm.  Nothing but
// -inf kept, or a NaN: NaN.
struct Normalizer {
    float x_max, scale, exponent_scale, factor, log_sum;

    DEVICE Normalizer(const MaxSum& total, float sign, float scale)
        : x_max(0.0f), scale(scale), exponent_scale(scale * kLog2E), factor(0.0f), log_sum(0.0f) {
        if (total.max == -kInfinity) return;
        const bool proper = total.sum > 0.0f;  // false for NaN
        x_max = sign * total.max;
        factor = proper ? 1.0f / total.sum : kInfinity - kInfinity;
        log_sum = proper ? log_accurate(total.sum) : kInfinity - kInfinity;
    }
    DEVICE float softmax(float x) const {
        return exp2_approx((x - x_max) * exponent_scale) * factor;
    }
    DEVICE float log_softmax(float x) const { return (x - x_max) * scale - log_sum; }
};

template <class Out>
DEVICE void write(Out* y, int64_t stride, const Row& row, const Normalizer& normalizer, bool log) {
#pragma unroll 2
    for (int i = 0; i < row.count; ++i) {
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
    const int64_t row_index = row_group * kRowsPerBlock + t.row_in_block;
    const Element* x_row = x + row_offset(layout, kX, row_index);
    const RowChunk c =
        row_chunk(x_row, row_index, layout.num_rows, layout.num_cols, chunk, chunk_size);
    MaxSum* merged = statistics + layout.num_rows * num_chunks;

    const float sign = params.scale < 0.0f ? -1.0f : 1.0f;
    const float scale = params.scale == 0.0f ? 1.0f : params.scale;
    const MergeMaxSum merge{sign * scale * kLog2E};

    const Row row{storage, t, c, params.vectors_per_thread};
    MaxSum mine{-kInfinity, 0.0f};
    if (pass == kMerge) {
        if (c.live) {
            for (int64_t i = t.lane; i < num_chunks; i += kThreadsPerRow) {
                mine = merge(mine, statistics[row_index * num_chunks + i]);
            }
        }
    } else {
        const Element fill = from_float<Element>(-sign * kInfinity);
        const int64_t x_stride = layout.col_strides[kX];
        const int64_t mask_stride = layout.col_strides[kMask];
        if (mask) mask += row_offset(layout, kMask, row_index) + c.first_col * mask_stride;
        row.load(x_row + c.first_col * x_stride, x_stride, fill);
        for (int batch = 0; batch < Row::kBatches; ++batch) {
            const int begin = row.batch_begin(batch), end = row.batch_begin(batch + 1);
            row.wait(batch);
            if (params.scale == 0.0f) multiply_by_zero(row, begin, end, fill);
            bool any = begin < end && c.holds_any(t.position(begin));
            if (mask) any = hide(row, begin, end, mask, mask_stride, fill);
            if (pass == kApply || begin == end) continue;
            mine = merge(mine, max_sum(row, begin, end, any, sign, scale * kLog2E));
        }
    }

    MaxSum total;
    if (pass == kApply) {
        total = c.live ? merged[row_index] : mine;
    } else {
        total = merge_across_warps(reduce_statistic_in_warp(mine, merge), t, merge);
    }
    if (pass == kStatistics || pass == kMerge) {
        MaxSum* result = pass == kMerge ? merged + row_index : statistics + row_index * num_chunks + chunk;
        if (c.live && t.lane == 0) *result = total;
        return;
    }

    const Normalizer normalizer(total, sign, scale);
    const int64_t stride = layout.col_strides[kY];
    const int64_t offset = row_offset(layout, kY, row_index) + c.first_col * stride;
    const bool log = params.log != 0;
    if (params.dtype == kFloat) {
        write(static_cast<float*>(y) + offset, stride, row, normalizer, log);
    } else if (params.dtype == kHalf) {
        write(static_cast<half*>(y) + offset, stride, row, normalizer, log);
    } else {
        write(static_cast<bf16*>(y) + offset, stride, row, normalizer, log);
    }
}
