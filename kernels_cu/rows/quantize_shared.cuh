// quantize for rows in shared memory: largest elements and codes.
#pragma once
#include "rows/quantize.cuh"
#include "rows/load_shared.cuh"

namespace rows {

struct QuantizeRowParams {
    enum Operand { kX, kY, kScale, kOperands };

    RowLayout<kOperands> layout;
    int64_t num_chunks;
    int32_t dtype, padding;
};

using Items = Vector<Element, kVectorWidth>;

struct LargestItem {
    LargestPacked<Element> packed;
    Largest elements;

    DEVICE void take(const Items& x) {
        if constexpr (sizeof(Items) % 4 == 0) {
            packed.take(x);
        } else {
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) elements.take(x[j]);
        }
    }
    // The largest |value| of the warp's part of the row.
    DEVICE float of_warp() const {
        const float mine = sizeof(Items) % 4 == 0 ? packed.value() : elements.value();
        return reduce_in_warp(mine, Larger());
    }
};

DEVICE float warp_largest(const SharedRow<Element>& row) {
    LargestItem largest;
#pragma unroll 2
    for (int i = 0; i < kVectorsPerThread; ++i) largest.take(row[i]);  // zeros outside of the row
    return largest.of_warp();
}
// warp_largest of a chunk that is read for its statistic only: bypasses shared memory.  p: the
// element at position 0.
DEVICE float warp_largest(const Element* p, int64_t stride, const RowThread& t, const RowChunk& c) {
    constexpr int kBatch = kVectorsPerThread < 8 ? kVectorsPerThread : 8;
    LargestItem largest;
#pragma unroll 1
    for (int i = 0; i < kVectorsPerThread; i += kBatch) {
        Items batch[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            const Element zero = from_float<Element>(0.0f);
            batch[j] = load_row_vector(p, stride, t.position(i + j), c, zero);
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j) largest.take(batch[j]);
    }
    return largest.of_warp();
}

template <class Code>
DEVICE void store_codes(Code* y, int64_t stride, const SharedRow<Element>& row, float encode) {
#pragma unroll 2
    for (int i = 0; i < kVectorsPerThread; ++i) {
        const int position = row.thread.position(i);
        if (!row.chunk.holds_any(position)) continue;
        const Vector<Element, kVectorWidth> x = row[i];
        float values[kVectorWidth];
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) values[j] = x[j] * encode;
        store_row_vector(y, stride, position, row.chunk, values);
    }
}

DEVICE void quantize_rows(const Element* x, void* y, float* scales, float* statistics,
                          const QuantizeRowParams& params, int64_t pass) {
    using Params = QuantizeRowParams;
    init_exchange_barriers();
    SHARED_STORAGE(SharedRowStorage<Element>, storage);
    const auto& layout = params.layout;
    const RowThread t = RowThread::here();
    const RowWork work = RowWork::here(pass, params.num_chunks, t);
    const Element* x_row = x + row_offset(layout, Params::kX, work.row);
    const RowChunk c = row_chunk(x_row, work.row, layout.num_rows, layout.num_cols, work.chunk);

    const SharedRow<Element> row{storage, t, c};
    float largest = 0.0f;
    const int64_t x_stride = layout.col_strides[Params::kX];
    const Element* chunk = x_row + c.first_col * x_stride;
    if (kChunked && work.pass == kStatistics) {
        largest = warp_largest(chunk, x_stride, t, c);
    } else if (work.pass != kMerge) {
        row.start(chunk, x_stride, from_float<Element>(0.0f));
        row.finish();
        if (work.pass != kApply) largest = warp_largest(row);
    }
    const MergeFloats<Larger> merge;
    if (!merge_row(work, t, c.live, layout.num_rows, statistics, merge, largest)) return;

    const QuantizeScale scale(largest, largest_finite(params.dtype));
    if (c.live && t.lane == 0 && t.rank == 0 && work.chunk == 0) {
        scales[row_offset(layout, Params::kScale, work.row)] = scale.decode;
    }
    const int64_t stride = layout.col_strides[Params::kY];
    const int64_t offset = row_offset(layout, Params::kY, work.row) + c.first_col * stride;
    if (params.dtype == kE4m3) {
        store_codes(static_cast<e4m3*>(y) + offset, stride, row, scale.encode);
    } else if (params.dtype == kE5m2) {
        store_codes(static_cast<e5m2*>(y) + offset, stride, row, scale.encode);
    } else {
        store_codes(static_cast<int8_t*>(y) + offset, stride, row, scale.encode);
    }
}

}  // namespace rows
