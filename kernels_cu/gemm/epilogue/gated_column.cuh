// The gated epilogue of mixed input: a thread has the accumulators of both products for one output
// column and 2 of every 8 rows of the tile.
#pragma once
#include "gemm/epilogue/gated_scales.cuh"
#include "gemm/epilogue/gate_silu.cuh"
#include "gemm/mainloop_sm90.cuh"

namespace gemm {

// out: without scale_b.  factors: the column's scale per product.  alphas: alpha per product.
template <class Mainloop, class Gate> struct GatedColumn {
    using Accumulator = typename Mainloop::Accumulator;
    static constexpr int kCols = Mainloop::kCols;
    // TMA stores a warpgroup's columns in boxes of kBoxRows rows; the warpgroup alternates between
    // two boxes.
    static constexpr int kBoxRows = kCols % 32 == 0 ? 32 : 16, kBoxes = kCols / kBoxRows;
    static constexpr int kBoxRowBytes = 2 * 32, kBoxBytes = kBoxRows * kBoxRowBytes;
    static constexpr int kStagingBytes = 2 * kBoxBytes;  // per warpgroup
    static constexpr int kCount = kBoxRows / 4;          // results per thread and box
    using Values = float[kCount];

    const MatrixEpilogue& out;
    const Gate& gate;
    const float (&factors)[2];
    const float (&alphas)[2];

    // Index in the warpgroup.  Rematerialised so that it is not live across the mainloop.
    DEVICE static int thread() { return opaque(threadIdx.x) & 127; }
    // Row of a thread's result `i` in a box; first: row of result 0.
    DEVICE static int row_of(int first, int i) { return first + i / 2 * 8 + i % 2; }

    // Computes a thread's results of the tile's box `box`; (row, col): the first one.
    DEVICE void results(const Accumulator& accumulator, int box, int row, int col,
                        Values& values) const {
        Values others;
#pragma unroll
        for (int known = 0; known < kBoxes; ++known) {
            if (known != box) continue;
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                const int at = known * 2 * kCount + i / 2 * 4 + i % 2;
                values[i] = float(accumulator[0][at]);
                others[i] = float(accumulator[0][at + 2]);
            }
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            values[i] *= factors[0];
            others[i] *= factors[1];
        }
        if (out.scale_a) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                const float factor = GatedScales::row(out, row_of(row, i));
                values[i] *= factor;
                others[i] *= factor;
            }
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            values[i] *= alphas[0];
            others[i] *= alphas[1];
        }
        typename Gate::Rows rows[2];  // none: a thread has one column
        static_assert(Gate::Rows::kCount == 0, "a lane has columns of a row");
        // Captured by value: otherwise the accumulators would be in local memory.
        gate.apply(values, others, [=](int i) { return Element{row_of(row, i), col, true}; }, rows);
    }

    // Stores from the registers, without TMA.  row: the tile's first row.
    DEVICE void store(int row, int col, const Accumulator& accumulator) const {
        row += thread() % 4 * 2;
#pragma unroll 1
        for (int box = 0; box < kBoxes; ++box, row += kBoxRows) {
            Values values;
            results(accumulator, box, row, col, values);
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                const float one[1] = {values[i]};
                if (row_of(row, i) < out.params.m)
                    out.template write_as<typename Gate::Narrow>(row_of(row, i), col, 1, one);
            }
        }
    }
    // count: tiles that the warpgroup has stored before.
    DEVICE void store_by_tma(unsigned char* staging, const TensorMap& map, int row, int col,
                             int batch, int count, const Accumulator& accumulator) const {
        const int thread = GatedColumn::thread(), barrier = 1 + int(threadIdx.x) / 128;
        const int place = thread % kBoxRows * kBoxRowBytes + thread / 32 * 16;
        const int swizzled = place ^ (place >> 3 & (kBoxRowBytes - 16));
#pragma unroll 1
        for (int box = 0; box < kBoxes; ++box, row += kBoxRows) {
            Values values;
            results(accumulator, box, row + thread % 4 * 2, col, values);
            uint32_t packed[kCount / 2];
#pragma unroll
            for (int i = 0; i < kCount / 2; ++i) {
                packed[i] = out.params.out_dtype == kHalf
                                ? pack<half>(values[2 * i], values[2 * i + 1])
                                : pack<bf16>(values[2 * i], values[2 * i + 1]);
            }
            unsigned char* to = staging + (count * kBoxes + box) % 2 * kBoxBytes;
            if (thread == 0) tma_store_wait_read<1>();  // the previous box can be in flight
            named_barrier(barrier, 128);
            store_matrix<true>(to + swizzled, packed);
            fence_async_proxy();
            named_barrier(barrier, 128);
            if (thread == 0) {
                tma_store(map, to, {col, row, batch});
                tma_store_commit();
            }
        }
    }
};

}  // namespace gemm
