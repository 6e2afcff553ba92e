// gemm_hopper.cu: gemm.cu's products on Hopper: out = activation(alpha * (A @ B) + bias) + residual.
//
// As many blocks as the GPU runs at once walk through the tiles; the loads of a block's next tile begin
// while it finishes one.  A warp finishes 16 rows at a time: where nothing but alpha is to be applied and
// TMA can store the output, by TMA; else in runs of neighbouring columns (parts/epilogue.cuh).
// Constants: those of parts/mainloop_hopper.cuh.
// Launch: grid (a multiple of kClusterSize), block (kNumThreads = 384), dynamic shared memory
// sizeof(HopperStorage).  Tensor maps: (batch, m, k) of A and (batch, n, k) of B, or with their last two
// dims swapped where kOuterMajor; (batch, m, n) of out, boxes of 16 x 64.  The maps' batch is
// BatchLayout's offset of kA, kB and kOut.
#include "parts/epilogue.cuh"
#include "parts/gemm_task.cuh"
#include "parts/mainloop_hopper.cuh"

struct HopperParams {
    BatchLayout batch;
    int64_t batch_size, num_k_tiles, tiles_m, tiles_n;  // tiles_m: of a cluster's height
    EpilogueParams epilogue;
    int32_t tma_stores, group_height;  // in tiles (GemmTask::of_block)
};

constexpr int kChunk = 64;  // columns that a warp finishes at once
constexpr int kWarpRows = 16;
constexpr int kBoxes = kTileN / kChunk % 2 == 0 ? 2 : 1;  // that a warp fills in turn

// A warp's way to memory: boxes that TMA stores, or one chunk in FP32.
union Staging {
    unsigned char boxes[kBoxes][kWarpRows * kLineBytes];
    float chunk[kWarpRows][kChunk];
};

struct HopperStorage {
    Staging staging[4 * kConsumers];
    Ring ring;
};

// Rounds the sums to T and stores them by TMA.  (row, col): of the warp's first one.
template <class T>
DEVICE void store_boxes(Staging& staging, const TensorMap& map, int row, int col, int batch,
                        float alpha, const float (&sums)[kTileN / 2]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int chunk = 0; chunk < kTileN / kChunk; ++chunk) {
        unsigned char* box = staging.boxes[chunk % kBoxes];
        if (lane == 0) tma_store_wait_read<kBoxes - 1>();
        sync_warp();
#pragma unroll
        for (int j = 0; j < kChunk / 16; ++j) {
            uint32_t packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* pair = &sums[chunk * kChunk / 2 + 8 * j + 2 * i];
                packed[i] = pack<T>(pair[0] * alpha, pair[1] * alpha);
            }
            const int line = lane % 16, part = 2 * j + lane / 16;
            store_matrix(box + line * kLineBytes + (part ^ line % 8) * 16, packed);
        }
        fence_async_proxy();
        sync_warp();
        if (lane == 0) {
            tma_store(map, box, {col + chunk * kChunk, row, batch});
            tma_store_commit();
        }
    }
}

// The epilogue of the warp's sums, by way of shared memory.
DEVICE void store_runs(Staging& staging, const Epilogue& epilogue, int row, int col,
                       const float (&sums)[kTileN / 2]) {
    constexpr int kRun = 8;
    const int lane = threadIdx.x % 32;
    // A run's place in its row is permuted, so that lanes spread over the banks.
    const auto place = [&](int r, int run) { return &staging.chunk[r][(run ^ r % 8) * kRun]; };
#pragma unroll 1
    for (int chunk = 0; chunk < kTileN / kChunk; ++chunk) {
        sync_warp();  // what was here has been read
#pragma unroll
        for (int c = 0; c < kTileN / kChunk; ++c) {
            if (c != chunk) continue;
#pragma unroll
            for (int i = 0; i < kChunk / 2; i += 2) {
                const float* pair = &sums[c * kChunk / 2 + i];
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
            epilogue.store(row + r, col + chunk * kChunk + lane % 8 * kRun, run);
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
    if constexpr (kClusterSize > 1) {
        cluster_arrive();
        cluster_wait();
    } else {
        sync_block();
    }
    const int num_tiles = int(params.tiles_m * params.tiles_n * params.batch_size);
    const int num_k_tiles = int(params.num_k_tiles), rank = cluster_rank();
    const int step = gridDim.x / kClusterSize;
    const auto task_of = [&](int tile) {
        GemmTask task = GemmTask::of_block(tile, uint32_t(params.tiles_m), uint32_t(params.tiles_n),
                                           uint32_t(params.batch_size), kTileM * kClusterSize, kTileN,
                                           uint32_t(params.group_height));
        task.row += rank * kTileM;
        return task;
    };
    RingPlace place;
    const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32;
    if (warpgroup == kConsumers) {
        decrease_registers<56>();  // 56 + 2 * 224 = 3 * 168, with which a block of 384 begins
        if (warp == 4 * kConsumers && elect_one()) {
            for (int tile = blockIdx.x / kClusterSize; tile < num_tiles; tile += step) {
                const GemmTask task = task_of(tile);
                load_tiles(ring, place, a_map, b_map, num_k_tiles, int(task.row), int(task.col),
                           int(params.batch.offset(kA, task.batch)),
                           int(params.batch.offset(kB, task.batch)));
            }
        }
        sync_warp();
    } else {
        increase_registers<224>();
        Staging& staging = storage.staging[warp];
        const int turn = kPingPong ? warpgroup : 0, turns = kPingPong ? kConsumers : 1;
        const int row_in_tile = kPingPong ? 0 : warpgroup * kConsumerRows;
        place.skip(turn * num_k_tiles);
        int count = 0;
        for (int tile = blockIdx.x / kClusterSize + turn * step; tile < num_tiles;
             tile += turns * step) {
            const GemmTask task = task_of(tile);
            float sums[kBlocks][kTileN / 2];
            multiply(ring, place, num_k_tiles, warpgroup, count++, row_in_tile, sums);
            place.skip((turns - 1) * num_k_tiles);
            const auto offset = [&](Operand operand) {
                return params.batch.offset(operand, task.batch);
            };
            const int row = int(task.row) + row_in_tile + warp % 4 * kWarpRows;
            const int col = int(task.col);
            const int64_t out_offset = offset(kOut);
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
                if (params.tma_stores) {
                    const float alpha = params.epilogue.alpha;
                    if (params.epilogue.out_dtype == kHalf) {
                        store_boxes<half>(staging, out_map, row + 64 * block, col, int(out_offset),
                                          alpha, sums[block]);
                    } else {
                        store_boxes<bf16>(staging, out_map, row + 64 * block, col, int(out_offset),
                                          alpha, sums[block]);
                    }
                } else {
                    const Epilogue epilogue = Epilogue::of_matrix(
                        params.epilogue, out, bias, residual, scale_a, scale_b, out_offset,
                        offset(kBias), offset(kResidual), offset(kScaleA), offset(kScaleB));
                    store_runs(staging, epilogue, row + 64 * block, col, sums[block]);
                }
            }
        }
        if (threadIdx.x % 32 == 0) tma_store_wait_read<0>();
        sync_warp();
    }
    if constexpr (kClusterSize > 1) {  // others still load into this block and arrive here
        cluster_arrive();
        cluster_wait();
    }
}
