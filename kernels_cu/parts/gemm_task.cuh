// Which part of a batched product a block computes, and where its matrices lie.

constexpr int kMaxBatchDims = 4;
// The arrays of a product that have a batch.
enum Operand { kA, kB, kOut, kBias, kResidual, kScaleA, kScaleB, kOperands };

// Strides in elements, 0 where an operand is broadcast; the innermost dim first.
struct BatchLayout {
    int64_t num_dims;
    int64_t sizes[kMaxBatchDims];
    int64_t strides[kOperands][kMaxBatchDims];

    DEVICE int64_t offset(int operand, int64_t index) const {
        int64_t sum = 0;
        for (int d = 0; d + 1 < int(num_dims); ++d) {
            const int64_t next = index / sizes[d];
            sum += (index - next * sizes[d]) * strides[operand][d];
            index = next;
        }
        return num_dims > 0 ? sum + index * strides[operand][num_dims - 1] : 0;
    }
};

// One tile of one matrix of the batch, and one split of its k.
struct GemmTask {
    int64_t batch, row, col;  // of the tile's first element
    int64_t tile, split;      // tile: its number in the batch's order

    // Blocks that run at the same time share rows of A and columns of B in the L2 cache: they go down
    // kGroup tiles before they go right.  All tiles of a split follow each other.
    DEVICE static GemmTask of_block(int64_t index, int64_t tiles_m, int64_t tiles_n, int64_t batch,
                                    int tile_m, int tile_n) {
        constexpr int kGroup = 8;
        GemmTask task;
        const int64_t tiles = tiles_m * tiles_n;
        task.tile = index % (tiles * batch);
        task.split = index / (tiles * batch);
        task.batch = task.tile / tiles;
        const int64_t in_matrix = task.tile - task.batch * tiles;
        const int64_t group = in_matrix / (kGroup * tiles_n);
        const int64_t in_group = in_matrix - group * (kGroup * tiles_n);
        const int64_t rest = tiles_m - group * kGroup, height = rest < kGroup ? rest : kGroup;
        task.row = (group * kGroup + in_group % height) * tile_m;
        task.col = in_group / height * tile_n;
        return task;
    }
};
