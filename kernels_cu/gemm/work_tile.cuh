// Work tiles of a batched GEMM, and the offsets of its matrices.
#pragma once
#include "common/fast_divmod.cuh"

constexpr int kMaxBatchDims = 4;
// Block of a block scale: along k of A and B, and along the columns of B.
constexpr int kScaleBlock = 128;
// Arrays of a GEMM that have batch strides.
enum Operand {
    kA,
    kB,
    kOut,
    kBias,
    kResidual,
    kScaleA,
    kScaleB,
    kGroupsA,
    kGroupsB,
    kB2,
    kScaleB2,
    kGroupsB2,  // of a dual GEMM's second product
    kOperands
};

// Strides of rows and columns in elements, 0 where an operand is broadcast.
struct MatrixStrides { int64_t row, col; };

// Strides in elements, 0 where an operand is broadcast; the innermost dim first.
struct BatchLayout {
    int64_t num_dims;
    int64_t sizes[kMaxBatchDims];
    int64_t strides[kOperands][kMaxBatchDims];

    // Offset of the operand's matrix `index`; `index` is less than 2^31.
    DEVICE int64_t offset(int operand, int64_t index) const {
        int64_t sum = 0;
        uint32_t rest = uint32_t(index);
#pragma unroll 1
        for (int d = 0; d + 1 < int(num_dims); ++d) {
            const uint32_t size = uint32_t(sizes[d]), next = rest / size;
            sum += int64_t(rest - next * size) * strides[operand][d];
            rest = next;
        }
        return num_dims > 0 ? sum + int64_t(rest) * strides[operand][num_dims - 1] : 0;
    }
};

// Rasterisation of a batch's output tiles: matrix by matrix, down a group of rows of tiles, then
// right, so that concurrent blocks share rows of A and columns of B in L2.  The host computes the
// divisors (gemm/product.py: fill_order): a block must know its tile before it can load.
struct TileOrder {
    FastDivmod split;            // tiles of the batch; the tiles of one split of k are consecutive
    FastDivmod matrix;           // tiles of a matrix
    FastDivmod group;            // tiles of a group
    FastDivmod rows, last_rows;  // rows of tiles of a group, and of a shorter group at the end
    int64_t whole_groups;        // groups of a matrix without the shorter one

    DEVICE int num_tiles() const { return split.divisor; }
};

// A tile of one matrix of the batch, and a split of its k.
struct GemmWorkTile {
    int64_t batch, row, col;  // the tile's first element
    int64_t tile, split;      // tile: index in the batch's order

    // The tile of block `index`; fewer than 2^31 blocks in all.
    DEVICE static GemmWorkTile of_block(int index, const TileOrder& order, int tile_m, int tile_n) {
        int split = index;
        const int tile = order.split.divide(split);
        GemmWorkTile work = of_tile(tile, order, tile_m, tile_n);
        work.split = split;
        return work;
    }
    // The tile at `index` in the batch's order, of all k.
    DEVICE static GemmWorkTile of_tile(int index, const TileOrder& order, int tile_m, int tile_n) {
        int matrix = index;
        int group = order.matrix.divide(matrix);
        int col = order.group.divide(group);
        const bool whole = group < int(order.whole_groups);
        const int row = (whole ? order.rows : order.last_rows).divide(col);
        GemmWorkTile work;
        work.row = int64_t(group * order.rows.divisor + row) * tile_m;
        work.col = int64_t(col) * tile_n;
        work.batch = matrix;
        work.tile = index;
        work.split = 0;
        return work;
    }
};
