// gemm_hopper.cu: gemm.cu's products on Hopper: out = activation(alpha * (A @ B) + bias) + residual.
//
// As many blocks as the GPU runs at once walk through the tiles; the loads of a block's next tile begin
// while it finishes one.  A warp finishes 16 rows at a time: where TMA can store the output, in registers;
// else by way of shared memory in runs of neighbouring columns (parts/epilogue.cuh).
// Constants: those of parts/mainloop_hopper.cuh.
// Launch: grid (any), block (kNumThreads = 384), dynamic shared memory
// sizeof(HopperStorage).  Tensor maps: (batch, m, k) of A and (batch, n, k) of B, or with their last two
// dims swapped where kOuterMajor; (batch, m, n) of out, boxes of 16 x 64.  The maps' batch is
// BatchLayout's offset of kA, kB and kOut.
#include "parts/epilogue.cuh"
#include "parts/gemm_task.cuh"
#include "parts/mainloop_hopper.cuh"

struct HopperParams {
    BatchLayout batch;
    int64_t batch_size, num_k_tiles, tiles_m, tiles_n;
    EpilogueParams epilogue;
    int32_t tma_stores, group_height;  // in tiles (GemmTask::of_block)
};

constexpr int kChunk = 64;  // columns that a warp finishes at once
constexpr int kWarpRows = 16;

// A warp's way to memory: boxes that it fills in turn and TMA stores, or one chunk in FP32.
union Staging {
    unsigned char boxes[2][kWarpRows * kLineBytes];
    float chunk[kWarpRows][kChunk];
};

struct HopperStorage {
    Staging staging[4 * kConsumers];
    Ring ring;
};

// A block of 384 threads begins with 3 * 168 a thread.
constexpr int kProducerRegisters = kPingPong ? 40 : 56;
constexpr int kConsumerRegisters = (3 * 168 - kProducerRegisters) / kConsumers;

// Numbers of a tile's columns, those of a chunk spread over a warp's lanes; absent ones are zero.
struct ColumnNumbers {
    float pairs[kTileN / kChunk][2];

    DEVICE void load(const void* p, int64_t stride, int dtype, int col, int64_t num_cols) {
        col += 2 * int(threadIdx.x % 32);
#pragma unroll
        for (int i = 0; i < kTileN / kChunk * 2; ++i) {
            const int at = col + i / 2 * kChunk + i % 2;
            pairs[i / 2][i % 2] = p && at < num_cols ? load_number(p, at * stride, dtype) : 0.0f;
        }
    }
};
// The same of the rows of a thread's accumulators.
struct RowNumbers {
    float rows[kBlocks][2];

    DEVICE void load(const void* p, int64_t stride, int dtype, int row, int64_t num_rows) {
        row += threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < kBlocks * 2; ++i) {
            const int at = row + i / 2 * 64 + i % 2 * 8;
            rows[i / 2][i % 2] = p && at < num_rows ? load_number(p, at * stride, dtype) : 0.0f;
        }
    }
};

constexpr bool kScales = sizeof(ElementA) == 1;  // others come without

// What a tile's sums go through in registers: vectors are loaded before the sums are there.
struct TileVectors {
    ColumnNumbers col_bias, col_scale;
    RowNumbers row_bias, row_scale;

    DEVICE void load(const Epilogue& e, int row, int col) {
        const EpilogueParams& p = e.params;
        row_bias.load(e.bias_of_rows() ? e.bias : nullptr, p.bias.row, p.bias_dtype, row, p.m);
        col_bias.load(e.bias_of_cols() ? e.bias : nullptr, p.bias.col, p.bias_dtype, col, p.n);
        if (!kScales) return;
        row_scale.load(e.scale_a, p.scale_a_stride, kFloat, row, p.m);
        col_scale.load(e.scale_b, p.scale_b_stride, kFloat, col, p.n);
    }
};

constexpr int kPart = 32, kValues = kPart / 2;  // columns that a warp finishes at once; a lane's numbers

// values += the numbers of the matrix `p` from (row, col) on.
DEVICE void add_matrix(const void* p, int dtype, const MatrixStrides& strides,
                       const EpilogueParams& params, int row, int col, float (&values)[kValues]) {
#pragma unroll
    for (int i = 0; i < kValues; i += 2) {
        const int at_row = row + wgmma_row(threadIdx.x % 32, i);
        const int at_col = col + wgmma_col(threadIdx.x, i);
        if (at_row >= params.m || at_col >= params.n) continue;
        float pair[2] = {values[i], values[i + 1]};
        Epilogue::add(p, dtype, strides, at_row, at_col, at_col + 1 < params.n ? 2 : 1, pair);
        values[i] = pair[0];
        values[i + 1] = pair[1];
    }
}

