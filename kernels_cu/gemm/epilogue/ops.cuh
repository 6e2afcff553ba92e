// The general epilogue, in registers:
//     out = activation(alpha * (scale_a * (scale_b * accumulator)) + bias) + residual
// with a bias of rows, columns or elements, and any dtypes.  TMA stores the output.
#pragma once
#include "gemm/epilogue/store_box.cuh"
#include "gemm/epilogue/linear_combination.cuh"

namespace gemm {

template <class Tile> struct EpilogueOps {
    using Accumulator = typename Tile::Accumulator;
    using ElementAccumulator = typename Tile::Mainloop::ElementAccumulator;
    using Staging = typename Tile::Staging;
    static constexpr bool kSwapAB = Tile::kSwapAB, kScales = Tile::kScales;
    static constexpr int kMmasM = Tile::kMmasM, kCols = Tile::kCols;
    static constexpr int kChunks = Tile::kChunks, kSlices = Tile::kSlices;
    static constexpr int kSlice = Tile::kSlice, kSlicesOfChunk = Tile::kSlicesOfChunk;
    static constexpr int kValues = Tile::kValues;

    // Column broadcast: lane i has columns 2 i and 2 i + 1 of each chunk; absent: zero.
    struct ColumnBroadcast {
        float pairs[kChunks][2];

        DEVICE void load(const void* p, int64_t stride, int dtype, int col, int64_t num_cols) {
            col += 2 * int(threadIdx.x % 32);
#pragma unroll
            for (int i = 0; i < kChunks * 2; ++i) {
                const int at = col + Tile::chunk_col(i / 2) + i % 2;
                pairs[i / 2][i % 2] =
                    p && at < num_cols ? load_element(p, at * stride, dtype) : 0.0f;
            }
        }
    };
    // Row broadcast: one element per row of the thread's accumulators.
    struct RowBroadcast {
        float rows[kMmasM][2];

        DEVICE void load(const void* p, int64_t stride, int dtype, int row, int64_t num_rows) {
#pragma unroll
            for (int i = 0; i < kMmasM * 2; ++i) {
                const int at = row + i / 2 * 64 + Tile::row_of_half(threadIdx.x % 32, i % 2);
                rows[i / 2][i % 2] =
                    p && at < num_rows ? load_element(p, at * stride, dtype) : 0.0f;
            }
        }
    };

    // Bias and scales of a tile, in registers.
    struct Broadcasts {
        ColumnBroadcast col_bias, col_scale;
        RowBroadcast row_bias, row_scale;

        DEVICE void load(const MatrixEpilogue& e, int row, int col) {
            const EpilogueParams& p = e.params;
            const void* by_row = e.bias_of_rows() ? e.bias : nullptr;
            const void* by_col = e.bias_of_cols() ? e.bias : nullptr;
            if constexpr (kSwapAB) {
                row_bias.load(by_col, p.bias.col, p.bias_dtype, row, p.n);
                col_bias.load(by_row, p.bias.row, p.bias_dtype, col, p.m);
                row_scale.load(e.scale_b, p.scale_b_stride, kFloat, row, p.n);
                col_scale.load(e.scale_a, p.scale_a_stride, kFloat, col, p.m);
            } else {
                row_bias.load(by_row, p.bias.row, p.bias_dtype, row, p.m);
                col_bias.load(by_col, p.bias.col, p.bias_dtype, col, p.n);
                if (!kScales) return;
                row_scale.load(e.scale_a, p.scale_a_stride, kFloat, row, p.m);
                col_scale.load(e.scale_b, p.scale_b_stride, kFloat, col, p.n);
            }
        }
    };

    // L2 prefetch of the residual, during the mainloop.  (row, col): the warp's first accumulator.
    DEVICE static void prefetch_residual(const MatrixEpilogue& e, int row, int col) {
        if (!e.residual) return;
        const EpilogueParams& p = e.params;
        // One prefetch per 128 contiguous bytes.
        const int line = 128 / dtype_size(p.residual_dtype);
        const int along = kSwapAB ? kWarpRows : kCols,
                  across = kSwapAB ? kCols : kMmasM * kWarpRows;
        const int lines = (along + line - 1) / line;
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < across * lines; i += 32) {
            const int far = i / lines, near = i % lines * line;
            const int64_t at_m = kSwapAB ? col + far : row + far / kWarpRows * 64 + far % kWarpRows,
                          at_n = kSwapAB ? row + near : col + near;
            if (at_m >= p.m || at_n >= p.n) continue;
            const int64_t offset = at_m * p.residual.row + at_n * p.residual.col;
            prefetch(element_address(e.residual, offset, p.residual_dtype));
        }
    }

