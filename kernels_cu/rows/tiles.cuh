// Tiles of matrices.  A tile of the launch is one tile of x with one scale, or several vertically
// adjacent ones with a scale each.
#pragma once
#include "rows/tile.cuh"

namespace rows {

struct QuantizeTileParams {
    int64_t num_tiles, row_tiles, col_tiles;  // num_tiles: of all matrices, others: of one
    int64_t num_rows, num_cols, tile_rows, tile_cols;
    int64_t scale_rows, scale_row_elements;              // of one matrix; rows of x per scale
    int64_t num_outer_dims, outer_sizes[kMaxOuterDims];  // matrices, innermost dim first
    int64_t x_outer[kMaxOuterDims], x_row, x_col;
    int64_t y_outer[kMaxOuterDims], y_row, y_col;
    int32_t dtype, blocks;  // blocks: of a cluster (quantize_columns.cu)
};

// Offsets and size of a tile.
struct MatrixTile {
    int64_t x, y, scale;  // offsets of its first element and first scale
    int num_rows, num_cols;

    DEVICE static MatrixTile of(const QuantizeTileParams& p, int64_t index) {
        MatrixTile tile{0, 0, 0, 0, 0};
        if (index >= p.num_tiles) return tile;
        const int64_t tile_row = quotient(index, p.col_tiles);
        int64_t matrix = quotient(tile_row, p.row_tiles);
        const int64_t row = (tile_row - matrix * p.row_tiles) * p.tile_rows;
        const int64_t col = (index - tile_row * p.col_tiles) * p.tile_cols;
        tile.scale = (matrix * p.scale_rows + quotient(row, p.scale_row_elements)) * p.col_tiles +
                     (index - tile_row * p.col_tiles);
        tile.x = row * p.x_row + col * p.x_col;
        tile.y = row * p.y_row + col * p.y_col;
        for (int d = 0; d < int(p.num_outer_dims); ++d) {
            const int64_t next = quotient(matrix, p.outer_sizes[d]);
            tile.x += (matrix - next * p.outer_sizes[d]) * p.x_outer[d];
            tile.y += (matrix - next * p.outer_sizes[d]) * p.y_outer[d];
            matrix = next;
        }
        const int64_t rows = p.num_rows - row, cols = p.num_cols - col;
        tile.num_rows = int(rows < p.tile_rows ? rows : p.tile_rows);
        tile.num_cols = int(cols < p.tile_cols ? cols : p.tile_cols);
        return tile;
    }
};

}  // namespace rows