// The epilogue of the warp's sums, in registers, and their way to memory by TMA.  (row, col): of the
// warp's first one.  box: the box to fill next.
DEVICE void store_boxes(Staging& staging, int& box, const TensorMap& map, const Epilogue& epilogue,
                        const TileVectors& vectors, int row, int col, int batch,
                        const float (&sums)[kBlocks][kTileN / 2]) {
    constexpr int kParts = kTileN / kPart, kPartsOfBox = kChunk / kPart;
    const EpilogueParams& params = epilogue.params;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int part = 0; part < kBlocks * kParts; ++part) {
        const int half_of_box = part % kPartsOfBox, block = part / kParts;
        const int first_row = row + 64 * block, first_col = col + part % kParts * kPart;
        float values[kValues], col_bias[2], col_scale[2], row_bias[2], row_scale[2];
#pragma unroll
        for (int p = 0; p < kBlocks * kParts; ++p) {
            if (p != part) continue;
#pragma unroll
            for (int i = 0; i < kValues; ++i) {
                values[i] = sums[p / kParts][p % kParts * kValues + i];
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                col_bias[i] = vectors.col_bias.pairs[p % kParts / kPartsOfBox][i];
                row_bias[i] = vectors.row_bias.rows[p / kParts][i];
                if (!kScales) continue;
                col_scale[i] = vectors.col_scale.pairs[p % kParts / kPartsOfBox][i];
                row_scale[i] = vectors.row_scale.rows[p / kParts][i];
            }
        }
        // The factors and addends of value i's column, which is value i + 2's too.
        const auto of_col = [&](const float(&pair)[2], int i) {
            return shuffle(pair[i % 2], half_of_box * kPart / 2 + i / 4 * 4 + lane % 4);
        };
        if (kScales && epilogue.scale_b) {
#pragma unroll
            for (int i = 0; i < kValues; ++i) {
                if (i / 2 % 2 == 1) continue;
                const float factor = of_col(col_scale, i);
                values[i] *= factor;
                values[i + 2] *= factor;
            }
        }
        if (kScales && epilogue.scale_a) {
#pragma unroll
            for (int i = 0; i < kValues; ++i) values[i] *= row_scale[i / 2 % 2];
        }
#pragma unroll
        for (int i = 0; i < kValues; ++i) values[i] = values[i] * params.alpha + row_bias[i / 2 % 2];
        if (epilogue.bias_of_cols()) {
#pragma unroll
            for (int i = 0; i < kValues; ++i) {
                if (i / 2 % 2 == 1) continue;
                const float added = of_col(col_bias, i);
                values[i] += added;
                values[i + 2] += added;
            }
        } else if (epilogue.bias && !epilogue.bias_of_rows()) {
            add_matrix(epilogue.bias, params.bias_dtype, params.bias, params, first_row, first_col,
                       values);
        }
        activate_all(values, params.activation);
        if (epilogue.residual) {
            add_matrix(epilogue.residual, params.residual_dtype, params.residual, params, first_row,
                       first_col, values);
        }
        uint32_t packed[kPart / 16][4];
#pragma unroll
        for (int i = 0; i < kValues; i += 2) {
            packed[i / 8][i / 2 % 4] = params.out_dtype == kHalf
                                           ? pack<half>(values[i], values[i + 1])
                                           : pack<bf16>(values[i], values[i + 1]);
        }
        unsigned char* to = staging.boxes[box];
        if (half_of_box == 0) {
            if (lane == 0) tma_store_wait_read<1>();
            sync_warp();
        }
#pragma unroll
        for (int j = 0; j < kPart / 16; ++j) {
            const int line = lane % 16, place = half_of_box * 4 + 2 * j + lane / 16;
            store_matrix(to + line * kLineBytes + (place ^ line % 8) * 16, packed[j]);
        }
        if (half_of_box == kPartsOfBox - 1) {
            fence_async_proxy();
            sync_warp();
            if (lane == 0) {
                tma_store(map, to, {first_col - half_of_box * kPart, first_row, batch});
                tma_store_commit();
            }
            box ^= 1;
        }
    }
}

