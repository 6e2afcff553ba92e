// The skinny GEMM for logits: the producer's loads, the consumers' tiles, and the merge of the
// warps' statistics.
#pragma once
#include "logits/skinny.cuh"

constexpr int kTileSets = kTileN / kColumns;  // column sets (kSetColumns) of a tile

// Loads the stages of A and B for the column sets [first_set, last_set), by one thread.
DEVICE void load_stages(SkinnyLogitsStorage& storage, const SkinnyLogitsParams& params,
                        const TensorMap& a_map, const TensorMap& b_map, int first_set, int last_set,
                        pipeline::PipelineState<kStages>& state) {
    const int num_k_tiles = int(params.num_k_tiles);
    for (int set = first_set; set < last_set; set += kTileSets) {
        const int sets = last_set - set < kTileSets ? last_set - set : kTileSets;
#pragma unroll 1
        for (int i = 0; i < num_k_tiles; ++i, state.advance()) {
            SkinnyLogitsStage& stage = storage.stages[state.stage];
            Barrier& full = storage.pipeline.full[state.stage];
            storage.pipeline.producer_acquire(state);
            full.arrive_expect_tx((sets * kColumns + 2 * params.rows) * kSwizzleBytes);
            for (int j = 0; j < sets; ++j) {
                tma_load(stage.cols.bytes + j * kColumns * kSwizzleBytes, b_map, full,
                         {i * kDepth, (set + j) * kColumns, 0});
            }
            tma_load(stage.rows[0].bytes, a_map, full, {i * kDepth, 0, 0});
            tma_load(stage.rows[1].bytes, a_map, full, {i * kDepth + 64, 0, 0});
        }
    }
}

// A warp's columns in the column sets [first_set, last_set): their logits and statistics.
DEVICE void consume_stages(SkinnyLogitsStorage& storage, const SkinnyLogitsParams& params,
                           const MatrixEpilogue& epilogue, int warp, int first_set, int last_set,
                           pipeline::PipelineState<kStages>& state) {
    const int num_k_tiles = int(params.num_k_tiles), num_own = last_set - first_set;
    MaxSum seen{-kInfinity, 0.0f};
    for (int set = first_set; set < last_set; set += kTileSets) {
        const int own = set - first_set + warp * kWarpCols / kColumns;
        const bool works = own < num_own;
        Accumulator<ElementA> acc[1][2] = {};
#pragma unroll 1
        for (int i = 0; i < num_k_tiles; ++i, state.advance()) {
            const SkinnyLogitsStage& stage = storage.stages[state.stage];
            storage.pipeline.consumer_wait(state);
            if (works) multiply_stage(stage, warp * kWarpCols, acc);
            storage.pipeline.consumer_release(state.stage);
        }
        if (!works) continue;
        store_logits(storage.logits[warp], epilogue, int64_t(set) * kColumns + warp * kWarpCols,
                     acc, seen);
    }
    const int lane = threadIdx.x % 32;
    if (lane % 2 == 0) storage.of_warps[warp][lane / 2] = seen;
}

// Merges the statistics of the warps, in their order.
DEVICE void store_statistics(const SkinnyLogitsStorage& storage, int m, MaxSum* statistics) {
    const MergeMaxSum merge{kLog2E};
    if (threadIdx.x < m) {
        MaxSum total = storage.of_warps[0][threadIdx.x];
#pragma unroll
        for (int i = 1; i < kWarps; ++i) total = merge(total, storage.of_warps[i][threadIdx.x]);
        statistics[threadIdx.x * gridDim.x + blockIdx.x] = total;
    }
}
