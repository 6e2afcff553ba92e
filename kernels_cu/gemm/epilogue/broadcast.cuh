// Row and column broadcasts of a tile: bias and scales in shared memory.  A warp of the producer
// warpgroup loads them during the mainloop.  Rows and columns are the output's.
#pragma once
#include "gemm/epilogue/tile.cuh"
#include "gemm/epilogue/linear_combination.cuh"
#include "gemm/work_tile.cuh"

namespace gemm {

struct alignas(8) ColumnPair { float values[2]; };

template <class Tile> struct TileBroadcast {
    using Mainloop = typename Tile::Mainloop;
    static constexpr bool kScales = Tile::kScales, kSwapAB = Tile::kSwapAB;
    static constexpr bool kGeneral = Tile::kGeneral;
    static constexpr int kTileN = Mainloop::kTileN;
    // 16-bit operands: an optional scale per matrix, if there is no residual.
    static constexpr bool kMatrixScales = kGeneral && !Tile::kEightBits && !kSwapAB;
    // Without the general epilogue: the scale of one matrix, instead of alpha.
    static constexpr bool kMatrixScale = !kGeneral && !Tile::kEightBits;
    static constexpr int kColVectors = kScales ? 2 : 1;
    static constexpr int kRowScales = kScales ? Mainloop::kTileM : 0;
    alignas(16) float cols[kColVectors][kTileN];  // scale_b (if kScales), bias
    // scale_a; with kMatrixScales scale_b and scale_a, with kMatrixScale alpha.
    float rows[kRowScales > 0 ? kRowScales : 2];
    // The tile's row, column and batch index in the output.  Fourth word: with the general
    // epilogue the batch index in the residual, otherwise whether there is a bias.
    Bytes<16> origin;
    Barrier full, empty;

    DEVICE void init() {
        full.init(kScales ? 3 : 1, 32);  // arrivals: scales of A, scales of B, the rest
        // One arrival per warp that stores the tile.
        empty.init(4 * (Mainloop::kCooperative ? Mainloop::kConsumers : 1), 32);
    }
    // Called by one warp: loads a tile's broadcasts once the previous ones have been read.  An
    // absent scale is 1.  The bias is halved for gelu_of_twice.
    DEVICE void load(const EpilogueParams& p, const BatchLayout& batch, const GemmWorkTile& tile,
                     const float* scale_a, const float* scale_b, const void* bias, int count) {
        empty.wait((count & 1) ^ 1);
        if (threadIdx.x % 32 == 0) {
            origin = {uint32_t(tile.row), uint32_t(tile.col),
                      uint32_t(batch.offset(kOut, tile.batch)),
                      kGeneral ? uint32_t(batch.offset(kResidual, tile.batch))
                               : uint32_t(bias != nullptr)};
        }
        const int cols_there = int(p.n) - int(tile.col);
        if constexpr (kScales) {
            // StoreTma multiplies only by the two scales, so alpha replaces an absent scale.  This
            // is exact (sm90_epilogue.py).
            const float of_rows = !Tile::kRowScales || scale_a ? 1.0f : p.alpha;
            const float of_cols = !Tile::kRowScales || scale_b || !scale_a ? 1.0f : p.alpha;
            load_scales(cols[0], kTileN, scale_b, batch.offset(kScaleB, tile.batch), tile.col,
                        p.scale_b_stride, cols_there, of_cols);
            load_scales(rows, kRowScales, scale_a, batch.offset(kScaleA, tile.batch), tile.row,
                        p.scale_a_stride, int(p.m) - int(tile.row), of_rows);
        }
        if constexpr (kMatrixScales) {
            if (threadIdx.x % 32 == 0) {
                rows[0] = scale_b ? scale_b[batch.offset(kScaleB, tile.batch)] : 1.0f;
                rows[1] = scale_a ? scale_a[batch.offset(kScaleA, tile.batch)] : 1.0f;
            }
        }
        if constexpr (kMatrixScale) {
            if (threadIdx.x % 32 == 0) {
                rows[0] = scale_b   ? scale_b[batch.offset(kScaleB, tile.batch)]
                          : scale_a ? scale_a[batch.offset(kScaleA, tile.batch)]
                                    : p.alpha;
            }
        }
        load_bias(bias, batch.offset(kBias, tile.batch) + tile.col * p.bias.col, p.bias.col,
                  p.bias_dtype, cols_there, p.activation == kGelu ? 0.5f : 1.0f);
        sync_warp();
        full.arrive_for<32>();
    }
    // Loads scales; `there` of them exist, the rest is undefined.  Uses TMA if they are contiguous
    // and aligned: element by element takes longer than the mainloop of a small k, and batched
    // loads or cp.async slow FP8's mainloop by 1% for large k.
    DEVICE void load_scales(float* to, int count, const float* scales, int64_t offset,
                            int64_t first, int64_t stride, int there, float absent) {
        const int lane = threadIdx.x % 32;
        const bool any = scales && there > 0;
        const float* from = scales + offset + first * stride;
        const int bytes = 4 * (there < count ? there : count);
        if (any && stride == 1 && (reinterpret_cast<uint64_t>(from) | bytes) % 16 == 0) {
            if (lane == 0) {
                full.arrive_expect_tx(bytes);
                bulk_load(to, from, bytes, full);
            } else if (kEveryThreadArrives) full.arrive();
            return;
        }
        const float one = any ? *from : absent;
#pragma unroll 1
        for (int i = lane; i < count; i += 32)
            to[i] = any && stride != 0 && i < there ? from[i * stride] : one;
        fence_async_proxy();  // TMA can write the next tile's scales
        sync_warp();
        full.arrive_for<32>();
    }
    // Loads the bias times `factor`; with 16-bit operands a lane has four loads in flight.
    DEVICE void load_bias(const void* bias, int64_t offset, int64_t stride, int dtype, int there,
                          float factor) {
        constexpr int kAtOnce = kScales ? 1 : 4;
#pragma unroll 1
        for (int first = threadIdx.x % 32; first < kTileN; first += 32 * kAtOnce) {
            uint32_t bits[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int col = first + 32 * i;
                bits[i] = 0;
                if (!bias || col >= there || col >= kTileN) continue;
                const int64_t at = offset + col * stride;
                bits[i] = dtype == kFloat ? static_cast<const uint32_t*>(bias)[at]
                                          : static_cast<const uint16_t*>(bias)[at];
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int col = first + 32 * i;
                float value = bit_cast<float>(bits[i]), other;
                if (dtype == kHalf) unpack<half>(bits[i], value, other);
                if (dtype == kBf16) unpack<bf16>(bits[i], value, other);
                if (col < kTileN) cols[kColVectors - 1][col] = value * factor;
            }
        }
    }
    // The broadcasts of two adjacent columns, the first even.
    DEVICE ColumnPair pair(int vector, int col) const {
        return *reinterpret_cast<const ColumnPair*>(&cols[vector][col]);
    }
    DEVICE float alpha(const EpilogueParams& p) const { return kMatrixScale ? rows[0] : p.alpha; }
    // Whether to read the bias; false only where the general epilogue is not compiled in.
    DEVICE bool biased() const { return !Mainloop::kFp8 || kGeneral || origin.words[3] != 0; }
    // Called by each warp after its last read.
    DEVICE void release() {
        sync_warp();
        empty.arrive_for<32>();
    }
};

// scale_a of a lane's rows, if each row has one.  row: the warp's first row in the tile.
template <class Tile> struct RowScaleFragment {
    float rows[Tile::kMmasM][2];

    DEVICE void load(const TileBroadcast<Tile>& broadcast, int row) {
#pragma unroll
        for (int i = 0; i < 2 * Tile::kMmasM; ++i) {
            const int below = 64 * (i / 2) + int(threadIdx.x) % 32 / 4 + 8 * (i % 2);
            rows[i / 2][i % 2] = Tile::kRowScales ? broadcast.rows[row + below] : 1.0f;
        }
    }
};

}  // namespace gemm