// The epilogue of the warp's sums, by way of shared memory.
DEVICE void store_runs(Staging& staging, const Epilogue& epilogue, int row, int col,
                       const float (&sums)[kBlocks][kTileN / 2]) {
    constexpr int kChunks = kTileN / kChunk;
    constexpr int kRun = 8;
    const int lane = threadIdx.x % 32;
    // A run's place in its row is permuted, so that lanes spread over the banks.
    const auto place = [&](int r, int run) { return &staging.chunk[r][(run ^ r % 8) * kRun]; };
#pragma unroll 1
    for (int chunk = 0; chunk < kBlocks * kChunks; ++chunk) {
        sync_warp();  // what was here has been read
#pragma unroll
        for (int c = 0; c < kBlocks * kChunks; ++c) {
            if (c != chunk) continue;
#pragma unroll
            for (int i = 0; i < kChunk / 2; i += 2) {
                const float* pair = &sums[c / kChunks][c % kChunks * kChunk / 2 + i];
                float* p = place(lane / 4 + i / 2 % 2 * 8, i / 4) + lane % 4 * 2;
                *reinterpret_cast<Bytes<8>*>(p) = {bit_cast<uint32_t>(pair[0]),
                                                   bit_cast<uint32_t>(pair[1])};
            }
        }
        sync_warp();
#pragma unroll 1
        for (int r = lane / 8; r < kWarpRows; r += 4) {
            Vector<float, kRun> vector;
            vector.load(place(r, lane % 8));
            float run[kRun];
#pragma unroll
            for (int i = 0; i < kRun; ++i) run[i] = vector[i];
            epilogue.store(row + chunk / kChunks * 64 + r,
                           col + chunk % kChunks * kChunk + lane % 8 * kRun, run);
        }
    }
}

KERNEL void gemm_hopper(GRID_CONSTANT TensorMap a_map, GRID_CONSTANT TensorMap b_map,
                        GRID_CONSTANT TensorMap out_map, void* out, const void* bias,
                        const void* residual, const float* scale_a, const float* scale_b,
                        const HopperParams params) {
    SHARED_STORAGE(HopperStorage, storage);
    Ring& ring = storage.ring;
    if (threadIdx.x == 0) ring.init();
    sync_block();
    const int num_tiles = int(params.tiles_m * params.tiles_n * params.batch_size);
    const int num_k_tiles = int(params.num_k_tiles), step = gridDim.x;
    const auto task_of = [&](int tile) {
        return GemmTask::of_block(tile, uint32_t(params.tiles_m), uint32_t(params.tiles_n),
                                  uint32_t(params.batch_size), kTileM, kTileN,
                                  uint32_t(params.group_height));
    };
    RingPlace place;
    const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32;
    if (warpgroup == kConsumers) {
        decrease_registers<kProducerRegisters>();
        if (warp == 4 * kConsumers && elect_one()) {
            for (int tile = blockIdx.x; tile < num_tiles; tile += step) {
                const GemmTask task = task_of(tile);
                load_tiles(ring, place, a_map, b_map, num_k_tiles, int(task.row), int(task.col),
                           int(params.batch.offset(kA, task.batch)),
                           int(params.batch.offset(kB, task.batch)));
            }
        }
        sync_warp();
    } else {
        increase_registers<kConsumerRegisters>();
        Staging& staging = storage.staging[warp];
        const int turn = kPingPong ? warpgroup : 0, turns = kPingPong ? kConsumers : 1;
        const int row_in_tile = kPingPong ? 0 : warpgroup * kConsumerRows;
        place.skip(turn * num_k_tiles);
        int count = 0, box = 0;
        for (int tile = blockIdx.x + turn * step; tile < num_tiles; tile += turns * step) {
            const GemmTask task = task_of(tile);
            const auto offset = [&](Operand operand) {
                return params.batch.offset(operand, task.batch);
            };
            const int row = int(task.row) + row_in_tile + warp % 4 * kWarpRows;
            const int col = int(task.col);
            const auto make_epilogue = [&] {
                return Epilogue::of_matrix(params.epilogue, out, bias, residual, scale_a, scale_b,
                                           offset(kOut), offset(kBias), offset(kResidual),
                                           offset(kScaleA), offset(kScaleB));
            };
            TileVectors vectors;
            if (params.tma_stores) vectors.load(make_epilogue(), row, col);
            float sums[kBlocks][kTileN / 2];
            multiply(ring, place, num_k_tiles, warpgroup, count++, row_in_tile, sums);
            place.skip((turns - 1) * num_k_tiles);
            const Epilogue epilogue = make_epilogue();
            if (params.tma_stores) {
                store_boxes(staging, box, out_map, epilogue, vectors, row, col, int(offset(kOut)),
                            sums);
            } else {
                store_runs(staging, epilogue, row, col, sums);
            }
        }
        if (threadIdx.x % 32 == 0) tma_store_wait_read<0>();
        sync_warp();
    }
}