    // values += the elements at (row, col) of `p`, which has the output's shape; all loads are
    // issued before the first addition.
    template <class T>
    DEVICE static void add_elements(const T* p, const MatrixStrides& strides,
                                    const EpilogueParams& params, int row, int col,
                                    float (&values)[kValues]) {
        const int lane = Tile::lane();
        const int64_t by_row = kSwapAB ? strides.col : strides.row,
                      by_col = kSwapAB ? strides.row : strides.col,
                      rows = kSwapAB ? params.n : params.m, cols = kSwapAB ? params.m : params.n;
        T added[kValues];
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            const int at_row = row + Tile::row_of_half(lane, i / 2 % 2),
                      at_col = col + wgmma_col(lane, i);
            const bool there = at_row < rows && at_col < cols;
            added[i] = there ? p[at_row * by_row + at_col * by_col] : from_float<T>(0.0f);
        }
#pragma unroll
        for (int i = 0; i < kValues; ++i) values[i] += to_float(added[i]);
    }
    DEVICE static void add_matrix(const void* p, int dtype, const MatrixStrides& strides,
                                  const EpilogueParams& params, int row, int col,
                                  float (&values)[kValues]) {
        if (dtype == kHalf) {
            add_elements(static_cast<const half*>(p), strides, params, row, col, values);
        } else if (dtype == kBf16) {
            add_elements(static_cast<const bf16*>(p), strides, params, row, col, values);
        } else {
            add_elements(static_cast<const float*>(p), strides, params, row, col, values);
        }
    }

    // The FP32 results of slice `slice`.  (row, col): the slice's first accumulator.
    DEVICE static void finish_slice(const MatrixEpilogue& epilogue, const Broadcasts& broadcasts,
                                    int slice, int row, int col, const Accumulator& accumulator,
                                    float (&values)[kValues]) {
        const EpilogueParams& params = epilogue.params;
        float col_bias[2] = {}, col_scale[2] = {}, row_bias[2] = {}, row_scale[2] = {};
        ElementAccumulator picked[kValues] =
            {};  // cleared; otherwise the previous tile's values would stay live
#pragma unroll
        for (int p = 0; p < kMmasM * kSlices; ++p) {
            if (p != slice) continue;
#pragma unroll
            for (int i = 0; i < kValues; ++i)
                picked[i] = accumulator[p / kSlices][Tile::slice_col(p % kSlices) / 2 + i];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                col_bias[i] = broadcasts.col_bias.pairs[p % kSlices / kSlicesOfChunk][i];
                row_bias[i] = broadcasts.row_bias.rows[p / kSlices][i];
                if (!kScales) continue;
                col_scale[i] = broadcasts.col_scale.pairs[p % kSlices / kSlicesOfChunk][i];
                row_scale[i] = broadcasts.row_scale.rows[p / kSlices][i];
            }
        }
#pragma unroll
        for (int i = 0; i < kValues; ++i) values[i] = float(picked[i]);
        // The broadcast of the column of values i and i + 2.
        const auto of_col = [&](const float (&pair)[2], int i) {
            const int lane = slice % kSlicesOfChunk * kSlice / 2 + i / 4 * 4 + threadIdx.x % 4;
            return shuffle(pair[i % 2], lane);
        };
        if (!kScales && epilogue.scale_b) {
            const float factor = *epilogue.scale_b;
#pragma unroll
            for (int i = 0; i < kValues; ++i) values[i] *= factor;
        }
        if (!kScales && epilogue.scale_a) {
            const float factor = *epilogue.scale_a;
#pragma unroll
            for (int i = 0; i < kValues; ++i) values[i] *= factor;
        }
        const bool scaled_rows = kScales && (kSwapAB ? epilogue.scale_b : epilogue.scale_a);
        const bool scaled_cols = kScales && (kSwapAB ? epilogue.scale_a : epilogue.scale_b);
        if (scaled_cols) {
#pragma unroll
            for (int i = 0; i < kValues; ++i) {
                if (i / 2 % 2 == 1) continue;
                const float factor = of_col(col_scale, i);
                values[i] *= factor;
                values[i + 2] *= factor;
            }
        }
        if (scaled_rows) {
#pragma unroll
            for (int i = 0; i < kValues; ++i) values[i] *= row_scale[i / 2 % 2];
        }
#pragma unroll
        for (int i = 0; i < kValues; ++i)
            values[i] = values[i] * params.alpha + row_bias[i / 2 % 2];
        if (kSwapAB ? epilogue.bias_of_rows() : epilogue.bias_of_cols()) {
#pragma unroll
            for (int i = 0; i < kValues; ++i) {
                if (i / 2 % 2 == 1) continue;
                const float added = of_col(col_bias, i);
                values[i] += added;
                values[i + 2] += added;
            }
        }
        const bool bias_matrix =
            epilogue.bias && !epilogue.bias_of_rows() && !epilogue.bias_of_cols();
#pragma unroll 1  // one instance of the code for bias and residual
        for (int i = 0; i < 2; ++i) {
            const bool first = i == 0;
            if (first ? bias_matrix : epilogue.residual != nullptr) {
                add_matrix(first ? epilogue.bias : epilogue.residual,
                           first ? params.bias_dtype : params.residual_dtype,
                           first ? params.bias : params.residual, params, row, col, values);
            }
            if (first && params.activation != kNoActivation) {
                activate_compact(values, params.activation);
            }
        }
    }

    // TMA store of the warp's accumulators.  (row, col): the first one.  box: the next one to fill.
    DEVICE static void store_boxes(Staging* warps, int& box, const TensorMap& map,
                                   const MatrixEpilogue& epilogue, const Broadcasts& broadcasts,
                                   int row, int col, int batch, const Accumulator& accumulator) {
        const typename Tile::OwnChunks own;
#pragma unroll 1
        for (int slice = 0; slice < kMmasM * kSlices; ++slice) {
            if (!own.has(slice % kSlices / kSlicesOfChunk)) continue;
            const int first_row = row + slice / kSlices * 64,
                      first_col = col + Tile::slice_col(slice % kSlices);
            float values[kValues];
            finish_slice(epilogue, broadcasts, slice, first_row, first_col, accumulator, values);
            StoreBox<Tile>::store_slice(warps, box, map, slice, first_row, first_col, batch,
                                        epilogue.params.out_dtype, values);
        }
    }
};

}  // namespace gemm
