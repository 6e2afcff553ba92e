// dequantize_8bit.cu: y = x for a matrix of FP8 or int8 elements, exact in FP16 and BF16.
//
// For products of many rows: weights are converted once, not by each tile.
// Types: Source of x, Element of y.  Launch: grid (any), block (kNumThreads).
#include "parts/vector.cuh"

struct Dequantize8bitParams {
    int64_t source_stride, result_stride;  // of rows, in elements; both have aligned rows
    int64_t num_chunks;                    // of kChunk columns, less than 2^32
    int32_t row_chunks, num_cols;
};

constexpr int kChunk = 16, kAtOnce = 4;  // columns of a load; loads in flight per thread

KERNEL void dequantize_8bit(const Source* x, Element* y, const Dequantize8bitParams p) {
    wait_for_previous_grid();
    const int64_t step = int64_t(gridDim.x) * kNumThreads;
    int64_t first = int64_t(blockIdx.x) * kNumThreads + threadIdx.x;
    for (; first < p.num_chunks; first += kAtOnce * step) {
        Vector<Source, kChunk> chunks[kAtOnce];
        int64_t rows[kAtOnce];
        int cols[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int64_t number = first + i * step;
            if (number >= p.num_chunks) continue;
            rows[i] = uint32_t(number) / uint32_t(p.row_chunks);
            cols[i] = int(uint32_t(number) - uint32_t(rows[i]) * uint32_t(p.row_chunks)) * kChunk;
            const Source* from = x + rows[i] * p.source_stride + cols[i];
            const int there = p.num_cols - cols[i];
            if (there >= kChunk) {
                chunks[i].load(from);
            } else {
                Source elements[kChunk];
#pragma unroll
                for (int j = 0; j < kChunk; ++j)
                    elements[j] = j < there ? from[j] : from_float<Source>(0.0f);
                chunks[i].from_elements(elements);
            }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (first + i * step >= p.num_chunks) continue;
            float values[kChunk];
#pragma unroll
            for (int j = 0; j < kChunk; ++j) values[j] = chunks[i][j];
            Vector<Element, kChunk> converted;
            converted.from_floats(values);
            converted.store(y + rows[i] * p.result_stride + cols[i]);
        }
    }
}
