// Tiles of any size, read from global memory twice (quantize_global_tiles.cu).
#pragma once
#include "rows/quantize.cuh"
#include "rows/reduce.cuh"
#include "rows/tiles.cuh"

namespace rows {

// A vector of a tile: its coordinates, and its number of columns.
struct TileVector { int row, col, count; };

// The vectors of a tile; this thread has every kThreadsPerRow-th from its lane on.
struct TileVectors {
    int num_cols, per_row, count;

    DEVICE static TileVectors of(const MatrixTile& tile) {
        const int per_row = (tile.num_cols + kVectorWidth - 1) / kVectorWidth;
        return {tile.num_cols, per_row, per_row * tile.num_rows};
    }
    DEVICE TileVector operator[](int i) const {
        const int row = i / per_row, col = (i - row * per_row) * kVectorWidth;
        const int rest = num_cols - col;
        return {row, col, rest < kVectorWidth ? rest : kVectorWidth};
    }
};

struct TileSource {
    const Element* x;
    int64_t row_stride, col_stride;

    DEVICE void get(const TileVector& at, float (&values)[kVectorWidth]) const {
        const Element* p = x + at.row * row_stride + at.col * col_stride;
        if (at.count == kVectorWidth && kVectorWidth > 1) {
            Vector<Element, kVectorWidth> vector;
            vector.load(p);
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) values[j] = vector[j];
        } else {
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) {
                values[j] = j < at.count ? to_float(p[j * col_stride]) : 0.0f;
            }
        }
    }
};

template <class Code>
DEVICE void store(Code* y, const QuantizeTileParams& p, const TileVector& at, float encode,
                  float (&values)[kVectorWidth]) {
#pragma unroll
    for (int j = 0; j < kVectorWidth; ++j) values[j] *= encode;
    Code* to = y + at.row * p.y_row + at.col * p.y_col;
    if (at.count == kVectorWidth && kVectorWidth > 1) {
        Vector<Code, kVectorWidth> vector;
        vector.from_floats(values);
        vector.store(to);
    } else {
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
            if (j < at.count) to[j * p.y_col] = from_float<Code>(values[j]);
        }
    }
}

// first: the thread's first vector, still in registers.
template <class Code>
DEVICE void store_tile(Code* y, const QuantizeTileParams& p, const MatrixTile& tile,
                       const TileSource& source, const TileVectors& vectors, const RowThread& t,
                       float encode, float (&first)[kVectorWidth]) {
    y += tile.y;
    if (t.lane < vectors.count) store(y, p, vectors[t.lane], encode, first);
#pragma unroll 1
    for (int i = t.lane + kThreadsPerRow; i < vectors.count; i += kThreadsPerRow) {
        float values[kVectorWidth];
        const TileVector at = vectors[i];
        source.get(at, values);
        store(y, p, at, encode, values);
    }
}

DEVICE void quantize_tile(const Element* x, void* y, float* scales,
                          const QuantizeTileParams& params) {
    const RowThread t = RowThread::here();
    const int64_t index = int64_t(blockIdx.x) * kRowsPerBlock + t.row_in_block;
    const MatrixTile tile = MatrixTile::of(params, index);
    const TileVectors vectors = TileVectors::of(tile);
    const TileSource source{x + tile.x, params.x_row, params.x_col};
    Largest mine;
    float first[kVectorWidth] = {};
    if (t.lane < vectors.count) source.get(vectors[t.lane], first);
#pragma unroll
    for (int j = 0; j < kVectorWidth; ++j) mine.take(first[j]);
#pragma unroll 4
    for (int i = t.lane + kThreadsPerRow; i < vectors.count; i += kThreadsPerRow) {
        float values[kVectorWidth];
        source.get(vectors[i], values);
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) mine.take(values[j]);
    }
    const float of_warp = reduce_in_warp(mine.value(), Larger());
    const float largest = merge_across_warps<0>(of_warp, t, MergeFloats<Larger>());
    if (index >= params.num_tiles) return;
    const QuantizeScale scale(largest, largest_finite(params.dtype));
    const float encode = scale.encode;
    if (t.lane == 0) scales[tile.scale] = scale.decode;
    if (params.dtype == kE4m3) {
        store_tile(static_cast<e4m3*>(y), params, tile, source, vectors, t, encode, first);
    } else if (params.dtype == kE5m2) {
        store_tile(static_cast<e5m2*>(y), params, tile, source, vectors, t, encode, first);
    } else {
        store_tile(static_cast<int8_t*>(y), params, tile, source, vectors, t, encode, first);
    }
}

}  // namespace rows
