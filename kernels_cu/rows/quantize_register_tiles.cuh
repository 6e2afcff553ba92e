// Tiles in registers (quantize_register_tiles.cu).
#pragma once
#include "rows/quantize.cuh"
#include "rows/reduce.cuh"
#include "rows/tiles.cuh"

namespace rows {

// kTiles: the vertically adjacent tiles, a stack, of kThreadsPerRow threads; kVectors: a thread's.
constexpr int kTiles = kVectorsPerThread == 1 ? 8 : 1, kVectors = kTiles * kVectorsPerThread;
using Items = Vector<Element, kVectorWidth>;

// This thread's vectors: vector n is in row first + n * step of the stack of tiles.
struct RegisterTiles {
    MatrixTile stack;
    int height, first, step, col;

    DEVICE static RegisterTiles of(const QuantizeTileParams& p, const RowThread& t, int64_t index) {
        RegisterTiles tiles;
        tiles.stack = MatrixTile::of(p, index);
        tiles.height = int(p.scale_row_elements);
        const int per_row = int(p.tile_cols) / kVectorWidth;
        tiles.first = t.lane / per_row;
        tiles.col = (t.lane - tiles.first * per_row) * kVectorWidth;
        tiles.step = kTiles > 1 ? tiles.height : kThreadsPerRow / per_row;
        return tiles;
    }
    DEVICE bool holds(int n) const {
        const int row = first + n * step;
        return (kTiles == 1 || first < height) && row < stack.num_rows && col < stack.num_cols;
    }
};

// Returns largest[i].packed without local memory.
DEVICE uint32_t select_packed(const LargestPacked<Element> (&largest)[kTiles], int i) {
    if constexpr (kTiles == 1) {
        return largest[0].packed;
    } else {
        uint32_t fours[4], pairs[2];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            fours[j] = i & 1 ? largest[2 * j + 1].packed : largest[2 * j].packed;
#pragma unroll
        for (int j = 0; j < 2; ++j) pairs[j] = i & 2 ? fours[2 * j + 1] : fours[2 * j];
        return i & 4 ? pairs[1] : pairs[0];
    }
}

DEVICE void make_scales(const RegisterTiles& tiles, const QuantizeTileParams& p, const RowThread& t,
                        const LargestPacked<Element> (&largest)[kTiles], float* scales,
                        float (&encode)[kTiles]) {
    constexpr bool kLaneEach = kTiles > 1 && kThreadsPerRow >= kTiles;
    const float of_format = largest_finite(p.dtype);
    if constexpr (kLaneEach) {
        const LargestPacked<Element> mine{select_packed(largest, t.lane % kTiles)};
        const QuantizeScale scale(mine.value(), of_format);
        if (t.lane < kTiles && t.lane * tiles.height < tiles.stack.num_rows) {
            scales[tiles.stack.scale + t.lane * p.col_tiles] = scale.decode;
        }
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            encode[i] = shuffle(scale.encode, (lane_id() & ~(kTiles - 1)) + i);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            const QuantizeScale scale(largest[i].value(), of_format);
            if (t.lane == 0 && i * tiles.height < tiles.stack.num_rows) {
                scales[tiles.stack.scale + i * p.col_tiles] = scale.decode;
            }
            encode[i] = scale.encode;
        }
    }
}

template <class Code>
DEVICE void store_tiles(Code* y, const RegisterTiles& tiles, const QuantizeTileParams& p,
                        const Items (&items)[kVectors], const float (&encode)[kTiles]) {
    y += tiles.stack.y + tiles.col + tiles.first * p.y_row;
    const int64_t step = tiles.step * p.y_row;
#pragma unroll
    for (int n = 0; n < kVectors; ++n, y += step) {
        if (!tiles.holds(n)) continue;
        float values[kVectorWidth];
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
            values[j] = items[n][j] * encode[n / kVectorsPerThread];
        }
        Vector<Code, kVectorWidth> codes;
        codes.from_floats(values);
        codes.store(y);
    }
}

DEVICE void quantize_tiles(const Element* x, void* y, float* scales,
                           const QuantizeTileParams& params) {
    const RowThread t = RowThread::here();
    const RegisterTiles tiles =
        RegisterTiles::of(params, t, int64_t(blockIdx.x) * kRowsPerBlock + t.row_in_block);
    x += tiles.stack.x + tiles.col + tiles.first * params.x_row;
    const int64_t step = tiles.step * params.x_row;
    Items items[kVectors];
#pragma unroll
    for (int n = 0; n < kVectors; ++n, x += step) {
        if (tiles.holds(n)) {
            items[n].load(x);
        } else {
            items[n].fill(from_float<Element>(0.0f));
        }
    }
    LargestPacked<Element> largest[kTiles];
#pragma unroll
    for (int n = 0; n < kVectors; ++n) largest[n / kVectorsPerThread].take(items[n]);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) largest[n].across_lanes(1, kLastLaneBit);
    if constexpr (kWarpsPerRow > 1) {
        SHARED(uint32_t, of_warps, [kRowsPerBlock][kTiles][kWarpsPerRow]);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            if (lane_id() == 0) of_warps[t.row_in_block][n][t.lane / kWarpSize] = largest[n].packed;
        }
        sync_block();
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            largest[n].packed = of_warps[t.row_in_block][n][lane_id() % kWarpsPerRow];
            largest[n].across_lanes(1, kWarpsPerRow);
        }
    }
    float encode[kTiles];
    make_scales(tiles, params, t, largest, scales, encode);
    if (params.dtype == kE4m3) {
        store_tiles(static_cast<e4m3*>(y), tiles, params, items, encode);
    } else if (params.dtype == kE5m2) {
        store_tiles(static_cast<e5m2*>(y), tiles, params, items, encode);
    } else {
        store_tiles(static_cast<int8_t*>(y), tiles, params, items, encode);
    }
}

}  // namespace rows
