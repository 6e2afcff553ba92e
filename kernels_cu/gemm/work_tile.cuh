// Work tiles of a batched GEMM, and the offsets of its matrices.
#pragma once

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

// A tile of one matrix of the batch, and a split of its k.
struct GemmWorkTile {
    int64_t batch, row, col;  // the tile's first element
    int64_t tile, split;      // tile: index in the batch's order

    // Rasterisation: down `height` tiles, then right, so that concurrent blocks share rows of A and
    // columns of B in L2.  The tiles of one split are consecutive; fewer than 2^31 in all.
    DEVICE static GemmWorkTile of_block(uint32_t index, uint32_t tiles_m, uint32_t tiles_n,
                                        uint32_t batch, int tile_m, int tile_n,
                                        uint32_t height = 8) {
        if (height > tiles_m) height = tiles_m;
        // Avoids divisions by 1: the tensor cores are idle until a block has computed its tile.
        const auto divide = [](uint32_t x, uint32_t by) {
            return x < by ? 0 : by == 1 ? x : x / by;
        };
        GemmWorkTile work;
        const uint32_t tiles = tiles_m * tiles_n;
        const uint32_t split = divide(index, tiles * batch), tile = index - split * tiles * batch;
        const uint32_t matrix = divide(tile, tiles), in_matrix = tile - matrix * tiles;
        const uint32_t group = divide(in_matrix, height * tiles_n);
        const uint32_t in_group = in_matrix - group * height * tiles_n;
        const uint32_t top = group * height, rest = tiles_m - top;
        const uint32_t rows = rest < height ? rest : height, col = divide(in_group, rows);
        work.row = int64_t(top + in_group - col * rows) * tile_m;
        work.col = int64_t(col) * tile_n;
        work.batch = matrix;
        work.tile = tile;
        work.split = split;
        return work;
    }
};
